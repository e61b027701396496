"""The grouped product against the formula, row by row."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale import DirectScale, ScaledLinear
from lightning_sv.scale.fast import Rows, grouped, grouped_product
from lightning_sv.scale.fast.grouped import grouped_mm, grouped_mm_wgrad, zero_tail_without_sync
from tests.conftest import thinned
from tests.scale.test_branch import leaf
from tests.tolerances import assert_near

#: rows of each expert: some, none, all on one, a short buffer's tail
BLOCKS = {
    "some": (8, 0, 16, 8, 0),
    "first and last": (8, 0, 0, 0, 24),
    "one": (0, 0, 40, 0, 0),
    "none": (0, 0, 0, 0, 0),
}
TAIL = 6
#: sides with vectors, and whether they are folded into the matrix
SIDES = thinned(
    [("", False), *product(["i", "o", "io"], [True, False])],
    [("", False), ("io", True), ("io", False)],
    several=True,
)


def rows_of(blocks: tuple[int, ...]) -> Rows:
    sizes = torch.tensor(blocks)
    expert = torch.arange(len(blocks)).repeat_interleave(sizes)
    padded = F.pad(expert, (0, TAIL), value=len(blocks) - 1)
    return Rows(padded, sizes.cumsum(0).int(), filled=3 * int(sizes.sum()) // 4)


def inputs_of(
    rows: Rows, d_in: int, d_out: int, sides: str, dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    """x with a padding row in each block and a tail of zeros, weight, gamma_in, gamma_out."""
    x = torch.randn(len(rows.expert), d_in, dtype=dtype)
    x[(rows.ends[rows.ends > 0] - 1).long()] = 0
    x[rows.ends[-1] :] = 0
    n = len(rows.ends)
    gammas = [
        leaf(n, d, dtype=dtype) if side in sides else None
        for side, d in (("i", d_in), ("o", d_out))
    ]
    return [x.requires_grad_(), leaf(n, d_out, d_in, dtype=dtype), *gammas]


def plain(
    x: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, rows: Rows
) -> Tensor:
    """The formula, word for word, row by row."""
    out = []
    for r, e in enumerate(rows.expert.tolist()):
        row = x[r] if gamma_in is None else gamma_in[e] * x[r]
        y = weight[e] @ row
        out.append(y if gamma_out is None else gamma_out[e] * y)
    return torch.stack(out) * (torch.arange(len(x)) < rows.ends[-1]).unsqueeze(-1)


@pytest.mark.parametrize(("sides", "fold"), SIDES)
@pytest.mark.parametrize(
    "widths", thinned([(21, 22), (24, 43), (32, 21), (43, 24), (16, 32)], [(21, 22), (16, 32)])
)
@pytest.mark.parametrize("blocks", thinned(BLOCKS, ["some", "none"]))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grouped_product_and_gradients_equal_plain_loop(
    dtype: torch.dtype,
    blocks: str,
    widths: tuple[int, int],
    sides: str,
    fold: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped, "FOLD_FROM", 0 if fold else math.inf)
    rows = rows_of(BLOCKS[blocks])
    tensors = inputs_of(rows, *widths, sides, dtype)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    ours = grouped_product(*tensors, rows=rows)
    theirs = plain(*exact, rows=rows)
    terms = (
        sum(widths) + len(ours) + 4
    )  # the sums over one axis each, and the roundings by two vectors
    assert_near(ours, theirs, terms)
    grad = torch.randn_like(ours) * (torch.arange(len(ours)) < rows.ends[-1]).unsqueeze(-1)
    leaves, wide_leaves = ([t for t in each if t is not None] for each in (tensors, exact))
    found = torch.autograd.grad(ours, leaves, grad)
    expected = torch.autograd.grad(theirs, wide_leaves, grad.double())
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 2 * terms)
    if len(leaves) > 2:  # scale vectors of frozen matrices
        leaves[1].requires_grad_(False)
        ours = grouped_product(*tensors, rows=rows)
        leaves = [leaves[0], *leaves[2:]]
        for a, b in zip(
            torch.autograd.grad(ours, leaves, grad), (found[0], *found[2:]), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("sides", "fold"), SIDES)
def test_grouped_product_passes_gradgradcheck(
    sides: str, fold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "FOLD_FROM", 0 if fold else math.inf)
    rows = rows_of((2, 0, 3, 1))
    tensors = inputs_of(rows, 3, 2, sides)
    assert torch.autograd.gradgradcheck(partial(grouped_product, rows=rows), tensors)


def test_grouped_product_under_autocast_is_bf16() -> None:
    rows = rows_of(BLOCKS["some"])
    leaves = inputs_of(rows, 43, 21, "io", torch.float32)
    exact = grouped_product(*leaves, rows=rows)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = grouped_product(*leaves, rows=rows)
    assert rounded.dtype == torch.bfloat16
    assert_near(rounded, exact, terms=4)  # x, W gamma, y, gamma y
    exact_grads = torch.autograd.grad(exact.sum(), leaves)
    for ours, theirs in zip(torch.autograd.grad(rounded.sum(), leaves), exact_grads, strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours.bfloat16(), theirs, terms=8)


@pytest.mark.parametrize(("n_experts", "sides", "norm_width", "fold", "factor"), [
    (None, "i", None, False, 1.001),
    (1, "io", None, True, 1.002),
    (1, "i", None, False, 1.001),
    (1, "io", 64, False, 1.001),  # the norm cancels the change of gamma_in
])  # fmt: skip
def test_small_change_of_gamma_survives_bf16(
    n_experts: int | None,
    sides: str,
    norm_width: int | None,
    fold: bool,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gamma = 1 + 1e-3 lies between two bf16 numbers: it must be used before the cast.

    Over 4,096 outputs the rounding (0.1% each) averages out.
    """
    monkeypatch.setattr(grouped, "FOLD_FROM", 0 if fold else math.inf)
    batch_dims = () if n_experts is None else (n_experts,)
    matrix = ScaledLinear(
        512,
        64,
        scale_in=DirectScale(512, "input", batch_dims),
        scale_out=DirectScale(64, "output", batch_dims) if "o" in sides else None,
        norm_width=norm_width,
        batch_dims=batch_dims,
    )
    rows = None if n_experts is None else rows_of((64,))
    x = F.pad(torch.randn(64, 512), (0, 0, 0, TAIL))
    outs = []
    for change in (0, 1e-3):
        for name, vector in matrix.named_parameters():
            if "gamma" in name:
                torch.nn.init.constant_(vector, 1 + change)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outs.append(matrix(x, rows=rows).float())
    before, after = outs
    assert abs(((after * before).sum() / before.square().sum()).item() - factor) < 3e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", thinned([(16, 24), (21, 43)], [(21, 43)]))
def test_grouped_mm_and_wgrad_pass_opcheck(widths: tuple[int, int], dtype: torch.dtype) -> None:
    ends = rows_of(BLOCKS["some"]).ends
    x = leaf(int(ends[-1]) + TAIL, widths[0], dtype=dtype)
    weight = leaf(len(ends), widths[1], widths[0], dtype=dtype)
    torch.library.opcheck(grouped_mm, (x, weight, ends, 8))
    torch.library.opcheck(grouped_mm_wgrad, (x, x.detach().clone().requires_grad_(), ends, 8))


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_zero_tail_without_sync_zeroes_rows_past_the_end(blocks: tuple[int, ...]) -> None:
    """Fresh memory may contain NaN."""
    rows = rows_of(blocks)
    past = torch.arange(len(rows.expert)) >= rows.ends[-1]
    for filled in (0, rows.filled, int(rows.ends[-1])):
        y = torch.randn(len(past), 3).masked_fill_(past.unsqueeze(-1), math.nan)
        wanted = y.masked_fill(past.unsqueeze(-1), 0)
        zero_tail_without_sync(y, rows.ends, filled)
        assert torch.equal(y, wanted)
