"""Docstrings: what they document is there, in one dialect; ruff looks at functions alone, and not at their words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightning_sv"
SECTIONS = ("Args", "Attributes", "Raises")
ENTRY = re.compile(r" {4}([*\w.]+): (.*)")


def entries(docstring: str, section: str) -> dict[str, str]:
    """Name -> text of one section, None where the docstring has no such section."""
    _, found, rest = f"{docstring}\n".partition(f"\n{section}:\n")
    texts: dict[str, str] = {}
    for line in rest.splitlines() if found else ():
        if match := ENTRY.fullmatch(line):
            texts[match[1]] = match[2]
        elif line.startswith("     ") and texts:
            texts[next(reversed(texts))] += f" {line.strip()}"
        elif line:  # the next section, or what follows the list
            break
    return texts


def documented() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, str]]:
    """Where it is, the node and its docstring, of every class and function that has one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}, {node.name}", node, docstring


def arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Names as a caller knows them: of a class those of __init__, or else its fields."""
    if isinstance(node, ast.ClassDef):
        made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return arguments(made[0]) if made else fields(node)
    of = node.args
    names = [argument.arg for argument in (*of.posonlyargs, *of.args)]
    names += [f"*{of.vararg.arg}"] if of.vararg else []
    names += [argument.arg for argument in of.kwonlyargs] + ([f"**{of.kwarg.arg}"] if of.kwarg else [])
    return [name for name in names if name not in ("self", "cls")]


def fields(node: ast.ClassDef) -> list[str]:
    annotated = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name) and not target.id.startswith("_")]


def test_documented_arguments_are_the_real_ones() -> None:
    """All of them, in their order; of a record's fields those whose names do not say it all."""
    for where, node, docstring in documented():
        if names := list(entries(docstring, "Args")):
            assert names == arguments(node), where
        if isinstance(node, ast.ClassDef) and not any(isinstance(c, ast.FunctionDef) for c in node.body):
            assert set(entries(docstring, "Attributes")) <= set(fields(node)), where


def test_entries_are_phrases_in_lower_case() -> None:
    for where, _, docstring in documented():
        for section in SECTIONS:
            for name, text in entries(docstring, section).items():
                assert text.endswith("...") or not text.endswith("."), f"{where}, {name} ends with a full stop"
                ordinary = re.fullmatch(r"[A-Z][a-z]+", text.split()[0])
                assert not ordinary or ordinary[0] in ("None", "False", "True"), f"{where}, {name}: a capital"
