"""Parameter counts against the numbers in the paper."""

import json

import pytest

from lightning_sv.__main__ import main
from lightning_sv.plan.parameters import PAPER_FIGURES
from tests.conftest import thinned
from tests.test_architecture import MODELS


def params(model: str, scale: str, capsys: pytest.CaptureFixture[str]) -> dict:
    path = next(path for path in MODELS if path.stem == model)
    assert main(["params", "--config", str(path), "--model.scale", scale, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "figure", thinned(PAPER_FIGURES, PAPER_FIGURES[::3]), ids=lambda f: f"{f.model}-{f.scale}-{f.computed}"
)
def test_params_figures_round_to_the_printed_ones(figure, capsys: pytest.CaptureFixture[str]) -> None:
    made = params(figure.model, figure.scale, capsys)
    (row,) = (row for row in made["paper"] if row["what"] == figure.what)
    printed = figure.printed.replace(",", "")
    if printed.endswith("B"):
        digits = len(printed.partition(".")[2]) - 1
        rounded = f"{row['computed'] / 1e9:.{digits}f}B"
    elif "e" in printed:
        rounded = f"{row['computed']:.2e}"
    else:
        rounded = str(row["computed"])
    assert (rounded == printed) != ("discrepancy" in figure.comment)


def test_params_of_unified_have_roles_and_decay(capsys: pytest.CaptureFixture[str]) -> None:
    made = params("llama-0.12b", "unified", capsys)
    roles = made["roles"]
    assert made["total"] == sum(role["parameters"] for role in roles.values()) == 119_846_846
    assert roles["embedding"]["parameters"] == 50_304 * 768
    assert roles["input"]["parameters"] == (5 * 6 + 1) * 769 and roles["input"]["decays"]
    assert roles["output"]["parameters"] == 6 * (3 * 769 + 2 * 2049) + 50_305 and not roles["output"]["decays"]
    assert made["baseline_total"] == 119_744_256
