"""Statistics of a trained model's scale vectors, read block by block from its files.

The files are a folder of transformers (configuration and safetensors), or a run of this package.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sv.atomic import reading, regular
from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.matrices import SiteMatrix
from lightning_sv.interop.apply.sites import find_sites
from lightning_sv.interop.fold import foldable
from lightning_sv.interop.groups import unwrapped
from lightning_sv.nn import Backbone
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.fake import model_from_config, transformers
from lightning_sv.scale import ScaleVector, output_norms, scaled_linears
from lightning_sv.scale.vector import HeadShared

#: thresholds of dead and outlier channels, relative to the median size of a vector's entries
DEAD, OUTLIER = 0.05, 8.0
#: entries per block
BLOCK = 2**20

_NUMBERS = ("F64", "F32", "F16", "BF16")
_MISMATCH = "configuration and weights belong to different models, or the model was saved before fold_applied"
#: transformers' operations from stored tensors to a parameter that keep each channel in place
_STACKED = {"MergeModulelist", "Concatenate"}

#: (leading indices, first row, row after the last) -> these rows of a matrix
ReadRows = Callable[[tuple[int, ...], int, int], Tensor]


class StoredVector(NamedTuple):
    """A scale vector as stored in a file."""

    name: str  #: name of the parameter, or of our module
    role: str  #: 'input' or 'output'
    stored: Tensor  #: gamma - origin, in the stored dtype
    origin: float  #: 1 if the norm multiplies by 1 + w, else 0
    why: str  #: reason why matrices cannot absorb it, or ''
    #: name of each adjacent matrix -> sum of squares of the weights of each channel, float64, of gamma's shape or,
    #: for experts that share gamma, with a leading axis
    matrices: dict[str, Tensor]
    shared: bool  #: True if the matrices are branches that read one vector


class VectorStatistics(NamedTuple):
    """Statistics of a scale vector gamma."""

    name: str  #: name of the parameter, or of our module
    depth: int | None  #: number of its layer; None outside the layers
    role: str  #: 'input' or 'output'
    dtype: str  #: stored dtype
    size: int  #: number of entries
    mean: float  #: mean of gamma
    rms: float  #: root mean square of gamma
    smallest: float  #: minimum of gamma
    largest: float  #: maximum of gamma
    low: float  #: 5th percentile of gamma
    high: float  #: 95th percentile of gamma
    negative: float  #: fraction of entries below 0
    at_start: float  #: fraction of entries exactly 1, the initial value
    distinct: int  #: number of different values
    dead: float  #: fraction below 5% of the median size
    outliers: float  #: fraction above 8 times the median size
    #: median over channels j of ln(gamma_j^2 / |w_j|^2), |w_j|^2 over all adjacent matrices; None without any
    balance: float | None
    #: mean correlation of ln |w_j| over pairs of branches that read the vector; None for less than two
    agreement: float | None
    folds: bool  #: True if matrices can absorb it
    why: str  #: reason why they cannot, or ''
    matrices: tuple[str, ...]  #: names of the adjacent matrices


def statistics(vector: StoredVector) -> VectorStatistics:
    """Return the statistics of a vector."""
    stored = vector.stored.double().flatten()
    gamma = stored + vector.origin
    if not gamma.isfinite().all():
        raise ConfigError(f"{vector.name} has entries that are not finite; the model has diverged.")
    size, median = gamma.abs(), gamma.abs().quantile(0.5)
    return VectorStatistics(
        name=vector.name,
        depth=next((int(part) for part in vector.name.split(".") if part.isdigit()), None),
        role=vector.role,
        dtype=str(vector.stored.dtype).removeprefix("torch."),
        size=gamma.numel(),
        mean=gamma.mean().item(),
        rms=gamma.square().mean().sqrt().item(),
        smallest=gamma.min().item(),
        largest=gamma.max().item(),
        low=gamma.quantile(0.05).item(),
        high=gamma.quantile(0.95).item(),
        negative=_share(gamma < 0),
        at_start=_share(stored == 1 - vector.origin),
        distinct=len(stored.unique()),
        dead=_share(size < DEAD * median),
        outliers=_share(size > OUTLIER * median),
        balance=_balance(gamma.view(vector.stored.shape), vector.matrices),
        agreement=_agreement(vector),
        folds=not vector.why,
        why=vector.why,
        matrices=tuple(vector.matrices),
    )


def _share(mask: Tensor) -> float:
    return mask.double().mean().item()


def _balance(gamma: Tensor, matrices: dict[str, Tensor]) -> float | None:
    if not matrices:
        return None
    total = reduce(torch.add, (_per_entry(squares, gamma) for squares in matrices.values()))
    mask = (gamma != 0) & (total > 0)
    return (gamma[mask].square() / total[mask]).log().quantile(0.5).item() if mask.any() else None


def _per_entry(squares: Tensor, gamma: Tensor) -> Tensor:
    """Return sums of gamma's shape, over the experts (leading axes) and heads that share it."""
    while squares.ndim > gamma.ndim:
        squares = squares.sum(0)
    heads: Tensor = squares.unflatten(-1, (-1, gamma.shape[-1]))
    return heads.sum(-2)


