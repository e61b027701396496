"""The sizes of a transformers checkpoint, from its config.json alone."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sv.atomic import read_json
from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import BackboneConfig, RopeScalingConfig
from lightning_sv.roles.fake import transformers

#: model_type in config.json -> prefix of transformers' classes
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}


class TheirConfig(NamedTuple):
    """Configuration of a checkpoint that this package can import."""

    family: str  #: prefix of transformers' classes
    config: Any  #: transformers' object


def read_config(folder: Path) -> TheirConfig:
    """Read the config.json of a folder of `save_pretrained`.

    Raises:
        ConfigError: it is not one, or of a different family
    """
    path = folder / "config.json"
    written = read_json(path, "expected a folder written by save_pretrained.")
    kind = str(written.get("model_type"))
    hint = "Use apply_strategy for other models (docs/own-model.md)."
    wanted = f"one of {' '.join(_FAMILIES)}. {hint}"
    expect(kind in _FAMILIES, f"model_type in {folder}", repr(kind), wanted)
    family = _FAMILIES[kind]
    kind_of_config = getattr(transformers(), f"{family}Config")
    try:
        return TheirConfig(family, kind_of_config.from_pretrained(folder))
    except Exception as error:  # the checks of a configuration can raise anything
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} is not a valid config of {family} ({why}).") from error


def backbone_config(folder: str | Path) -> BackboneConfig:
    """Return the sizes of a transformers checkpoint.

    Raises:
        ConfigError: as `read_config`, or the model has a feature that the backbone lacks
    """
    family, theirs = read_config(Path(folder))
    for what, differs in _differences(family, theirs).items():
        if differs:
            hint = "import a different checkpoint."
            raise ConfigError(f"{folder}: {what}, which this backbone does not support; {hint}")
    own_width = theirs.head_dim * theirs.num_attention_heads != theirs.hidden_size
    is_grouped = theirs.num_key_value_heads != theirs.num_attention_heads
    return BackboneConfig(
        d_model=theirs.hidden_size,
        n_layer=theirs.num_hidden_layers,
        n_head=theirs.num_attention_heads,
        n_kv_head=theirs.num_key_value_heads if is_grouped else None,
        vocab_size=theirs.vocab_size,
        d_head=theirs.head_dim if own_width else None,
        d_ff=theirs.intermediate_size,
        qk_norm=family == "Qwen3",
        rope_theta=theirs.rope_parameters["rope_theta"],
        rope_scaling=_rope_scaling(folder, theirs),
        norm_eps=theirs.rms_norm_eps,
    )


def _rope_type(theirs: Any) -> str:
    return str(theirs.rope_parameters.get("rope_type", "default"))


def _rope_scaling(folder: str | Path, theirs: Any) -> RopeScalingConfig | None:
    if _rope_type(theirs) == "default":
        return None
    rope = theirs.rope_parameters
    try:
        return RopeScalingConfig(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"rope_parameters are not a scaling of Llama 3.1 ({error})."
        raise ConfigError(f"{folder}: {what}") from error


def _differences(family: str, theirs: Any) -> dict[str, bool]:
    """Return features that the backbone does not support -> whether this model uses them."""
    has_biases = getattr(theirs, "attention_bias", False) or getattr(theirs, "mlp_bias", False)
    windows = _windows(family, theirs)
    rope_type = _rope_type(theirs)
    rotated = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    return {
        f"its activation is {theirs.hidden_act}, not silu": theirs.hidden_act != "silu",
        "its projections have biases": has_biases,
        f"its layers have {' and '.join(windows)}": bool(windows),
        f"its RoPE is of type {rope_type!r}": rope_type not in ("default", "llama3"),
        "its RoPE rotates only some channels": rotated != 1.0,
        "its weights are quantized": getattr(theirs, "quantization_config", None) is not None,
    }


def _windows(family: str, theirs: Any) -> list[str]:
    """Return the kinds of attention that do not read all tokens before."""
    windows = set(getattr(theirs, "layer_types", None) or []) - {"full_attention"}
    if family == "Mistral":
        window = theirs.sliding_window or math.inf
        if window < theirs.max_position_embeddings:
            windows.add(f"a sliding window of {window:,} tokens")
    return sorted(windows)
