"""Every stage of `make gpu_report` at toy size on the CPU; the runner, with stages that fail or hang."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import markdown
from benchmarks.gpu.process import Task
from benchmarks.gpu.runner import Runner, Stage
from benchmarks.gpu.stages import ceilings, correctness, kernels, overhead


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    names = ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit")
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    with torch._dynamo.config.patch(before):  # as they were, after it
        yield Task("cpu", True, 60.0, str(tmp_path), {}, str(tmp_path / "result.json"))


@pytest.mark.long
def test_runner_failing_and_hanging_stages_leave_the_others(tmp_path: Path) -> None:
    here = "tests.gpu.stages"
    stages = (Stage("bad", f"{here}:bad", 60), Stage("endless", f"{here}:endless", 10, beside=True))
    stages += (Stage("good", f"{here}:good", 60, beside=True),)
    told: list[str] = []
    runner = Runner(tmp_path, tmp_path / "work", "cpu", True, 120.0, stages=stages, tell=told.append)
    report = runner.run()["stages"]
    assert json.loads((tmp_path / "report.json").read_text())["stages"] == report
    assert [report[name]["state"] for name in ("bad", "endless", "good")] == ["failed", "deadline", "done"]
    assert report["bad"]["figures"] == {"so_far": 1} and "the card fell out" in report["bad"]["error"][-1]
    assert report["endless"]["figures"] == {"so_far": 2} and report["endless"]["seconds"] >= 10
    assert report["good"]["figures"] == {"seven": 7, "known": None}
    assert "the card fell out" in markdown.page(runner.report)
    again = Runner(tmp_path, tmp_path / "work", "cpu", True, 4.0, stages=stages, tell=told.append)
    assert again.run()["stages"] == report  # finished stages are not repeated, and no time is left for the others
    assert told[-1] == "good: in the report already"


def test_ceilings_stage_measures_copies_products_and_attention(task: Task) -> None:
    found = ceilings.run(task)
    assert torch.__version__.startswith(found["versions"]["packages"]["torch"])  # a wheel's metadata may lack +cu130
    assert found["copy_tb_s"] > 0 and len(found["products"]) == 2 and "errors" not in found
    assert {row["backend"] for row in found["attention"]} == {"cudnn", "flash", "efficient"}
    assert any("both_ms" in row for row in found["attention"])
    _on_a_page("ceilings", found)


@pytest.mark.long
def test_correctness_stage_passes_on_the_cpu_and_finds_errors(task: Task) -> None:
    found = correctness.run(task)
    assert found["experts_without_rows"]["ok"]
    for case, errors in found["cases"].items():
        assert errors["fails"] == [], case
        assert 0 < errors["float32"]["gradient"] < errors["bf16"]["gradient"]
    wrong = found["cases"]["moe:unified"] | {"float32": {"loss": 0.0, "gradient": float("nan")}}
    wrong["bf16"] = {"loss": 0.1, "gradient": 1e-3}
    assert correctness.failing(wrong, choice=False) == ["float32", "bf16"]
    _on_a_page("correctness", found)


@pytest.mark.long
def test_overhead_stage_times_every_arm(task: Task) -> None:
    arms = ["llama", "unified", "Hugging Face", "Hugging Face compiled", "Hugging Face liger", "torchtitan compiled"]
    options = {"size": "0.12b", "arms": arms, "peak_tflops": 989.4, "measured_tflops": 800.0}
    found = overhead.run(replace(task, options=options))
    assert set(found["arms"]) == {"protocol", "large"}
    for batch, table in found["arms"].items():
        left = {name.removesuffix(f", {batch}") for name in found["left_out"] if name.endswith(batch)}
        assert set(table["rows"]) == set(arms) - left and left <= set(arms[4:])
        assert table["rows"]["llama"]["ratio"] == 1
        for row in table["rows"].values():
            assert row["mfu"] * 989.4 == pytest.approx(row["mfu_measured"] * 800)
            assert row["tokens_per_s"] == pytest.approx(1e3 * table["tokens"] / row["ms"])
    _on_a_page("peers", found)


@pytest.mark.long
def test_kernels_stage_profiles_a_mixture(task: Task) -> None:
    found = kernels.run(replace(task, options={"sizes": ["moe-0.25b"], "arms": ["unified"]}))
    row = found["moe-0.25b unified"]
    assert {"products", "eager"} <= set(row["ms"]) and row["kernels"] > 10
    _on_a_page("profile", found)


@pytest.mark.long
def test_fit_stage_killed_and_resumed_is_bit_equal(task: Task) -> None:
    from benchmarks.gpu.stages import fit

    found = fit.run(task)
    assert found["runs"]["resumed"]["killed"] and found["runs"]["resumed"]["exit"] == 0
    assert found["resumed against uninterrupted"] == {"bit_equal": True, "steps": [20, 20], "weights_apart": 0.0}
    assert found["synchronizations"]["micro_batches"] == 4 * found["synchronizations"]["steps"] == 4 * 8
    _on_a_page("fit", found)


def test_gpu_report_wrong_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert command.main(["--device", "cpu"]) == 2
    assert "too old" in capsys.readouterr().err
    monkeypatch.undo()
    assert command.main(["--device", "cpu", "--stages", "ceilings,lunch"]) == 2
    assert "unknown stage 'lunch'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _on_a_page(name: str, figures: dict[str, Any]) -> None:
    """Check the page of a complete stage; also write the page of an empty one."""
    made = {"provenance": {"machine": "m", "date": "d", "commit": "c"}, "toy": True, "seconds": 1.0}
    stage = {"state": "done", "seconds": 1.0, "figures": figures}
    text = markdown.page({"made": made, "stages": {name: stage}})
    assert f"## {name}" in text and "incomplete" not in text
    markdown.page({"made": made, "stages": {name: stage | {"figures": {}}}})
