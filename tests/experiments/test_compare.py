"""Comparisons end to end with a stand-in for training whose losses are known by hand."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.experiments.compare import compare
from lightning_sv.experiments.comparison import Comparison
from lightning_sv.experiments.pair import Arm
from tests.conftest import listen_to_interrupts

FAKE = (sys.executable, str(Path(__file__).with_name("fake_fit.py")))
LLAMA, UNIFIED = Arm("llama", "llama"), Arm("unified", "unified")


def run(
    out: Path, *args: str, seeds: int = 3, a: Arm = LLAMA, b: Arm = UNIFIED, more: tuple[Arm, ...] = ()
) -> tuple[Comparison, str]:
    """The comparison and what it said while running."""
    said = Console(file=io.StringIO(), width=200)
    found = compare(a, [b, *more], seeds=range(seeds), args=args, out=out, jobs=2, console=said, launcher=FAKE)
    return found, said.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Three pairs with differences -0.02, -0.04, -0.03."""
    out = tmp_path_factory.mktemp("three")
    (out / "config.yaml").write_text("a: 1\n")
    return run(out / "cmp", "--config", str(out / "config.yaml"))[0]


def test_figures_equal_the_hand_computation(three: Comparison) -> None:
    """mean -0.03, se 0.01 / sqrt(3), t(0.975, 2) = 4.3027: interval -0.0548 to -0.0052."""
    (pair,) = three.pairs
    assert pair.difference.mean == pytest.approx(-0.03, abs=1e-6)
    assert pair.sentence() == (
        "unified is lower than llama by 0.030 nats per token (95% interval 0.005 to 0.055, 3 pairs)."
    )
    figures = json.loads((three.out / "comparison.json").read_text())
    (found,) = figures["differences"]
    assert (found["b"], found["sentence"]) == ("unified", pair.sentence())
    assert found["difference"]["verdict"] == "B lower"
    assert found["difference"]["low"] == pytest.approx(-0.03 - 4.302653 * 0.01 / 3**0.5, abs=1e-5)
    assert found["difference"]["per_seed"] == pytest.approx([-0.02, -0.04, -0.03], abs=1e-6)
    assert [arm["label"] for arm in figures["arms"]] == ["llama", "unified"]
    assert figures["arms"][0]["val_loss_per_seed"] == pytest.approx([3.0, 3.01, 3.02])
    # B gains 0.1 nats per 1,000 tokens, so it is there 200, 400 and 300 tokens earlier
    tokens = found["tokens_to_final_loss_of_a"]
    assert tokens["tokens_b"] == pytest.approx([9800, 9600, 9700], abs=0.1)
    assert tokens["factor"] == pytest.approx((1e12 / 9800 / 9600 / 9700) ** (1 / 3), rel=1e-5)
    assert figures["warnings"] == [] and figures["corpus_hash"] == "c0ffee"
    unexpected = [d["key"] for d in figures["config_differences"] if not d["expected"]]
    assert unexpected == []  # neither the shuffle seed nor a path under the run's directory
    assert len(figures["runs"]) == 6 and "--seed_everything 2" in figures["runs"][5]["command"]
    assert (three.out / "comparison.png").stat().st_size > 10_000


def test_the_table_shows_every_seed(three: Comparison) -> None:
    """Means, seeds, difference and verdict reach the reader."""
    console = Console(file=io.StringIO(), width=160)
    three.print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("3.0100", "2.9800", "-0.0300", "-0.0400", "9.7k", three.pairs[0].sentence()):
        assert words in text


