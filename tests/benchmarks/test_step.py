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
from tests.conftest import ROOT


def test_step_benchmark_peer_with_different_loss_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "HEADS": {32: 2},
        "N_LAYER": 1,
        "VOCAB_SIZE": 64,
        "BATCH": 2,
        "SEQ_LEN": 16,
    }.items():
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


def test_speed_pages_equal_the_recorded_step_times() -> None:
    page = (ROOT / "benchmarks/SPEED.md").read_text()
    steps = json.loads((ROOT / "benchmarks/results/step.json").read_text())
    short = (ROOT / "docs/gpu.md").read_text()
    for width, dtype, mode in (
        (256, "float32", "eager"),
        (256, "float32", "compiled"),
        (768, "bf16", "compiled"),
    ):
        at = steps[f"d={width} {dtype.replace('float', 'fp')} {mode}, 1 thread"]["strategies"]
        found = {row["name"]: f"{row['ratio']:.2f}" for row in at}
        assert (
            f"| width {width}, {dtype}, {mode} | {found['hg+dp+or']} | {found['unified']} |"
            in short
        )
    for width in (256, 768):
        modes = [
            f"d={width} {dtype} {mode}, 1 thread"
            for dtype in ("fp32", "bf16")
            for mode in ("eager", "compiled")
        ]
        columns = [
            {row["name"]: row for row in (*steps[at]["peers"], *steps[at]["strategies"])}
            for at in modes
        ]
        for name in columns[0].keys() - {"llama"}:
            cells = " | ".join(
                "{ratio:.3f} ({low:.3f} to {high:.3f})".format_map(column[name])
                for column in columns
            )
            assert f"{name}` | {cells} |" in page or f"| {name} | {cells} |" in page
        milliseconds = " | ".join(f"{column['llama']['milliseconds']:.0f}" for column in columns)
        assert f"| {milliseconds} |" in page
