"""Every stage of `make gpu_report` at toy size on the CPU; the runner, with stages that fail or hang."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import markdown
from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.peers import peer
from benchmarks.gpu.process import ROOT, Job, Task, at_once
from benchmarks.gpu.rounds import interleaved, ratios
from benchmarks.gpu.runner import STAGES, Runner, Stage
from benchmarks.gpu.sizes import ARMS, size_of
from benchmarks.gpu.stages import cache, ceilings, correctness, kernels, overhead, warm


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    names = ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit")
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    with torch._dynamo.config.patch(before):  # as they were, after it
        yield Task("cpu", True, 60.0, str(tmp_path), {}, str(tmp_path / "result.json"))


@pytest.mark.long
def test_stages_fail_hang_and_are_resumed_apart(tmp_path: Path) -> None:
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
    assert again.run()["stages"] == report  # what was done is not repeated, and there is no time for the rest
    assert told[-1] == "good: in the report already"


def test_jobs_at_once_keep_to_the_memory(task: Task) -> None:
    jobs = [Job(name, "tests.gpu.stages:good", _with(task, peak_tflops=name), 6) for name in ("a", "b")]
    ended = list(at_once(jobs, most=2, gib=10))
    assert [(name, outcome["figures"]["known"]) for name, outcome in ended] == [("a", "a"), ("b", "b")]


def test_jobs_that_wait_get_what_is_left(task: Task) -> None:
    late = Task("cpu", True, 5.0, task.work, {}, began=time.monotonic() - 4.9)
    jobs = [Job(name, "tests.gpu.stages:endless", late) for name in ("first", "second")]
    began = time.monotonic()
    assert [outcome["state"] for _, outcome in at_once(jobs, most=1)] == ["deadline", "deadline"]
    assert time.monotonic() - began < 4


def test_a_slope_in_time_cancels() -> None:
    class Slower(type(clock_of("cpu"))):  # type: ignore[misc]
        now = 0

        def times(self, step: Any, n: int) -> list[float]:
            self.now += 1
            return [step() * (1.0 + 0.1 * self.now)] * n

    steps: dict[str, Any] = {"a": lambda: 1.0, "b": lambda: 2.0, "c": lambda: 1.0}
    rows = ratios(interleaved(steps, Slower("cpu"), rounds=3, each=2), "a")
    assert rows["b"]["ratio"] == pytest.approx(2) and rows["c"]["ratio"] == pytest.approx(1)
    assert rows["b"]["low"] <= rows["b"]["ratio"] <= rows["b"]["high"] and rows["b"]["rounds"] == 3


def test_ceilings(task: Task) -> None:
    found = ceilings.run(task)
    assert found["versions"]["packages"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    assert found["copy_tb_s"] > 0 and len(found["products"]) == 2 and "errors" not in found
    assert {row["backend"] for row in found["attention"]} == {"cudnn", "flash", "efficient"}
    assert any("both_ms" in row for row in found["attention"])
    _on_a_page("ceilings", found)


@pytest.mark.long
def test_correctness_finds_what_is_wrong(task: Task) -> None:
    found = correctness.run(task)
    assert found["experts_without_rows"]["ok"]
    for case, errors in found["cases"].items():
        assert errors["fails"] == [], case
        assert 0 < errors["float32"]["gradient"] < errors["bf16"]["gradient"]
    wrong = dict(found["cases"]["moe:unified"])
    wrong["float32"] = {"loss": 0.0, "gradient": float("nan")}
    wrong["bf16"] = {"loss": 0.1, "gradient": 1e-3}
    assert correctness.failing(wrong, choice=False) == ["float32", "bf16"]
    _on_a_page("correctness", found)


@pytest.mark.long
def test_overhead_and_peers(task: Task) -> None:
    arms = ["llama", "unified", "Hugging Face", "Hugging Face compiled", "Hugging Face liger", "torchtitan compiled"]
    found = overhead.run(_with(task, size="0.12b", arms=arms, peak_tflops=989.4, measured_tflops=800.0))
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
def test_a_size_that_does_not_fit_is_left_out(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(clock_of("cpu")), "total_bytes", lambda self: 1000)
    found = overhead.run(_with(task, size="moe-0.25b"))
    assert "training state" in found["left_out"]["toy"] and not found["arms"]

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.undo()
    monkeypatch.setattr(overhead, "build", full)
    found = overhead.run(_with(task, size="0.12b", batches=["large"]))
    assert found["left_out"] == {f"{arm}, large": "CUDA out of memory" for arm in ARMS}
    _on_a_page("moe", found)


@pytest.mark.long
def test_arms_that_do_not_fit_together_are_timed_beside_the_first(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_with_three(steps: Any, clock: Any, **given: Any) -> Any:
        if len(steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return interleaved(steps, clock, **given)

    monkeypatch.setattr(overhead, "interleaved", full_with_three)
    monkeypatch.setattr(task, "toy", False)
    small, build = size_of("0.12b", True), overhead.build
    monkeypatch.setattr(overhead, "size_of", lambda name, toy: small)
    monkeypatch.setattr(overhead, "build", lambda *given: build(*given[:-1], True))  # type: ignore[call-arg]
    found = overhead.run(_with(task, size="0.12b", arms=["llama", "hg", "or"], batches=["large"]))
    assert found["left_out"].keys() == {"or, large"} and "do not fit" in found["left_out"]["or, large"]
    rows = found["arms"]["large"]["rows"]
    assert [rows[arm]["rounds"] for arm in ("llama", "hg", "or")] == [7, 7, 1] and rows["or"]["ratio"] > 0
    page = _on_a_page("overhead-0.12b", found)
    assert "| rounds |" in page and re.search(r"^\| or \|([^|]*\|){3} 1 \|", page, re.MULTILINE)


def test_liger_leaves_the_other_llamas_alone(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    theirs, calls = modeling_llama.apply_rotary_pos_emb, list[str]()

    def rotate(*args: Any, **kwargs: Any) -> Any:
        calls.append("liger's")
        return theirs(*args, **kwargs)

    def apply(model: Any) -> None:  # as liger-kernel does
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP = rotate, None

    fake = SimpleNamespace(apply_liger_kernel_to_llama=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel", fake)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    size, cpu = size_of("0.12b", True), torch.device("cpu")
    liger, other = (peer(name, size, 2, cpu) for name in ("Hugging Face liger", "Hugging Face"))
    other.step()
    assert not calls
    liger.step()
    assert len(calls) == size.config.n_layer and modeling_llama.apply_rotary_pos_emb is theirs


@pytest.mark.long
def test_a_mixture_and_its_profile(task: Task) -> None:
    found = kernels.run(_with(task, sizes=["moe-0.25b"], arms=["unified"]))
    row = found["moe-0.25b unified"]
    assert {"products", "eager"} <= set(row["ms"]) and row["kernels"] > 10
    _on_a_page("profile", found)


def test_kinds_of_kernels() -> None:
    known = {
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
        "triton_red_fused__to_copy_add_mul_sum_5": "compiled",
        "void at::native::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4, ...>>": "optimizer, clip",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::elementwise_kernel<128, 4, ...direct_copy_kernel_cuda...>": "eager",
    }
    assert {name: kernels.kind_of(name) for name in known} == known
    assert kernels.SPANS.match("## Call CompiledFxGraph fabc ##") and kernels.SPANS.match("Optimizer.step#AdamW.step")


def test_warming_compiles_what_is_timed(task: Task) -> None:
    found = overhead.warm(_with(task, size="1b", arm="hg", batch="large"))
    assert found["first_step_s"] >= 0
    case = size_of("1b")
    assert case.shallow().config.n_layer == 1 and case.batches["protocol"] * case.seq_len == 8192
    assert 10 < warm.gib(case, 2) < 14
    _on_a_page("warm", {"cases": {"1b hg": found}})


def test_the_cache_is_carried_over(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "")
    first, second, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    cache.set_place(first)
    assert cache.run(_with(task, out=str(out)))["saved"] is False
    (first / "inductor/triton").mkdir(parents=True)
    (first / "inductor/triton/kernel").write_text("ptx")
    found = cache.run(_with(task, out=str(out)))
    assert found["saved"] and found["files"] == 1
    cache.set_place(second)
    assert "cache of" in cache.load(out / cache.FILE)
    assert (second / "inductor/triton/kernel").read_text() == "ptx"
    assert "own" in cache.load(out / cache.FILE)
    archive = out / cache.FILE
    archive.write_bytes(archive.read_bytes()[:100])  # cut off
    cache.set_place(tmp_path / "c")
    assert "could not be unpacked" in cache.load(archive)
    cache.set_place(second)
    assert not cache.run(_with(task, out=str(out), most_bytes=10))["saved"] and not list(out.iterdir())
    _on_a_page("cache", found)


@pytest.mark.long
def test_fit_is_killed_and_resumed(task: Task) -> None:
    from benchmarks.gpu.stages import fit

    found = fit.run(task)
    assert found["runs"]["resumed"]["killed"] and found["runs"]["resumed"]["exit"] == 0
    assert found["resumed against whole"] == {"bit_equal": True, "steps": [20, 20], "weights_apart": 0.0}
    assert found["synchronizations"]["micro_batches"] == 4 * found["synchronizations"]["steps"] == 4 * 8
    _on_a_page("fit", found)


def test_wrong_input_is_one_sentence(
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
    file = tmp_path / "file"
    file.touch()
    assert command.main(["--device", "cpu", "--out", str(file / "out"), "--work", str(tmp_path / "work")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "work").exists()


def test_what_is_missing_is_named_with_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command._missing() is None
    others = [found for found in metadata.distributions() if found.metadata["Name"] not in ("omegaconf", "litdata")]
    monkeypatch.setattr(metadata, "distributions", lambda: others)
    said = command._missing()
    assert said is not None and said.startswith("not installed: litdata omegaconf;")
    assert re.search(r"pip download .* litdata==[\d.]+ omegaconf==[\d.]+\n", said)


@pytest.mark.long
def test_a_step_is_timed_with_torch_lightning_and_torchmetrics() -> None:
    """What a corpus and a command line need may be absent."""
    program = """
import sys
for name in ("omegaconf", "jsonargparse", "litdata", "boto3"):
    sys.modules[name] = None
from benchmarks.gpu.stages import correctness, kernels, overhead
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_stages_name_functions_and_fit_into_ten_minutes() -> None:
    assert sum(stage.seconds for stage in STAGES if not stage.beside and stage.name != "peers-1b") < 660
    for stage in STAGES:
        module, _, name = stage.target.partition(":")
        assert module.startswith("benchmarks.gpu.") and callable(getattr(__import__(module, fromlist=[name]), name))


def _with(task: Task, **options: Any) -> Task:
    return Task(task.device, task.toy, task.seconds, task.work, options, task.result)


def _on_a_page(name: str, figures: dict[str, Any]) -> str:
    """Return the page of a whole stage; that of every part of one is written without a word of what is missing."""
    made = {"provenance": {"machine": "m", "date": "d", "commit": "c"}, "toy": True, "seconds": 1.0}
    stage = {"state": "done", "seconds": 1.0, "figures": figures}
    text = markdown.page({"made": made, "stages": {name: stage}})
    assert f"## {name}" in text and "incomplete" not in text
    markdown.page({"made": made, "stages": {name: stage | {"figures": {}}}})
    return text
