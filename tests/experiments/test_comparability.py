"""Which differences between runs a comparison warns about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.comparability import (
    comparability_warnings,
    panel_warnings,
    training_warnings,
)
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.spec import PanelSpec
from lightning_sv.runs.events import Curve, Run


def run(directory: Path, config: dict[str, Any], **summary: Any) -> Run:
    tokens = config.get("trainer", {}).get("max_steps", 1)
    curves = {"val/loss": Curve(np.array([tokens]), np.array([3.0]))}
    return Run(directory, "llama", config, {"tokens": tokens, **summary}, curves)


@pytest.mark.parametrize(("a", "b", "different"), [
    ({"x": {}}, {"x": {"lm_head": "dp"}}, ["x.lm_head"]),
    ({"x": {}}, {}, []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": None}}, []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": 0}}, ["x.later"]),
    ({"x": {"y": 1}}, {"x": {"y": 2}}, ["x.y"]),
    ({"seed_everything": 0, "data": {"seed": 5}}, {"seed_everything": 1, "data": {"seed": 6}}, ["data.seed"]),
    ({"x": [1, "a"]}, {"x": [1, "b"]}, ["x"]),
    ({"model": {"scale": "hg"}}, {"model": {"scale": "nop", "scale_options": 1}}, ["model.scale_options"]),
    ({"trainer": {"max_steps": 1}}, {"trainer": {"max_steps": 2}}, ["tokens", "trainer.max_steps"]),
])  # fmt: skip
def test_comparability_warnings_name_keys(
    a: dict[str, Any], b: dict[str, Any], different: list[str]
) -> None:
    runs = {"a": run(Path("a"), a), "b": run(Path("b"), b)}
    found = comparability_warnings(runs)
    assert [warning.split(":")[0].split()[-1] for warning in found] == different
    assert training_warnings(runs) == []  # the settings of a plan differ on purpose


def segment(precision: str = "32", max_steps: int = 8) -> dict[str, Any]:
    numerics = {"precision": precision}
    return {"steps": 4, "max_steps": max_steps, "seconds": 1.0, "numerics": numerics}


@pytest.mark.parametrize(("summary", "words"), [
    ({"built_by": "Own"}, "Own ("),
    ({"own_optimizer": "Own"}, "Own ("),
    ({"commit": "0123456789abcdef, with uncommitted changes"}, "0123456789, with uncommitted"),
    ({"machine": "EPYC, 1 x A100, torch 2.13, Python 3.11"}, "EPYC, 1 x A100 ("),
    ({"legs": [segment("32"), segment("16")]}, "b was resumed with a different precision"),
    ({"legs": [segment(), segment(max_steps=16)]}, "(8, then 16)"),
])  # fmt: skip
def test_comparability_warnings_name_what_made_the_runs(
    summary: dict[str, Any], words: str
) -> None:
    plain = run(Path("a"), {}, legs=[segment(), segment()])
    (warning,) = comparability_warnings({"a": plain, "b": run(Path("b"), {}, **summary)})
    assert words in warning


def test_panel_warnings_sizes_of_a_law_need_one_corpus() -> None:
    def panel_of(seq_len: int, corpus: str) -> LoadedPanel:
        arms = []
        for size, length, text in (("small", 64, "c0ffee"), ("large", seq_len, corpus)):
            summary = {"corpus_hash": text, "tokenizer_sha256": "7001"}
            of_size = run(Path(size), {"data": {"seq_len": length}}, **summary)
            arms.append(Arm(size, {0: of_size}, baseline=True, series="llama", size=size))
        return LoadedPanel.of_arms(PanelSpec("p", kind="scaling"), arms)

    assert panel_warnings(panel_of(64, "c0ffee")) == []
    (warning,) = panel_warnings(panel_of(128, "c0ffee"))
    assert "data.seq_len 64 and 128" in warning
    with pytest.raises(ConfigError, match="corpus_hash"):
        panel_warnings(panel_of(64, "beef"))