def _agreement(vector: StoredVector) -> float | None:
    """Return the mean correlation of the branches' ln |w_j|, without channels that a branch does not read."""
    branches = [_per_entry(squares, vector.stored).flatten() for squares in vector.matrices.values()]
    if len(branches) < 2 or not vector.shared:
        return None
    mask = torch.stack(branches).gt(0).all(0)
    logs = [branch[mask].log() for branch in branches]
    logs = [log - log.mean() for log in logs]
    pairs = [float(a @ b / (a.norm() * b.norm())) for a, b in combinations(logs, 2) if a.any() and b.any()]
    return sum(pairs) / len(pairs) if pairs else None


def channel_squares(read: ReadRows, shape: tuple[int, ...], axis: int, widths: tuple[int, ...] = ()) -> list[Tensor]:
    r"""Return ||w_j||^2 = \sum_i W_ij^2 of the channels j along `axis`, for each matrix in a weight.

    `read` returns rows of the last two axes of a weight of this shape, (*lead, rows, columns). `axis` is -1 or -2.
    `widths` are those of the matrices concatenated along the other axis, by default one; for each, the result is
    (*lead, channels), float64.
    """
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    widths = widths or (rows if axis == -1 else columns,)
    bounds = list(pairwise(accumulate(widths, initial=0)))
    out = [torch.zeros(*lead, shape[axis], dtype=torch.float64) for _ in widths]
    for index in product(*map(range, lead)):
        if axis == -1:
            for total, (low, high) in zip(out, bounds, strict=True):
                for start, end in _blocks(low, high, columns):
                    total[index] += read(index, start, end).float().square().sum(0)
        else:
            for start, end in _blocks(0, rows, columns):
                squares = read(index, start, end).float().square()
                for total, (low, high) in zip(out, bounds, strict=True):
                    total[index][start:end] = squares[:, low:high].sum(1)
    return out


def _blocks(low: int, high: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, math.ceil(BLOCK / max(1, columns)))
    return ((start, min(start + step, high)) for start in range(low, high, step))


class Piece(NamedTuple):
    """A stored tensor that becomes a parameter, or a part of one."""

    key: str  #: key in the file
    pattern: str | None  #: transformers' pattern that matched it; None if it is the parameter itself
    stacked: bool  #: True if it is only stacked with others


