"""Scale vectors of a saved transformers model.

The model is never loaded. Its configuration gives a model on fake tensors, whose trace shows which
vectors are scale vectors. Their values alone are read:

    config.json -> fake model -> norms        names and shapes
    *.safetensors -> gamma                    values
"""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_sv.interop.apply.find_norms import norms_with_vectors, unreached_vectors
from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.interop.inspect.stored import StoredParameters, StoredWeights
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.fake import model_from_config, transformers
from lightning_sv.roles.types import ModelParameter


class FoundVectors(NamedTuple):
    """Scale vectors of a folder."""

    model: str  #: name of the model's class
    vectors: list[StoredVector]  #: scale vectors, in the model's order
    notes: list[str]  #: what the statistics omit, and why, one sentence each


def vectors_of_folder(
    folder: str | Path, example: Any = None, *, trust_remote_code: bool = False
) -> FoundVectors:
    """Return the scale vectors of a saved transformers model.

    The model is traced on fake tensors, and only its scale vectors are read. `example` is as in
    `weight_decay_roles`; a model of images or speech needs one.
    """
    transformers()  # requires safetensors
    folder = Path(folder)
    weights = StoredWeights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    traced = TracedModel(model, _in_dtype_of(model, example))
    parameters = StoredParameters(weights, model)
    vectors = []
    notes = []
    for name in unreached_vectors(traced):
        notes.append(f"{name} is omitted, because the tokens of the traced pass do not reach it.")
    for norm in norms_with_vectors(traced):
        if norm.origin is None:
            why = "because gamma is not this parameter plus a constant"
            notes.append(f"{norm.vector} is omitted, {why}.")
        else:
            vectors.append(_stored(norm, norm.origin, traced.roles[norm.vector], parameters))
    return FoundVectors(type(model).__name__, vectors, notes)


def _in_dtype_of(model: nn.Module, example: Any) -> Any:
    """Return example inputs with floating-point tensors in the dtype of a model's parameters."""
    dtype = next(model.parameters()).dtype

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, convert, example)


def _stored(
    norm: TracedNorm, origin: float, parameter: ModelParameter, parameters: StoredParameters
) -> StoredVector:
    """Return the vector of a norm as its file has it; gamma is that plus `origin`."""
    stored = parameters.read(norm.vector, parameter.shape)
    why = ""
    if not parameter.redundant:
        why = norm.stays or "not only matrices read it"
    return StoredVector(norm.vector, parameter.role, stored, origin, why)
