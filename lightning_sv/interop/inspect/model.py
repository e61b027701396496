"""Scale vectors of a transformers model, or of any other model that can be traced.

A norm may store w of gamma = w or gamma = 1 + w, and the name of a vector does not show which side
of a matrix it is on. The traced pass shows both, as for `apply_strategy`.
"""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.find_norms import norms_with_vectors, unreached_vectors
from lightning_sv.interop.apply.matrices import Matrices
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.fake import transformers


class FoundVectors(NamedTuple):
    """Scale vectors of a model."""

    model: str  #: name of the model's class
    vectors: list[StoredVector]  #: scale vectors, in the model's order
    notes: list[str]  #: what the statistics omit, and why, one sentence each


def load_model(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """Load the language model in a folder of transformers, without pickles or downloads.

    Raises:
        ConfigError: there is none, it needs code that may not run, or weights are missing
    """
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.exists() else "is missing"
        expected = "a run, or a folder written by save_pretrained"
        hint = f"For a model of the hub, first run hf download NAME --local-dir {folder}."
        raise ConfigError(f"{folder} {found}; expected {expected}. {hint}")
    try:
        model, loaded = transformers().AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except ConfigError:  # without transformers
        raise
    except Exception as error:  # model code can raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = "Its code runs only with --trust_remote_code. Load any other model yourself, and "
        hint += "call vectors_of_model(model, example), see docs/inspect.md."
        raise ConfigError(f"{folder}: no language model can be loaded ({why}). {hint}") from error

    missing = sorted(loaded["missing_keys"])
    if missing:
        found = f"{folder}: the weights have no {missing[0]}"
        raise ConfigError(
            f"{found}; a file is missing, or the model was saved before fold_applied."
        )
    return model  # type: ignore[no-any-return]


def vectors_of_model(model: nn.Module, example: Any = None) -> FoundVectors:
    """Return the scale vectors of a model; `example` is as in `weight_decay_roles`."""
    traced = TracedModel(model, example)
    vectors = []
    notes = []
    for name in unreached_vectors(traced):
        notes.append(f"{name} is omitted, because the tokens of the traced pass do not reach it.")
    for norm in norms_with_vectors(Matrices(traced)):
        if norm.origin is None:
            why = "because gamma is not this parameter plus a constant"
            notes.append(f"{norm.vector} is omitted, {why}.")
            continue
        row = traced.roles[norm.vector]
        why = "" if row.redundant else norm.stays or "not only matrices read it"
        stored = model.get_parameter(norm.vector).detach()
        vectors.append(StoredVector(norm.vector, row.role, stored, norm.origin, why))
    return FoundVectors(type(model).__name__, vectors, notes)
