"""Docstrings document the real arguments; ruff checks functions only, this also classes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightning_sv"


def entries(docstring: str, section: str) -> list[str]:
    """Return the names of the entries of one section."""
    lines = f"{docstring}\n".partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    return re.findall(r"^ {4}([*\w.]+): ", lines, re.MULTILINE)


def documented() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, str]]:
    """Yield the place, node and docstring of every class and function that has a docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}, {node.name}", node, docstring


def arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the names of a function's arguments, or of a class's __init__ or fields."""
    if isinstance(node, ast.ClassDef):
        made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return arguments(made[0]) if made else fields(node)
    args = node.args
    names = [argument.arg for argument in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [argument.arg for argument in args.kwonlyargs] + ([f"**{args.kwarg.arg}"] if args.kwarg else [])
    return [name for name in names if name not in ("self", "cls")]


def fields(node: ast.ClassDef) -> list[str]:
    annotated = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name) and not target.id.startswith("_")]


def test_docstring_arguments_are_the_real_ones() -> None:
    for where, node, docstring in documented():
        if names := entries(docstring, "Args"):
            assert names == arguments(node), where
        if isinstance(node, ast.ClassDef) and not any(isinstance(c, ast.FunctionDef) for c in node.body):
            assert set(entries(docstring, "Attributes")) <= set(fields(node)), where
