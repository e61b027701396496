"""Import of transformers models (Llama, Mistral, Qwen 3, Gemma 3) as backbones with the same logits."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv.atomic import read_json, reading, regular
from lightning_sv.corpus.tokenizer import Tokenizer, read_file
from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.fold import check_no_norm, unfold
from lightning_sv.interop.groups import WRAPPERS
from lightning_sv.interop.hf.convert import their_names
from lightning_sv.interop.hf.save import SAMPLE, checked_difference
from lightning_sv.nn import Backbone, BackboneConfig, RopeScalingConfig
from lightning_sv.roles.fake import transformers
from lightning_sv.scale import ScaleOptions, ScaleStrategy

_SIZES = (
    "d_model", "n_layer", "n_head", "kv_heads", "vocab_size", "head_width", "ffn_width", "n_expert", "qk_norm",
    "post_norm", "rope_theta", "rope_scaling", "norm_eps",
)  # fmt: skip
#: model_type in config.json -> prefix of transformers' classes
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}


def from_hugging_face(
    folder: str | Path, scale: str | ScaleStrategy = "llama", options: ScaleOptions | None = None
) -> Backbone:
    """Return a backbone with the logits of a transformers checkpoint, in float32.

    An lm_head tied to the embedding gets its own copy: the same function with more parameters.

    Args:
        folder: folder written by `save_pretrained`: config.json and *.safetensors; its code is not run
        scale: any strategy that preserves the function, that is, without `dnp`
        options: further options of the strategy

    Raises:
        ConfigError: there is no such checkpoint, the backbone does not support its model, or the strategy would change
            the function
    """
    model = Backbone(backbone_config(folder), scale, options)
    load_hugging_face(model, folder)
    return model


def backbone_config(folder: str | Path) -> BackboneConfig:
    """Return the sizes of a transformers checkpoint, from its config.json alone."""
    family, theirs = _config(Path(folder))
    for what, differs in _differences(family, theirs).items():
        if differs:
            raise ConfigError(f"{folder}: {what}, which this backbone does not support; import a different checkpoint.")
    own_width = theirs.head_dim * theirs.num_attention_heads != theirs.hidden_size
    return BackboneConfig(
        d_model=theirs.hidden_size,
        n_layer=theirs.num_hidden_layers,
        n_head=theirs.num_attention_heads,
        n_kv_head=None if theirs.num_key_value_heads == theirs.num_attention_heads else theirs.num_key_value_heads,
        vocab_size=theirs.vocab_size,
        d_head=theirs.head_dim if own_width else None,
        d_ff=theirs.intermediate_size,
        qk_norm=family in ("Qwen3", "Gemma3"),
        post_norm=family == "Gemma3",
        rope_theta=_rope(theirs)["rope_theta"],
        rope_scaling=_rope_scaling(folder, theirs),
        norm_eps=theirs.rms_norm_eps,
    )


def check_start(model: Backbone, folder: str | Path) -> None:
    """Check that a backbone, also on the meta device, can load a transformers checkpoint."""
    check_no_norm(model)
    expected = backbone_config(folder)
    for name in _SIZES:
        actual, required = getattr(model.config, name), getattr(expected, name)
        expect(actual == required, name, actual, f"{required}, as in {folder}.")


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Check that a corpus has the tokenizer of a transformers model, if its folder has one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    theirs = Tokenizer(read_file(path), str(path), tokenizer.eot_token)
    if theirs.encode(SAMPLE) != tokenizer.encode(SAMPLE) or theirs.vocab_size != tokenizer.vocab_size:
        hint = f"prepare the corpus with --data.corpus.tokenizer {path}."
        raise ConfigError(f"the tokenizer of the corpus differs from that of {folder}; {hint}")


@torch.no_grad()
def load_hugging_face(model: Backbone, folder: str | Path) -> float:
    """Fill a backbone from a transformers checkpoint of its sizes; return the relative difference of their logits."""
    folder = Path(folder)
    check_start(model, folder)
    family, config = _config(folder)
    theirs = _open(folder, family)
    state = theirs.state_dict()
    names = their_names(family, config.num_hidden_layers)
    ours: dict[str, Tensor] = {mine: state[hers].clone() for mine, hers in names.items()}
    norms = {name: ours.pop(name) for name in list(ours) if not name.endswith(".weight")}
    if family == "Gemma3":  # 1 + w, and a factor on the embedding
        norms = {name: 1 + value for name, value in norms.items()}
        ours["embed.weight"] *= theirs.model.embed_tokens.embed_scale
    unfold(model, ours, norms)
    return checked_difference(model, theirs, config.max_position_embeddings)


def _config(folder: Path) -> tuple[str, Any]:
    path = folder / "config.json"
    kind = str(read_json(path, "expected a folder written by save_pretrained.").get("model_type"))
    known = f"one of {' '.join(_FAMILIES)}. Use apply_strategy for other models (docs/own-model.md)."
    expect(kind in _FAMILIES, f"model_type in {folder}", repr(kind), known)
    family = _FAMILIES[kind]
    config_of = getattr(transformers(), f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    try:
        return family, config_of.from_pretrained(folder)
    except Exception as error:  # the checks of a configuration can raise anything
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} is not a valid config of {family} ({why}).") from error


def _rope(theirs: Any) -> Any:
    return theirs.rope_parameters.get("full_attention", theirs.rope_parameters)


def _rope_scaling(folder: str | Path, theirs: Any) -> RopeScalingConfig | None:
    rope = _rope(theirs)
    if rope.get("rope_type", "default") == "default":
        return None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    try:
        return RopeScalingConfig(*(rope[key] for key in keys))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: rope_parameters are not a scaling of Llama 3.1 ({error}).") from error


def _differences(family: str, theirs: Any) -> dict[str, bool]:
    """Return features that the backbone does not support -> whether this model uses them."""
    activation = theirs.hidden_activation if family == "Gemma3" else theirs.hidden_act
    rope, windows = _rope(theirs), set(getattr(theirs, "layer_types", None) or []) - {"full_attention"}
    if family == "Mistral" and (theirs.sliding_window or math.inf) < theirs.max_position_embeddings:
        windows.add(f"a sliding window of {theirs.sliding_window:,} tokens")
    features = {
        f"its activation is {activation}, not silu": activation != "silu",
        "its projections have biases": any(getattr(theirs, key, False) for key in ("attention_bias", "mlp_bias")),
        f"its layers have {' and '.join(sorted(windows))}": bool(windows),
        f"its RoPE is of type {rope.get('rope_type')!r}": rope.get("rope_type", "default") not in ("default", "llama3"),
        "its RoPE rotates only some channels": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "its weights are quantized": getattr(theirs, "quantization_config", None) is not None,
    }
    if family == "Gemma3":
        scalar, caps = theirs.query_pre_attn_scalar, (theirs.final_logit_softcapping, theirs.attn_logit_softcapping)
        features |= {
            f"its scores are divided by the root of {scalar}, not of the head width": scalar != theirs.head_dim,
            "its logits are capped": caps != (None, None),
            "its attention is bidirectional": bool(theirs.use_bidirectional_attention),
        }
    return features


def _open(folder: Path, family: str) -> Any:
    files = [regular(file) for file in folder.iterdir() if not file.is_dir()]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ConfigError(f"{folder} has no *.safetensors; pickled weights are not loaded, because they can run code.")
    for file in files:
        with reading(file), file.open("rb"):  # transformers reports a file that it cannot open as damaged
            pass
    model_of = getattr(transformers(), f"{family}ForCausalLM")
    renamed = {rf"(?<![^.]){word}\.": "" for word in sorted(WRAPPERS)}  # names of compiled or wrapped models
    options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True, "key_mapping": renamed}
    try:
        theirs, info = model_of.from_pretrained(folder, dtype=torch.float32, **options)
    except Exception as error:  # damaged files can raise anything
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"the weights in {folder} cannot be read ({type(error).__name__}: {why}).") from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(key):
            raise ConfigError(f"{folder} is not a complete {family}: {key.replace('_', ' ')} {sorted(info[key])[0]}.")
    return theirs.eval()
