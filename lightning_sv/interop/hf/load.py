"""A Llama, Mistral, Qwen 3 or Gemma 3 of transformers as a backbone with the same logits, to go on training."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv.atomic import regular
from lightning_sv.errors import ConfigError
from lightning_sv.interop.fold import check_no_norm, unfold
from lightning_sv.interop.groups import WRAPPERS
from lightning_sv.interop.hf.convert import transformers
from lightning_sv.interop.hf.families import keys
from lightning_sv.interop.hf.save import compare
from lightning_sv.nn import Backbone, BackboneConfig, RopeScalingConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy

_SIZES = (
    "d_model", "n_layer", "n_head", "kv_heads", "vocab_size", "head_width", "ffn_width", "n_expert", "qk_norm",
    "post_norm", "rope_theta", "rope_scaling", "norm_eps",
)  # fmt: skip
#: model_type of a config.json -> start of the names of transformers' classes
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}


def from_hugging_face(
    folder: str | Path, scale: str | ScaleStrategy = "llama", options: ScaleOptions | None = None
) -> Backbone:
    """Return a backbone with the logits of a transformers checkpoint, in float32.

    An lm_head tied to the embedding gets a copy of its own: the function is the same, the parameters are more.

    Args:
        folder: what `save_pretrained` writes: config.json and *.safetensors; no code beside them is run
        scale: any strategy that keeps the function, that is, any without `dnp`
        options: finer choices of the strategy

    Raises:
        ConfigError: there is no such checkpoint, it does something the backbone does not, or the strategy would change
            the function
    """
    model = Backbone(backbone_config(folder), scale, options)
    load_hugging_face(model, folder)
    return model


def backbone_config(folder: str | Path) -> BackboneConfig:
    """Return the sizes of a transformers checkpoint, from its config.json alone.

    Raises:
        ConfigError: see `from_hugging_face`
    """
    family, theirs = _config(Path(folder))
    for what, differs in _differences(family, theirs).items():
        if differs:
            raise ConfigError(f"{folder}: {what}, which this backbone does not have; import another checkpoint.")
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
    """Check that a backbone, which may be on the meta device, can start from a transformers checkpoint.

    Raises:
        ConfigError: see `from_hugging_face`; or the sizes are others
    """
    check_no_norm(model)
    expected = backbone_config(folder)
    for name in _SIZES:
        here, there = getattr(model.config, name), getattr(expected, name)
        if here != there:
            raise ConfigError(f"{folder} has {name} {there}, and this model {here}; use the sizes of the folder.")


@torch.no_grad()
def load_hugging_face(model: Backbone, folder: str | Path) -> float:
    """Fill a backbone from a transformers checkpoint, and compare their logits.

    Args:
        model: as it was initialized, of the checkpoint's sizes
        folder: see `from_hugging_face`

    Returns:
        The norm of the difference of the logits, relative to that of theirs.

    Raises:
        ConfigError: see `from_hugging_face`; or the sizes are others
    """
    folder = Path(folder)
    check_start(model, folder)
    family, config = _config(folder)
    theirs = _open(folder, family)
    state = theirs.state_dict()
    ours: dict[str, Tensor] = {
        mine: state[hers].clone() for mine, hers in keys(family, config.num_hidden_layers).items()
    }
    norms = {name: ours.pop(name) for name in list(ours) if not name.endswith(".weight")}
    if family == "Gemma3":  # 1 + w, and a factor on the embedding
        norms = {name: 1 + value for name, value in norms.items()}
        ours["embed.weight"] *= theirs.model.embed_tokens.embed_scale
    unfold(model, ours, norms)
    return compare(model, theirs, config.max_position_embeddings)


def _config(folder: Path) -> tuple[str, Any]:
    path = regular(folder / "config.json")
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        kind = written.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no readable config ({type(error).__name__}); give a folder as save_pretrained writes it."
        ) from error
    if kind not in _FAMILIES:
        raise ConfigError(
            f"{folder} holds a model of type {kind!r}; those that can be imported: {' '.join(_FAMILIES)}. "
            "apply_strategy puts a strategy on others as they are (docs/own-model.md)."
        )
    family = _FAMILIES[kind]
    config_of = getattr(transformers(), f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    try:
        return family, config_of.from_pretrained(folder)
    except Exception as error:  # whatever a configuration makes its checks raise
        raise ConfigError(f"{path} is no config of a {family} ({' '.join(str(error).split())[:300]}).") from error


def _rope(theirs: Any) -> dict[str, Any]:
    rope = theirs.rope_parameters
    chosen: dict[str, Any] = rope.get("full_attention", rope)
    return chosen


def _rope_scaling(folder: str | Path, theirs: Any) -> RopeScalingConfig | None:
    rope = _rope(theirs)
    if rope.get("rope_type", "default") == "default":
        return None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    try:
        return RopeScalingConfig(*(rope[key] for key in keys))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: its rope_parameters are no scaling of Llama 3.1 ({error}).") from error


def _differences(family: str, theirs: Any) -> dict[str, bool]:
    """Return what a model of the family may do and the backbone does not -> whether this one does."""
    activation = theirs.hidden_activation if family == "Gemma3" else theirs.hidden_act
    rope, windows = _rope(theirs), set(getattr(theirs, "layer_types", None) or []) - {"full_attention"}
    if family == "Mistral" and (theirs.sliding_window or math.inf) < theirs.max_position_embeddings:
        windows.add(f"a sliding window of {theirs.sliding_window:,} tokens")
    found = {
        f"its activation is {activation}, not silu": activation != "silu",
        "its projections have biases": any(getattr(theirs, key, False) for key in ("attention_bias", "mlp_bias")),
        f"its layers have {' and '.join(sorted(windows))}": bool(windows),
        f"its RoPE is of type {rope.get('rope_type')!r}": rope.get("rope_type", "default") not in ("default", "llama3"),
        "its RoPE turns only some channels": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "its weights are quantized": getattr(theirs, "quantization_config", None) is not None,
    }
    if family == "Gemma3":
        scalar, caps = theirs.query_pre_attn_scalar, (theirs.final_logit_softcapping, theirs.attn_logit_softcapping)
        found |= {
            f"its scores are divided by the root of {scalar}, not of the head width": scalar != theirs.head_dim,
            "its logits are capped": caps != (None, None),
            "its attention looks both ways": bool(theirs.use_bidirectional_attention),
        }
    return found


def _open(folder: Path, family: str) -> Any:
    """Load the checkpoint by transformers, in float32."""
    files = [regular(file) for file in folder.iterdir() if not file.is_dir()]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ConfigError(f"{folder} has no *.safetensors; pickled weights could run code and are not opened.")
    model_of = getattr(transformers(), f"{family}ForCausalLM")
    renamed = {rf"(?<![^.]){word}\.": "" for word in sorted(WRAPPERS)}  # saved while it was compiled or wrapped
    options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True, "key_mapping": renamed}
    try:
        theirs, info = model_of.from_pretrained(folder, dtype=torch.float32, **options)
    except Exception as error:  # whatever damaged files make the libraries raise
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"the weights in {folder} cannot be read ({type(error).__name__}: {why}).") from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(key):
            raise ConfigError(
                f"{folder} is no whole {family}ForCausalLM: {key.replace('_', ' ')} {sorted(info[key])[0]}."
            )
    return theirs.eval()