class Weights:
    """Tensors of all *.safetensors of a folder, opened only while a block is read."""

    def __init__(self, folder: Path):
        self.file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _opened(regular(path)) as file:
                self.file_of |= dict.fromkeys(file.keys(), path)
        if not self.file_of:
            hint = "Pickled weights (*.bin, *.pt) are not loaded, because they can run code."
            raise ConfigError(f"{folder} has no *.safetensors; expected a run, or config.json and weights. {hint}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        with _opened(self.file_of[key]) as file:
            stored = file.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        wanted = f"one of {' '.join(_NUMBERS)}. Inspect the model before quantization."
        expect(dtype in _NUMBERS, f"{self.file_of[key]}: the dtype of {key}", dtype, wanted)
        return shape

    def read(self, key: str, index: tuple[int, ...] = (), start: int = 0, end: int | None = None) -> Tensor:
        """Return a copy of rows `start` to `end` of matrix `index` of a stored tensor."""
        with _opened(self.file_of[key]) as file:  # close the file to release its pages
            block: Tensor = file.get_slice(key)[(*index, slice(start, end))]
            return block.clone()

    def pieces(self, model: nn.Module) -> dict[str, list[Piece]]:
        """Return parameter -> stored tensors, by transformers' table of names; `model` is on fake tensors."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(model)  # type: ignore[no-untyped-call,unused-ignore]
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        names: Any = model.state_dict()
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for key in sorted(self.file_of):
            name, pattern = rename_source_key(unwrapped(key), renamings, converters, model.base_model_prefix, names)
            used = [converter for converter in converters if pattern in converter.source_patterns]
            operations = {type(step).__name__ for converter in used for step in converter.operations}
            pieces[name].append(Piece(key, pattern, operations <= _STACKED))
        return pieces


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    with reading(path), path.open("rb"):  # safetensors reports a file that it cannot open as damaged
        pass
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}); use a different file.") from error


class FoundVectors(NamedTuple):
    """Scale vectors of a folder."""

    model: str  #: name of the model's class
    vectors: list[StoredVector]  #: scale vectors, in the model's order
    unread: list[str]  #: names of matrices stored in a different form than in the model, without statistics


def vectors_of_folder(folder: Path, *, trust_remote_code: bool = False) -> FoundVectors:
    """Return the scale vectors of a saved transformers model, with sums over the matrices that read them.

    The model is traced on fake tensors and its values are read in blocks, so memory use does not grow with it.
    """
    transformers()  # requires safetensors
    weights = Weights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    traced = TracedModel(model)
    roles = traced.roles
    pieces = weights.pieces(model)
    vectors: list[StoredVector] = []
    sums: dict[str, dict[str, Tensor]] = {}
    for site in find_sites(traced):
        row = roles[site.vector]
        stored = weights.read(_only(site.vector, row.shape, pieces, weights))
        matrices: dict[str, Tensor] = {}
        for matrix in site.matrices:
            shape = roles[matrix.weight].shape
            if len(row.shape) == 1 and shape[matrix.in_axis] == row.shape[0]:
                if matrix.weight not in sums:
                    sums[matrix.weight] = _sums(matrix, shape, pieces, weights)
                matrices |= sums[matrix.weight]
        why = "" if row.redundant else str(site.stays or "not only matrices read it")
        vectors.append(StoredVector(site.vector, row.role, stored, site.origin or 0.0, why, matrices, shared=True))
    return FoundVectors(type(model).__name__, vectors, [name for name, parts in sums.items() if not parts])


def _only(name: str, shape: tuple[int, ...], pieces: Mapping[str, list[Piece]], weights: Weights) -> str:
    """Return the key of a parameter that is stored unchanged."""
    stored = pieces.get(name, [])
    if len(stored) != 1 or stored[0].pattern is not None or weights.shape(stored[0].key) != shape:
        wanted = f"the parameters of the configuration's model. A file is missing, or {_MISMATCH}."
        raise ConfigError(f"{name} of shape {list(shape)} is missing in the weights; expected {wanted}")
    return stored[0].key


def _sums(
    matrix: SiteMatrix, shape: tuple[int, ...], pieces: Mapping[str, list[Piece]], weights: Weights
) -> dict[str, Tensor]:
    """Return the sums of squares of each matrix in a parameter; empty if it is stored in a different form."""
    name, axis = matrix.weight, matrix.in_axis - len(shape)
    stored = pieces.get(name, [])
    if not any(piece.pattern for piece in stored):
        key = _only(name, shape, pieces, weights)
        sums = channel_squares(partial(weights.read, key), shape, axis, matrix.parts)
        return {name if len(sums) == 1 else f"{name}[{i}]": squares for i, squares in enumerate(sums)}
    if not all(piece.stacked for piece in stored):
        return {}
    by_pattern: dict[str, Tensor] = {}
    for piece in stored:
        part = weights.shape(piece.key)
        fits = len(part) == 2 and part[axis] == shape[axis]
        expect(fits, f"the shape of {piece.key}", list(part), f"a part of {name}, {list(shape)}.")
        (squares,) = channel_squares(partial(weights.read, piece.key), part, axis)
        key = f"{name} ({piece.pattern})"
        by_pattern[key] = by_pattern.get(key, torch.zeros(())) + squares
    return by_pattern


@torch.no_grad()
def vectors_of_backbone(model: Backbone) -> list[StoredVector]:
    """Return the scale vectors of a backbone; matrices are read in blocks, so they may be memory-mapped.

    gamma is the output of the strategy's parameterization, comparable between `direct`, `or` and `er`. The matrices of
    an input-side vector are those that read it; that of an output-side vector precedes it, if no norm is in between.
    """
    foldings = {row.vector: row for row in foldable(model)}
    entries: dict[ScaleVector, dict[str, Any]] = {}
    for path, branch, vectors in scaled_linears(model):
        for side, vector in zip(("scale_in", "scale_out"), vectors, strict=True):
            if vector is None:
                continue
            row = foldings[f"{path}.{side}"]
            entry = entries.setdefault(vector, {"matrices": {}, "shared": side == "scale_in", "why": row.why})
            if side == "scale_in" or branch.norm_width is None:
                entry["matrices"][path] = _squares(branch.weight, -1 if side == "scale_in" else -2)
    for path, norm in output_norms(model):
        assert norm.scale is not None
        entries[norm.scale] = {"matrices": {}, "shared": False, "why": foldings[f"{path}.scale"].why}
    return [
        StoredVector(name, v.role, v.vector() if isinstance(v, HeadShared) else v(), 0.0, **entries[v])
        for name, v in model.named_modules()
        if isinstance(v, ScaleVector) and v in entries
    ]


def _squares(weight: nn.Parameter, axis: int) -> Tensor:
    (squares,) = channel_squares(lambda index, start, end: weight[index][start:end], tuple(weight.shape), axis)
    return squares
