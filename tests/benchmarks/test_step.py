"""The benchmark of training steps: its check of losses, its memory, and the pages of its
recording."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import step
from benchmarks.memory import saved_mib
from benchmarks.peers import PEERS
from benchmarks.step_table import interval
from tests.conftest import ROOT


def test_step_benchmark_peer_with_different_loss_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"HEADS": {32: 2}, "N_LAYER": 1, "VOCAB_SIZE": 64, "BATCH": 2, "SEQ_LEN": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(step, name, value)
    theirs = PEERS["Hugging Face"]

    def off(*given: Any) -> Any:
        peer = theirs(*given)
        return type(peer)(peer.model, lambda *pair: peer.loss(*pair) * 1.01, peer.load)

    monkeypatch.setitem(step.BUILDERS, "Hugging Face", off)
    with pytest.raises(AssertionError, match="Hugging Face's loss"):
        step.candidates(step.Combination(32, "fp32", "eager", 1), ["Hugging Face"])


def test_saved_mib_counts_each_storage_once() -> None:
    model = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8)

    def loss() -> torch.Tensor:
        y = model(x)  # keeps x; the weight is held anyway
        return (y * y).sum() + (y.exp() * 2).sum()  # keeps y, twice, and exp(y)

    assert saved_mib(loss, model) * 2**20 == 3 * 4 * 8 * 4
    assert model.weight.grad is None


STEPS = json.loads((ROOT / "benchmarks/results/step.json").read_text())


@pytest.mark.parametrize(
    ("width", "dtype", "mode"),
    [(256, "fp32", "eager"), (256, "fp32", "compiled"), (768, "bf16", "compiled")],
)
def test_gpu_page_has_the_recorded_step_times(width: int, dtype: str, mode: str) -> None:
    rows = STEPS[f"d={width} {dtype} {mode}, 1 thread"]["strategies"]
    ratios = {row["name"]: f"{row['ratio']:.2f}" for row in rows}
    row = f"width {width}, {dtype.replace('fp', 'float')}, {mode}"
    expected = f"| {row} | {ratios['hg+dp+or']} | {ratios['unified']} |"
    assert expected in (ROOT / "docs/gpu.md").read_text()


@pytest.mark.parametrize("width", [256, 768])
def test_speed_page_equals_the_recorded_step_times(width: int) -> None:
    page = (ROOT / "benchmarks/SPEED.md").read_text().replace("`", "")
    columns = []
    for at in step.combinations([1], [width], step.DTYPES, step.MODES):
        recorded = STEPS[str(at)]
        rows = (*recorded["peers"], *recorded["strategies"])
        columns.append({row["name"]: row for row in rows})
    for name in columns[0].keys() - {"llama"}:
        cells = " | ".join(interval(column[name]) for column in columns)
        assert f"{name} | {cells} |" in page
    milliseconds = " | ".join(f"{column['llama']['milliseconds']:.0f}" for column in columns)
    assert f"| {milliseconds} |" in page
