"""Every stage of `make gpu_report` at toy size on the CPU; the runner, with stages that fail or
hang."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import markdown
from benchmarks.gpu.plan import STAGES, Stage, fitting, in_groups, time_of
from benchmarks.gpu.process import Task
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.stages import (
    attention,
    cache,
    candidates,
    ceilings,
    correctness,
    kernels,
    memory,
    overhead,
)
from lightning_sv.errors import ConfigError


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    names = ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit")
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    with torch._dynamo.config.patch(before):  # as they were, after it
        yield Task("cpu", True, 600.0, str(tmp_path), {}, str(tmp_path / "result.json"))


Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(task: Task) -> Measured:
    """Return a function that runs a stage with options, and checks its page and an empty one."""

    def run(stage: ModuleType, name: str, **options: Any) -> dict[str, Any]:
        figures: dict[str, Any] = stage.run(replace(task, options=options))
        made = {
            "provenance": {"machine": "m", "date": "d", "commit": "c"},
            "toy": True,
            "seconds": 1.0,
        }
        done = {"state": "done", "seconds": 1.0, "figures": figures}
        text = markdown.page({"made": made, "stages": {name: done}})
        assert f"## {name}" in text and "incomplete" not in text
        markdown.page({"made": made, "stages": {name: done | {"figures": {}}}})
        return figures

    return run


HERE = "tests.gpu.stages"


def runner(out: Path, stages: tuple[Stage, ...], seconds: float = 200.0, **options: Any) -> Runner:
    return Runner(
        out, out / "work", "cpu", True, seconds, stages=stages, tell=lambda line: None, **options
    )


@pytest.mark.long
def test_runner_continues_in_the_next_call(tmp_path: Path) -> None:
    stages = (
        Stage("bad", f"{HERE}:bad", 60),
        Stage("late", f"{HERE}:late", 10, beside=True),
        Stage("good", f"{HERE}:good", 60, beside=True),
        Stage("long", f"{HERE}:good", 1000),
    )
    first = runner(tmp_path, stages).run()["stages"]
    assert [first[stage.name]["state"] for stage in stages] == [
        "failed",
        "deadline",
        "done",
        "no time left",
    ]
    assert (
        first["bad"]["figures"] == {"so_far": 1}
        and "the card fell out" in first["bad"]["error"][-1]
    )
    assert first["good"]["figures"] == {"seven": 7, "known": None}
    for stage in stages[:3]:
        assert json.loads((tmp_path / f"stage-{stage.name}.json").read_text()) == first[stage.name]

    second = runner(tmp_path, stages)
    states = {name: stage["state"] for name, stage in second.run()["stages"].items()}
    assert states == {"bad": "failed", "late": "done", "good": "done", "long": "no time left"}
    assert second.report["stages"]["good"] == first["good"]  # not repeated
    assert "the card fell out" in markdown.page(second.report)


def test_report_is_complete_after_two_calls_of_less_than_ten_minutes() -> None:
    groups = in_groups(STAGES)
    calls = []
    while any(not group[0].last for group in groups):
        calls.append(fitting(groups, 555))
        groups = [group for group in groups if group[0].last or group not in calls[-1]]
    assert len(calls) == 2
    for call in calls:
        assert sum(map(time_of, call)) <= 555 and call[-1][0].name == "cache"
    assert max(stage.seconds for stage in STAGES) < 540


@pytest.mark.parametrize(("made", "seconds", "key"), [
    ({"card": "NVIDIA H200", "toy": True}, 100, "--out"), ({"card": "cpu", "toy": False}, 100, "--out"),
    ({"card": "cpu", "toy": True}, 5, "--seconds"),
])  # fmt: skip
def test_report_of_another_card_or_without_time_is_refused(
    tmp_path: Path, made: dict, seconds: float, key: str
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"made": made, "stages": {}}))
    with pytest.raises(ConfigError, match=key):
        runner(tmp_path, (Stage("good", f"{HERE}:good", 60),), seconds).run()


def test_ceilings_stage_measures_copies_products_and_attention(measured: Measured) -> None:
    found = measured(ceilings, "ceilings")
    assert torch.__version__.startswith(
        found["versions"]["packages"]["torch"]
    )  # a wheel's metadata may lack +cu130
    assert found["copy_tb_s"] > 0 and len(found["products"]) == 2 and "errors" not in found
    assert {row["backend"] for row in found["attention"]} == {"cudnn", "flash", "efficient"}
    assert any("both_ms" in row for row in found["attention"])


@pytest.mark.long
def test_correctness_stage_passes_on_the_cpu_and_finds_errors(measured: Measured) -> None:
    found = measured(correctness, "correctness")
    assert found["experts_without_rows"]["ok"]
    for case, errors in found["cases"].items():
        assert errors["fails"] == [], case
        assert 0 < errors["float32"]["gradient"] < errors["bf16"]["gradient"]
    wrong = found["cases"]["moe:unified"] | {"float32": {"loss": 0.0, "gradient": float("nan")}}
    wrong["bf16"] = {"loss": 0.1, "gradient": 1e-3}
    assert correctness.failing(wrong, choice=False) == ["float32", "bf16"]


@pytest.mark.long
def test_overhead_stage_times_every_arm(measured: Measured) -> None:
    arms = [
        "llama",
        "unified",
        "Hugging Face",
        "Hugging Face compiled",
        "Hugging Face liger",
        "torchtitan compiled",
    ]
    peaks = {"peak_tflops": 989.4, "measured_tflops": 800.0}
    found = measured(overhead, "peers", size="0.12b", arms=arms, **peaks)
    assert set(found["arms"]) == {"protocol", "large"}
    for batch, table in found["arms"].items():
        left = {
            name.removesuffix(f", {batch}") for name in found["left_out"] if name.endswith(batch)
        }
        assert set(table["rows"]) == set(arms) - left and left <= set(arms[4:])
        assert table["rows"]["llama"]["ratio"] == 1
        for row in table["rows"].values():
            assert row["mfu"] * 989.4 == pytest.approx(row["mfu_measured"] * 800)
            assert row["tokens_per_s"] == pytest.approx(1e3 * table["tokens"] / row["ms"])


@pytest.mark.long
def test_candidates_stage_times_every_candidate_that_a_cpu_has(measured: Measured) -> None:
    names = candidates.names_of("unified", "0.12b")
    assert names[0] == candidates.PACKAGE and "CUDA graphs" in names
    assert "CUDA graphs" not in candidates.names_of("unified", "1b")
    found = measured(candidates, "candidates-0.12b-unified", size="0.12b", arm="unified")
    assert set(found["arms"]["protocol"]["rows"]) == set(names) and found["left_out"] == {}


def test_attention_stage_compares_kernels_and_masks(measured: Measured) -> None:
    found = measured(attention, "attention")
    assert "error" in found["kernels"]["cudnn"]  # a CPU lacks it
    for row in (found["kernels"]["math"], *found["documents"].values()):
        assert 0 < row["error_of_norm"] < 2e-2


@pytest.mark.long
def test_memory_stage_plans_every_arm(measured: Measured) -> None:
    found = measured(memory, "memory")
    assert min(found["planned_mib"].values()) >= 0 and len(found["planned_mib"]) == 16


@pytest.mark.long
def test_kernels_stage_profiles_a_mixture(
    task: Task, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those in the code that Inductor writes."""
    monkeypatch.setenv(cache.VARIABLE, task.work)
    code = "inductor_meta={'kernel_num_gb': %s},\n)\n@triton.jit\ndef triton_%s(in_ptr0):\n"
    (Path(task.work) / "a.py").write_text(code % (0.5, "one") + code % (0.25, "two"))
    (Path(task.work) / "b.py").write_text(code % (0.125, "two"))
    assert kernels.bytes_of_generated_kernels() == {"triton_one": 0.5}

    found = measured(kernels, "profile-1b", size="moe-0.25b", arms=["unified"])
    row = found["moe-0.25b unified"]
    assert {"products", "eager"} <= set(row["ms"]) and row["kernels"] > 10
    assert sum(kernel["ms"] for kernel in row["largest"]) <= row["step_ms"]


@pytest.mark.long
def test_fit_stage_killed_and_resumed_is_bit_equal(measured: Measured) -> None:
    from benchmarks.gpu.stages import fit

    found = measured(fit, "fit")
    assert found["runs"]["resumed"]["killed"] and found["runs"]["resumed"]["exit"] == 0
    assert found["resumed against uninterrupted"] == {
        "bit_equal": True,
        "steps": [20, 20],
        "weights_apart": 0.0,
    }
    assert (
        found["synchronizations"]["micro_batches"]
        == 4 * found["synchronizations"]["steps"]
        == 4 * 8
    )


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
    assert "'lunch'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