def test_several_arms_share_one_baseline(tmp_path: Path) -> None:
    """Every other arm gets the figures of its own pair with A, whose runs are trained once."""
    worse = Arm("nop", "nop", ("--delta", "0.04,0.06,0.05"))
    close = Arm("hg", "hg", ("--delta", "0.01,-0.02,0.00"))
    two, _ = run(tmp_path)
    four, said = run(tmp_path, more=(worse, close))
    assert list(four.runs) == [f"{arm}-seed{seed}" for seed in range(3) for arm in "abcd"]
    assert four.reused == set(two.runs) and "hg, seed 2: done" in said
    assert "nop" in four.commands["c-seed1"] and "hg" in four.commands["d-seed1"]
    assert [pair.difference.verdict for pair in four.pairs] == ["B lower", "B higher", "not resolved"]
    assert four.pairs[0].to_dict() == two.pairs[0].to_dict()
    figures = json.loads(four.to_json())
    assert [arm["label"] for arm in figures["arms"]] == ["llama", "unified", "nop", "hg"]
    assert [pair["b"] for pair in figures["differences"]] == ["unified", "nop", "hg"]
    assert figures["differences"][1]["difference"]["per_seed"] == pytest.approx([0.04, 0.06, 0.05], abs=1e-6)
    assert figures["differences"][2]["tokens_to_final_loss_of_a"]["reached"] == 2
    scales = [(d.a, d.b) for d in four.differences if d.key == "model.scale"]
    assert scales == [("llama", "unified"), ("llama", "nop"), ("llama", "hg")] and not four.warnings
    console = Console(file=io.StringIO(), width=160)
    four.print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for pair in four.pairs:
        assert pair.title in text and pair.sentence() in text and pair.tokens_sentence() in text
    assert "reached in 2 of 3" in text


def test_default_directory_names_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system dislikes in a label becomes a dash."""
    monkeypatch.chdir(tmp_path)
    others = [Arm("unified", "unified"), Arm("nop,lr=0.1", "nop", ("--optim.lr", "0.1"))]
    found = compare(LLAMA, others, seeds=[0], jobs=2, console=Console(file=io.StringIO()), launcher=FAKE)
    assert found.out == Path("runs/compare/llama_vs_unified_nop-lr=0.1")


def test_complete_runs_are_reused_and_seeds_added(tmp_path: Path) -> None:
    """The same command trains nothing; another command or a changed config is refused."""
    config = tmp_path / "config.yaml"
    config.write_text("a: 1\n")
    out, args = tmp_path / "cmp", ("--config", str(config))
    one, _ = run(out, *args, seeds=1)
    assert one.pairs[0].sentence().startswith("No verdict: one pair gives no interval")
    before = (out / "a-seed0" / "summary.json").stat().st_mtime_ns
    two, said = run(out, *args, seeds=2)
    assert "llama, seed 0: reused" in said and "llama, seed 1: done" in said
    assert two.reused == {"a-seed0", "b-seed0"}
    assert (out / "a-seed0" / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"another command .*now --optim.lr 0.1"):
        run(out, *args, "--optim.lr", "0.1", seeds=1)
    config.write_text("a: 2\n")
    with pytest.raises(ValueError, match=r"config.yaml has changed since"):
        run(out, *args, seeds=1)


def test_interval_that_covers_zero(tmp_path: Path) -> None:
    """Differences 0.01 and -0.02 resolve nothing, and B misses A's loss in one pair."""
    found, _ = run(tmp_path, "--delta", "0.01,-0.02", seeds=2)
    (pair,) = found.pairs
    assert pair.difference.verdict == "not resolved"
    assert pair.sentence() == (
        "Not resolved: the 95% interval of unified - llama, -0.196 to +0.186 nats per token, "
        "covers zero; 2 pairs could show a difference of about 0.191."
    )
    assert pair.tokens_sentence() == ("unified reaches llama's final loss in 1 of 2 pairs: no token factor.")


