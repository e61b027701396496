"""Import of transformers models (Llama, Mistral, Qwen 3) with the same logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv.atomic import reading, regular
from lightning_sv.corpus.tokenizer import Tokenizer, read_file
from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.fold import check_no_norm, unfold
from lightning_sv.interop.groups import WRAPPERS
from lightning_sv.interop.hf.families import their_names
from lightning_sv.interop.hf.read_config import backbone_config, read_config
from lightning_sv.interop.hf.save import checked_difference
from lightning_sv.interop.hf.tokenizer import SAMPLE
from lightning_sv.nn import Backbone
from lightning_sv.roles.fake import transformers
from lightning_sv.scale import ScaleOptions, ScaleStrategy

_SIZES = (
    "d_model", "n_layer", "n_head", "kv_heads", "vocab_size", "head_width", "ffn_width", "n_expert",
    "qk_norm", "post_norm", "rope_theta", "rope_scaling", "norm_eps",
)  # fmt: skip


def from_hugging_face(
    folder: str | Path, scale: str | ScaleStrategy = "llama", options: ScaleOptions | None = None
) -> Backbone:
    """Return a backbone with the logits of a transformers checkpoint, in float32.

    An lm_head tied to the embedding gets its own copy: the same function with more parameters.

    Args:
        folder: folder written by `save_pretrained`: config.json and *.safetensors; its code is not
            run
        scale: any strategy that preserves the function, that is, without `dnp`
        options: further options of the strategy

    Raises:
        ConfigError: there is no such checkpoint, the backbone does not support its model, or the
            strategy would change the function
    """
    model = Backbone(backbone_config(folder), scale, options)
    load_hugging_face(model, folder)
    return model


def check_start(model: Backbone, folder: str | Path) -> None:
    """Check that a backbone, also on the meta device, can load a transformers checkpoint."""
    check_no_norm(model)
    required = backbone_config(folder)
    for name in _SIZES:
        actual = getattr(model.config, name)
        wanted = getattr(required, name)
        expect(actual == wanted, name, actual, f"{wanted}, as in {folder}.")


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Check that a corpus has the tokenizer of a transformers model, if its folder has one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    theirs = Tokenizer(read_file(path), str(path), tokenizer.eot_token)
    is_same = theirs.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    if not is_same or theirs.vocab_size != tokenizer.vocab_size:
        hint = f"prepare the corpus with --data.corpus.tokenizer {path}."
        raise ConfigError(f"the tokenizer of the corpus differs from that of {folder}; {hint}")


@torch.no_grad()
def load_hugging_face(model: Backbone, folder: str | Path) -> float:
    """Fill a backbone from a transformers checkpoint of its sizes.

    Returns:
        The relative difference of their logits.
    """
    folder = Path(folder)
    check_start(model, folder)
    family, config = read_config(folder)
    theirs = _open(folder, family)
    state = theirs.state_dict()
    weights: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for ours, name in their_names(family, config.num_hidden_layers).items():
        part = weights if ours.endswith(".weight") else norms
        part[ours] = state[name].clone()
    unfold(model, weights, norms)
    return checked_difference(model, theirs, config.max_position_embeddings)


def _open(folder: Path, family: str) -> Any:
    """Load a checkpoint by transformers, complete and in float32."""
    _check_files(folder)
    # names of compiled or wrapped models
    renamed = {rf"(?<![^.]){word}\.": "" for word in sorted(WRAPPERS)}
    model_of = getattr(transformers(), f"{family}ForCausalLM")
    try:
        theirs, info = model_of.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=renamed,
        )
    except Exception as error:  # damaged files can raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"the weights in {folder} cannot be read ({why}).") from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(key):
            what = f"{key.replace('_', ' ')} {min(info[key])}"
            raise ConfigError(f"{folder} is not a complete {family}: {what}.")
    return theirs.eval()


def _check_files(folder: Path) -> None:
    files = [regular(file) for file in folder.iterdir() if not file.is_dir()]
    if ".safetensors" not in {file.suffix for file in files}:
        why = "pickled weights are not loaded, because they can run code."
        raise ConfigError(f"{folder} has no *.safetensors; {why}")
    for file in files:
        with reading(file), file.open("rb"):  # transformers calls what it cannot open damaged
            pass
