"""The Python, log and drawings of the pages."""

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sv.scale.strategy import ScaleStrategy

ROOT = Path(__file__).parent.parent
PAGES = [path for folder in (".", "docs", "data") for path in sorted((ROOT / folder).glob("*.md"))]


def blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_of_a_page_parses_and_its_imports_exist(path: Path) -> None:
    for block in blocks(path):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_sv"):
                missing = [name.name for name in node.names if not hasattr(import_module(str(node.module)), name.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_layer_of_strategies_page_equals_the_product_for_every_strategy() -> None:
    """The second block of the page compares. A wrong layer fails in it."""
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
        with pytest.raises((AssertionError, KeyError, RuntimeError, TypeError)):
            exec(layer.replace(right, wrong) + comparison, {})


def test_own_model_example_learns_under_both_strategies() -> None:
    """The loss is below that of byte frequencies. The attention is that of the page."""
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
def test_run_names_of_pages_are_those_of_fit(path: Path) -> None:
    if path.is_file():
        for name in re.findall(r"runs/[\w.-]+/([\w+]+)-seed\d", path.read_text()):
            assert name == str(ScaleStrategy.parse(name)), f"a run of {name} is named after {ScaleStrategy.parse(name)}"


def test_log_page_equals_the_recorded_verdicts() -> None:
    """By the page's program. New verdicts may follow; none may change."""
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
