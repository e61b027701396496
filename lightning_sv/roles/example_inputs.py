"""Example inputs of the traced call: given, or token ids, images and sounds made from a configuration."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone
from lightning_sv.roles.trace import run_method

TOKENS = 16
#: samples of a sound: one second at 16 kHz
_SAMPLES = 16000
#: frames of a spectrogram, if the configuration has no number of positions
_FRAMES = 512
#: limits of a setting used as a size, of the elements of an image or a sound, and of its embeddings
_MAX_SIZE, _MAX_NUMBERS, _MAX_EMBEDDINGS = 8192, 2**28, 2**14
#: image and sound: the method that returns their embeddings, the setting of the token before them and, under
#: two names, that of the placeholder token of each embedding
_PLACEHOLDERS = {
    "image": ("get_image_features", "vision_start_token_id", ("image_token_id", "image_token_index")),
    "audio": ("get_audio_features", "audio_start_token_id", ("audio_token_id", "audio_token_index")),
}


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call, from the example or the model's config.

    Raises:
        ConfigError: there is no example, and none can be made; a model on the meta device; lazy parameters
    """
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"parameter {lazy[0]} has no shape yet, because its module is lazy; call the model once first."
        )
    if any(parameter.is_meta and type(parameter.data) is Tensor for parameter in model.parameters()):
        raise ConfigError(
            "the model is on the meta device, where a forward pass cannot be traced; build it with "
            "fake_model(lambda: ...) instead, which needs no memory either."
        )
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if example is not None:
        return (example,), {}
    if isinstance(model, Backbone):
        return (token_ids(model.config.vocab_size).to(next(model.parameters()).device),), {}
    kwargs = _from_config(model)
    if kwargs is None:
        raise ConfigError(
            f"{type(model).__name__} has no config that describes its inputs; call weight_decay_roles in Python with "
            "example=, the tensor, tuple or dict of keywords of its forward."
        )
    return (), kwargs


def _from_config(model: nn.Module) -> dict[str, Any] | None:
    """Return keyword arguments for a transformers model; None if its configuration is insufficient.

    An image or a sound is embedded first: the token ids contain one placeholder token per embedding.
    """
    config, accepted = getattr(model, "config", None), set(inspect.signature(model.forward).parameters)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    inputs: dict[str, Any] = {}
    tokens: list[int] = []
    device = next(model.parameters()).device
    for kind, candidates in (("image", _images(config, accepted)), ("audio", _sounds(config, accepted))):
        method, opening, names = _PLACEHOLDERS[kind]
        embed = getattr(model, method, None)
        token = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        for candidate in candidates:
            if any(value.numel() > _MAX_NUMBERS for value in candidate.values()):
                continue
            candidate = _as_model(model, candidate)
            count = 0 if embed is None or token is None else _embeddings(model, embed, candidate)
            if count is not None:
                inputs |= candidate
                if token is not None:
                    before = getattr(config, opening, None)
                    tokens += [*([before] if isinstance(before, int) else []), *([token] * count)]
                break
    if "input_ids" in accepted:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        inputs["input_ids"] = token_ids(vocabulary, tokens).to(device)
        if "mm_token_type_ids" in accepted and tokens:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == tokens[-1]).long()
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        vocabulary = config.get_text_config(decoder=True).vocab_size
        inputs["decoder_input_ids"] = token_ids(vocabulary).to(device)
    if inputs and hasattr(config.get_text_config(), "use_cache") and ("use_cache" in accepted or "kwargs" in accepted):
        inputs["use_cache"] = False
    return inputs or None


def token_ids(vocabulary: int, inner: list[int] | None = None) -> Tensor:
    """Return (1, 16 + len(inner)) ids; the 16 are none of `inner` and none of 0 to 3, often special tokens."""
    ids = [i for i in range(4, 4 + TOKENS + len(set(inner or []))) if i not in (inner or [])][:TOKENS]
    ids = [i % vocabulary for i in ids]
    return torch.tensor([[*ids[: TOKENS // 2], *(inner or []), *ids[TOKENS // 2 :]]])


def _images(config: Any, accepted: set[str]) -> Iterator[dict[str, Any]]:
    if "pixel_values" not in accepted:
        return
    vision = getattr(config, "vision_config", config)
    channels = _first(vision, "num_channels", "in_channels", "in_chans") or 3
    if "image_grid_thw" in accepted:  # patches, each a row
        patch = _first(vision, "patch_size") or 14
        merged = _first(vision, "spatial_merge_size") or 1
        side, deep = 4 * merged, _first(vision, "temporal_patch_size") or 1
        for depth in {deep: None, 1: None}:
            pixels = _numbers(side * side, channels * depth * patch * patch)
            yield {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
        return
    size = _first(vision, "image_size")
    if size is None:
        return
    sizes = {"image_sizes": torch.tensor([[size, size]])}
    for lead in ((1,), (1, 1), (1, 2), (1, 5)):  # one image, or its tiles
        image = {"pixel_values": _numbers(*lead, channels, size, size)}
        yield image
        if "image_sizes" in accepted:
            yield image | sizes


def _sounds(config: Any, accepted: set[str]) -> Iterator[dict[str, Any]]:
    audio = getattr(config, "audio_config", config)
    if "input_features" in accepted:
        names = ("num_mel_bins", "input_feat_per_channel", "input_feat_size", "feature_projection_input_dim")
        bins = _first(audio, *names) or _first(getattr(config, "encoder_config", None), *names)
        if bins is None:
            return
        positions = _first(audio, "max_source_positions")
        frames = 2 * positions if positions else _FRAMES
        shapes = [(1, bins, frames), (1, frames, bins)]
        if not positions or hasattr(audio, "input_feat_per_channel"):
            shapes.reverse()
        for shape in shapes:
            masks = [name for name in ("input_features_mask", "feature_attention_mask") if name in accepted]
            yield {"input_features": _numbers(*shape)} | {name: torch.ones(1, frames).long() for name in masks}
    elif "input_values" in accepted:
        yield {"input_values": _numbers(1, _SAMPLES)}


def _numbers(*shape: int) -> Tensor:
    """Return ones without memory, because zeros would be treated as padding."""
    return torch.ones(()).expand(shape)


def _embeddings(model: nn.Module, embed: Callable[..., Any], candidate: dict[str, Any]) -> int | None:
    """Return the number of embeddings of an image or a sound; None if the model rejects this layout."""
    names = inspect.signature(embed).parameters
    try:
        out = run_method(model, embed, {k: value for k, value in candidate.items() if k in names or "args" in names})
    except Exception:  # models can raise anything for a wrong layout
        return None
    rows = getattr(out, "pooler_output", out)
    parts: list[Any] = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    if not all(isinstance(part, Tensor) and part.ndim > 1 for part in parts):
        return None
    count = sum(part.shape[:-1].numel() for part in parts)
    return count if count <= _MAX_EMBEDDINGS else None


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        if isinstance(value, int) and 0 < value <= _MAX_SIZE:
            return value
    return None


def _as_model(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    parameter = next(model.parameters())
    return {
        name: value.to(device=parameter.device, dtype=parameter.dtype if value.is_floating_point() else None)
        for name, value in given.items()
    }
