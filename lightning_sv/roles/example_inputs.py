"""Example inputs of the traced call: given, or made from a configuration.

A transformers model shows in the arguments of its forward which inputs it takes, and in its
configuration their sizes:

    input_ids                       16 tokens; for an image, its token once per embedding among them
    pixel_values                    one image of image_size, or its patches and their grid
    input_features, input_values    speech, as a spectrogram or as a waveform

Roles do not depend on the values, so images and speech are a 1, expanded without memory.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import UninitializedParameter

from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import Backbone
from lightning_sv.roles.trace import run_method

TOKENS = 16
#: frames of speech features
_FRAMES = 64
#: samples of a waveform: a second at 16 kHz
_SAMPLES = 16_000
#: limit of a setting used as a size
_MAX_SIZE = 8192


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call, from the example or the model's config.

    Raises:
        ConfigError: the model cannot be traced, or nothing describes its inputs
    """
    check_module(model)
    _check_tensors(model)
    if example is not None:
        return _given(example)
    model = uncompiled(model)
    if isinstance(model, Backbone):
        ids = token_ids(model.config.vocab_size)
        return (ids.to(next(model.parameters()).device),), {}
    kwargs = _from_config(model)
    if not kwargs:
        what = f"{type(model).__name__} has no config that describes its inputs"
        hint = "pass example=, the tensor, tuple or dict of keywords of its forward."
        raise ConfigError(f"{what}; {hint} Commands need a config.")
    return (), kwargs


