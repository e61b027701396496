"""The benchmark of training steps, on models so small that it takes seconds: what it writes, skips and counts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import step
from benchmarks.memory import saved_mib
from benchmarks.peers import PEERS
from lightning_sv.experiments.measured_tables import measured_table

ROOT = Path(__file__).parent.parent.parent
ARGS = ["--rounds", "2", "--threads", "1", "--widths", "32", "--modes", "eager", "--peers", "Hugging Face", "litgpt"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "HEADS", {32: 2, 64: 2})
    for name, value in {"N_LAYER": 1, "VOCAB_SIZE": 64, "BATCH": 2, "SEQ_LEN": 16}.items():
        monkeypatch.setattr(step, name, value)

    def absent(*given: object) -> Any:
        raise ModuleNotFoundError("No module named 'litgpt'")

    monkeypatch.setitem(step.BUILDERS, "litgpt", absent)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["step", "--data", "absent", *args])
    threads = torch.get_num_threads()
    try:
        step.main()
    finally:
        torch.set_num_threads(threads)


def test_step_benchmark_continues_from_its_file(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"eager": {"strategies": []}}))  # of another form: dropped
    run(monkeypatch, *ARGS, "--dtypes", "fp32", "--json", str(file))
    first = json.loads(file.read_text())
    assert set(first) == {"d=32 fp32 eager, 1 thread", "machine"}
    run(monkeypatch, *ARGS, "--json", str(file))
    both = json.loads(file.read_text())
    assert both["d=32 fp32 eager, 1 thread"] == first["d=32 fp32 eager, 1 thread"]
    for found in (both["d=32 fp32 eager, 1 thread"], both["d=32 bf16 eager, 1 thread"]):
        names = {row["name"] for row in (*found["peers"], *found["strategies"])}
        assert names == {"Hugging Face", *step.STRATEGIES} == set(found["saved_mib"]) == set(found["peak_mib"])
        assert all(0 < found["saved_mib"][name] < found["peak_mib"][name] for name in names)
        assert found["missing"] == {"litgpt": "ModuleNotFoundError: No module named 'litgpt'"}
    page = capsys.readouterr().out
    assert "| d=32, bf16, eager, 1 thread |" in page and "litgpt is not measured: ModuleNotFoundError" in page
    names = [row[0] for row in measured_table(file).rows]
    assert names == [f"{s}, d=32 {dtype} eager, 1 thread" for dtype in ("fp32", "bf16") for s in step.STRATEGIES]
    monkeypatch.setattr(step, "compare", None)
    run(monkeypatch, *ARGS, "--json", str(file))  # nothing is left to measure


def test_step_benchmark_peer_with_different_loss_is_refused(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _said(row: dict[str, Any], digits: int) -> str:
    return " to ".join(f"{row[key]:.{digits}f}" for key in ("low", "high")).join((f"{row['ratio']:.{digits}f} (", ")"))


def test_speed_pages_equal_the_recorded_step_times() -> None:
    page = (ROOT / "benchmarks/SPEED.md").read_text()
    steps = json.loads((ROOT / "benchmarks/results/step.json").read_text())
    short = (ROOT / "docs/speed.md").read_text()
    for width, dtype, mode in ((256, "float32", "eager"), (256, "float32", "compiled"), (768, "bf16", "compiled")):
        at = steps[f"d={width} {dtype.replace('float', 'fp')} {mode}, 1 thread"]["strategies"]
        found = {row["name"]: f"{row['ratio']:.2f}" for row in at}
        assert f"| width {width}, {dtype}, {mode} | {found['hg+dp+or']} | {found['unified']} |" in short
    for width in (256, 768):
        modes = [f"d={width} {dtype} {mode}, 1 thread" for dtype in ("fp32", "bf16") for mode in ("eager", "compiled")]
        columns = [{row["name"]: row for row in (*steps[at]["peers"], *steps[at]["strategies"])} for at in modes]
        for name in columns[0].keys() - {"llama"}:
            cells = " | ".join(_said(column[name], 3) for column in columns)
            assert f"{name}` | {cells} |" in page or f"| {name} | {cells} |" in page
        milliseconds = " | ".join(f"{column['llama']['milliseconds']:.0f}" for column in columns)
        assert f"| {milliseconds} |" in page