def test_failed_run_shows_its_log_and_can_be_repeated(tmp_path: Path) -> None:
    """The log's end is in the error; finished runs stay, the failed one starts afresh."""
    with pytest.raises(RuntimeError, match=r"(?s)seed 1 failed \(exit code 3\).*lid of the corpus"):
        run(tmp_path, "--fail_seed", "1", seeds=2)
    assert (tmp_path / "b-seed0" / "summary.json").exists()
    (tmp_path / "a-seed1" / "summary.json").unlink(missing_ok=True)
    with pytest.raises(RuntimeError, match="lid of the corpus"):
        run(tmp_path, "--fail_seed", "1", seeds=2)


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    """Different corpora are refused; configs that differ unasked are named with both values."""
    other = Arm("unified", "unified", ("--corpus_hash", "decaf"))
    with pytest.raises(ValueError, match=r"different corpora \(corpus_hash c0ffee and decaf\)"):
        run(tmp_path / "corpus", seeds=1, b=other)
    faster = Arm("unified", "unified", ("--optim.lr", "0.1"))
    found, _ = run(tmp_path / "config", "--hidden.key", "differs", seeds=1, b=faster)
    assert found.warnings == ("The configs differ in hidden.key: llama against unified (a-seed0, b-seed0).",)
    assert [d.key for d in found.differences if d.expected] == ["model.scale", "optim.lr"]


def test_refused_requests(tmp_path: Path) -> None:
    """Nothing starts when the request makes no sense, and foreign folders stay untouched."""
    with pytest.raises(ValueError, match="Arms A and B are both 'llama'"):
        run(tmp_path, b=LLAMA)
    with pytest.raises(ValueError, match="Arms B and C are both 'unified'"):
        run(tmp_path, more=(Arm("unified", "nop"),))
    with pytest.raises(ValueError, match="'unified' and 'again' are the same strategy with the same arguments"):
        run(tmp_path, more=(Arm("again", "unified"),))
    with pytest.raises(ValueError, match="compare sets --seed_everything"):
        run(tmp_path, more=(Arm("nop", "nop", ("--seed_everything", "3")),))
    with pytest.raises(ValueError, match="There are 0 strategies to compare with 'llama'"):
        compare(LLAMA, [], seeds=[0], out=tmp_path, launcher=FAKE)
    with pytest.raises(ValueError, match="compare sets --run_dir"):
        run(tmp_path, "--run_dir=x")
    with pytest.raises(ValueError, match="distinct numbers"):
        run(tmp_path, seeds=0)
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not a run of this comparison"):
        run(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a-seed0", "thesis.tex"]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX process groups")
def test_interrupt_stops_the_children_and_keeps_finished_runs(tmp_path: Path) -> None:
    """Ctrl-C during seed 1: both children of it die, seed 0 is reused by the next call."""
    code = (
        "from lightning_sv.experiments.compare import compare\nfrom lightning_sv.experiments.pair import Arm\n"
        "compare(Arm('llama', 'llama'), [Arm('unified', 'unified')], seeds=[0, 1],"
        f" args=['--hang_seed', '1'], out={str(tmp_path)!r}, jobs=2, launcher={FAKE!r})"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*-seed1/hanging"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=20)
    assert parent.returncode != 0 and "Finished runs are kept" in said
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
    _, said = run(tmp_path, "--hang_seed", "1", seeds=1)
    assert "llama, seed 0: reused" in said and "unified, seed 0: reused" in said


def test_sharpness_is_drawn_where_every_run_has_it(three: Comparison, tmp_path: Path) -> None:
    assert not (three.out / "sharpness.png").exists()
    found, _ = run(tmp_path / "sharp", "--sharp", "50", seeds=2)
    assert (found.out / "sharpness.png").stat().st_size > 20_000
    shown = Console(file=io.StringIO(), width=200)
    found.print(shown)
    assert "sharpness.png" in shown.file.getvalue()  # type: ignore[attr-defined]
    rows = (found.out / "sharpness.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2 * 2 * 3 * 4 and "unified,1,scale_input,fro2,10000,1.25,0.5" in rows


@pytest.mark.parametrize("order", [1, -1])
def test_arms_that_lack_scale_vectors_are_drawn_where_they_have_some(order: int, tmp_path: Path) -> None:
    a, b = (LLAMA, Arm("nop", "nop"))[::order]
    found, _ = run(tmp_path / "sharp", "--sharp", "50", seeds=1, a=a, b=b)
    rows = (found.out / "sharpness.csv").read_text().splitlines()
    assert {tuple(row.split(",")[:3]) for row in rows[1:]} == {
        ("llama", "0", "all"), ("llama", "0", "scale_input"), ("nop", "0", "all"),
    }  # fmt: skip
