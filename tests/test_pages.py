"""What the pages show: their Python runs, and says what the product does."""

import ast
import re
import runpy
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_sv.scale.strategy import PLACEMENTS, ScaleStrategy

ROOT = Path(__file__).parent.parent
PAGES = [path for folder in (".", "docs", "data") for path in sorted((ROOT / folder).glob("*.md"))]


def blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_on_a_page_is_python_and_its_imports_are_there(path: Path) -> None:
    for block in blocks(path):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_sv"):
                missing = [name.name for name in node.names if not hasattr(import_module(str(node.module)), name.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_the_first_page_is_not_cut_and_the_site_fetches_nothing() -> None:
    """86 letters of code fit the site's column; a script or style of the configuration is a file of docs/."""
    for block in re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        assert max(map(len, block.splitlines())) <= 86
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert any("iframe-worker" in script for script in site["extra"]["polyfills"])  # else the theme takes one from afar
    made = re.search(r"^ASSETS = (.*)$", (ROOT / "docs/site.py").read_text(), re.MULTILINE)
    assert made is not None
    for name in ast.literal_eval(made[1]):
        assert (ROOT / "docs" / name).is_file()
        assert f"assets/{name}" in [*site["extra_css"], *site["extra"]["polyfills"]]


def test_the_layer_in_25_lines_is_the_product_for_every_strategy() -> None:
    """The page's own second block compares; a layer that is another one fails in it."""
    layer, comparison = blocks("docs/strategies.md")
    shown = layer[layer.index("def norm") :]
    assert len([line for line in shown.splitlines() if line.strip()]) <= 25
    defined: dict[str, Any] = {}
    exec(layer + comparison, defined)
    for right, wrong in (
        ("eps=0)", "eps=0.1)"),
        ('"norm" if', "name if"),
        ('"dnp":', '"dn":'),
        ("*outside", "*inside"),
    ):
        assert right in layer
        try:
            exec(layer.replace(right, wrong) + comparison, {})
        except (AssertionError, KeyError, RuntimeError, TypeError):
            continue
        raise AssertionError(f"{wrong} for {right} is not noticed")


def test_the_example_of_a_model_of_ones_own_learns() -> None:
    """More than how often each byte comes, under both strategies; its attention is the one of the page."""
    example = runpy.run_path(str(ROOT / "examples/own_model.py"))
    code = blocks("docs/own-block.md")[0]
    for name in ("qkv", "o_proj"):
        (line,) = re.findall(rf"^ +self.{name} = .*$", code, re.MULTILINE)
        assert line in (ROOT / "examples/own_model.py").read_text()
    rows = example["blocks"]()
    counts = rows[:256, 1:].flatten().bincount(minlength=256).double()
    unigram = torch.special.entr(counts / counts.sum()).sum()
    for scale in ("llama", "unified"):
        assert example["train"](scale, rows, 30) < unigram


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").iterdir())], ids=lambda path: path.name)
def test_runs_have_the_names_that_fit_gives_them(path: Path) -> None:
    if path.is_file():
        for name in re.findall(r"runs/[\w.-]+/([\w+]+)-seed\d", path.read_text()):
            assert name == str(ScaleStrategy.parse(name)), f"a run of {name} is named after {ScaleStrategy.parse(name)}"


def test_the_log_is_that_of_the_results() -> None:
    """By the page's own program; whoever ran `make paper` since has more verdicts, and none that became another."""
    program = runpy.run_path(str(ROOT / "results/log.py"))
    text, made = (ROOT / "results/log.md").read_text(), program["page"]()
    said, _, arms = text.partition("## Arms")
    found, _, expected = made.partition("## Arms")
    assert arms == expected, "results/ changed: python results/log.py"
    for line in said.splitlines():
        assert any(row.startswith(line.removesuffix(" |")) for row in found.splitlines()), line
    intervals = re.findall(r"\| [+-]\S+ \(([+-]\S+) to ([+-]\S+)\) to [^|]+, \d pairs \| \**([a-z ]+)\**", text)
    assert len(intervals) > 30
    for low, high, word in intervals:
        assert word.strip() == ("lower" if float(high) < 0 else "higher" if float(low) > 0 else "not resolved")


def test_a_recording_of_the_log_has_one_text() -> None:
    """Another corpus, or other commits for a claim that was judged, begin the next; further claims belong to it."""

    def row(day: int, corpus: str, commit: str, claim: str) -> dict[str, str]:
        return {
            "date": f"2026-01-0{day} 10:00 UTC", "budget": "cpu", "figure": "f", "claim": claim, "verdict": "holds",
            "commit": commit, "corpus": corpus,
        }  # fmt: skip

    text = runpy.run_path(str(ROOT / "results/log.py"))["verdicts"]
    log = [row(1, "x", "a", "one"), row(2, "x", "b", "two"), row(3, "y", "b", "three"), row(4, "y", "c", "three")]
    assert re.findall(r"^\| (2026\S+) \| cpu \| (\d) \|$", text(log), re.MULTILINE) == [
        ("2026-01-01", "2"), ("2026-01-03", "1"), ("2026-01-04", "1"),
    ]  # fmt: skip


def test_the_drawing_shows_the_placements() -> None:
    rows: dict[str, dict[float, str]] = defaultdict(dict)
    for text in ElementTree.parse(ROOT / "docs/figures/strategies.svg").iter("{http://www.w3.org/2000/svg}text"):
        rows[text.attrib["y"]][float(text.attrib["x"])] = text.text or ""
    drawn = {words[0]: words for row in rows.values() if (words := [row[x] for x in sorted(row)])[0] in PLACEMENTS}
    assert drawn.keys() == PLACEMENTS.keys()
    for name, row in PLACEMENTS.items():
        parts = [(True, "Norm"), (row.scale_in, "γ in"), (True, "W"), (row.norm_out, "Norm"), (row.scale_out, "γ out")]
        assert drawn[name][2:-2] == [word for shown, word in parts if shown], name