def _given(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    return (example,), {}


def _check_tensors(model: nn.Module) -> None:
    """Check that all parameters are plain or fake tensors."""
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        is_plain = kind is Tensor
        if is_plain and parameter.is_meta:
            hint = "build it with fake_model(lambda: ...)."
            raise ConfigError(f"the model is on the meta device, without a trace; {hint}")
        wanted = "a plain tensor. Find roles and apply strategies before you shard or quantize."
        expect(is_plain or is_fake(parameter), name, f"a {kind.__name__}", wanted)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which forwards attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def check_module(model: object) -> None:
    """Check that `model` is a module with parameters, not its class or its name.

    Raises:
        ConfigError: it is not, or its modules are lazy, or scripted
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        found = model if isinstance(model, str | type) else f"a {name}"
        wanted = "an nn.Module, not its class or its name."
        raise ConfigError(f"model is {found}; expected {wanted}")
    for module in model.modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        found = "one with modules of torch.jit.script"
        expect(not is_scripted, "model", found, "a model in Python.")
    parameters = list(model.parameters())
    for parameter in parameters:
        is_lazy = isinstance(parameter, UninitializedParameter)
        wanted = "one without lazy modules. Run a forward pass first."
        expect(not is_lazy, "model", f"{name} with lazy modules", wanted)
    if not parameters:
        hint = "A LightningModule may create them in configure_model(); call it first."
        wanted = f"a model with parameters. {hint}"
        raise ConfigError(f"model is {name} without parameters; expected {wanted}")


def _from_config(model: nn.Module) -> dict[str, Any]:
    """Return keyword arguments for a transformers model; empty if its config is insufficient.

    Raises:
        ConfigError: the model rejects images of its configuration, or needs a different kind of
            input
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return {}
    return _Inputs(model, config).keyword_arguments()


class _Inputs:
    """Inputs that fit a transformers configuration, with the device and dtype of the model."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.model = model
        self.config = config
        self.accepted = _accepted_names(model)
        self.like = next(model.parameters())

    def keyword_arguments(self) -> dict[str, Any]:
        """Return the arguments of forward; empty if the config does not describe them."""
        image = self._image()
        inputs = image | self._speech()
        image_tokens = self._tokens_of_image(image)
        if "input_ids" in self.accepted:
            vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
            if not isinstance(vocabulary, int):
                return {}  # an image or speech alone would not run
            inputs |= self._text(vocabulary, image_tokens)
        self._check_main_input(inputs)
        inputs |= self._text_of_decoder()
        if inputs and self._has_cache():
            inputs["use_cache"] = False
        return inputs

    def _text(self, vocabulary: int, image_tokens: list[int]) -> dict[str, Any]:
        """Return token ids, with those that stand for an image."""
        ids = token_ids(vocabulary, image_tokens).to(self.like.device)
        inputs = {"input_ids": ids}
        if image_tokens and "mm_token_type_ids" in self.accepted:
            inputs["mm_token_type_ids"] = ids.eq(image_tokens[-1]).long()
        return inputs

    def _tokens_of_image(self, image: dict[str, Any]) -> list[int]:
        """Return the token ids of an image, one per embedding."""
        token = _image_token(self.config)
        if token is None or not image:
            return []
        n_embeddings = _checked_embeddings(self.model, image)
        tokens = [token] * n_embeddings
        before = getattr(self.config, "vision_start_token_id", None)
        if tokens and isinstance(before, int):
            tokens.insert(0, before)
        return tokens

    def _text_of_decoder(self) -> dict[str, Any]:
        """Return the tokens of a decoder; empty without an encoder before it."""
        has_encoder = getattr(self.config, "is_encoder_decoder", False)
        if not has_encoder or "decoder_input_ids" not in self.accepted:
            return {}
        vocabulary = self.config.get_text_config(decoder=True).vocab_size
        return {"decoder_input_ids": token_ids(vocabulary).to(self.like.device)}

    def _has_cache(self) -> bool:
        takes_option = not self.accepted.isdisjoint({"use_cache", "kwargs"})
        return takes_option and hasattr(self.config.get_text_config(), "use_cache")

    def _check_main_input(self, inputs: dict[str, Any]) -> None:
        """Check that the input that transformers names first is among those made."""
        name = getattr(self.model, "main_input_name", None)
        if name in self.accepted and name not in inputs:
            why = "which cannot be made from its config; expected token ids, an image or speech"
            hint = "Pass example= to weight_decay_roles; commands have none."
            raise ConfigError(f"{type(self.model).__name__} needs {name}, {why}. {hint}")

    def _ones(self, *shape: int) -> Tensor:
        """Return ones without memory; zeros would be padding."""
        one = torch.ones((), device=self.like.device, dtype=self.like.dtype)
        return one.expand(*shape)

    def _speech(self) -> dict[str, Any]:
        """Return the input of a speech model."""
        bins = _first(self.config, "num_mel_bins")
        features = self._features(bins)
        takes_waveform = "input_values" in self.accepted and not bins
        if takes_waveform and not features:
            return {"input_values": self._ones(1, _SAMPLES)}
        return features

    def _features(self, bins: int | None) -> dict[str, Any]:
        """Return the spectrogram of a speech model; empty without its sizes."""
        if "input_features" not in self.accepted:
            return {}
        frames = _first(self.config, "max_source_positions")
        if bins and frames:
            # (batch, bins, frames), and a convolution of stride 2 follows
            return {"input_features": self._ones(1, bins, 2 * frames)}
        features = _first(self.config, "input_feat_per_channel")
        if features:
            return {"input_features": self._ones(1, _FRAMES, features)}
        return {}

    def _image(self) -> dict[str, Any]:
        """Return the inputs of an image."""
        if "pixel_values" not in self.accepted:
            return {}
        vision = getattr(self.config, "vision_config", self.config)
        if "image_grid_thw" in self.accepted:
            return self._patches(vision)
        size = _first(vision, "image_size")
        if size is None:
            return {}
        return {"pixel_values": self._ones(1, _channels(vision), size, size)}

    def _patches(self, vision: Any) -> dict[str, Any]:
        """Return an image as patches, each a row."""
        patch = _first(vision, "patch_size") or 14
        side = 4 * (_first(vision, "spatial_merge_size") or 1)
        frames = _first(vision, "temporal_patch_size") or 1
        numbers = _channels(vision) * frames * patch * patch
        return {
            "pixel_values": self._ones(side * side, numbers),
            "image_grid_thw": torch.tensor([[1, side, side]], device=self.like.device),
        }


def _accepted_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    unwrap: Any = getattr(model, "get_base_model", None)  # PEFT's forward takes anything
    inner: Any = model if unwrap is None else unwrap()
    return set(inspect.signature(inner.forward).parameters)


def _image_token(config: Any) -> int | None:
    """Return the token that stands for an embedding of an image."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def _checked_embeddings(model: nn.Module, image: dict[str, Any]) -> int:
    """Return the number of embeddings of an image.

    Raises:
        ConfigError: the model rejects it
    """
    try:
        return _embeddings(model, image)
    except Exception as error:  # models can raise anything for a wrong layout
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        what = f"{type(model).__name__} accepts no image of the size in its config ({why})"
        hint = "Correct vision_config, or pass example= to weight_decay_roles."
        raise ConfigError(f"{what}. {hint}") from error


def token_ids(vocabulary: int, inner: Sequence[int] = ()) -> Tensor:
    """Return (1, 16 + len(inner)) ids, with `inner` in the middle.

    The 16 differ from `inner` and from 0 to 3, often special tokens.
    """
    candidates = (i for i in count(4) if i not in inner)
    ids = [i % vocabulary for i in islice(candidates, TOKENS)]
    half = TOKENS // 2
    return torch.tensor([[*ids[:half], *inner, *ids[half:]]])


def _channels(vision: Any) -> int:
    return _first(vision, "num_channels", "in_channels", "in_chans") or 3


def _embeddings(model: nn.Module, image: dict[str, Any]) -> int:
    """Return the number of embeddings of an image."""
    embed: Any = getattr(model, "get_image_features", None)
    if embed is None:
        return 0
    out = run_method(model, embed, image)
    rows = getattr(out, "pooler_output", out)
    if isinstance(rows, Tensor):
        return rows.shape[:-1].numel()
    return sum(part.shape[:-1].numel() for part in rows)


def _first(config: Any, *names: str) -> int | None:
    """Return the first of some settings that is a size."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value <= _MAX_SIZE:
            return value
    return None
