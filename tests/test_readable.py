"""Cost of reading the package: decisions and tokens, which formatting cannot change.

A decision is an if, loop, except, with, conditional expression or comprehension, each condition of
a comprehension, and each further operand of and/or. litgpt, OLMo-core and curvlinops have 0.20 to
0.22 decisions per line of function body, and 18 to 22 per 1,000 tokens. The limits are those that
the package meets today; whoever makes it simpler lowers them. ruff limits single functions.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "lightning_sv"
#: most decisions per line of function body, of all packages together and of each
MOST_PER_LINE = 0.29
MOST_PER_LINE_OF_A_PACKAGE = 0.40
MOST_PER_1000_TOKENS = 20.8
MOST_TOKENS = 217_500

DECISIONS = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.With, ast.AsyncWith,
    ast.IfExp, ast.match_case,
)  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return lines


def decisions_of(node: ast.AST) -> int:
    if isinstance(node, DECISIONS):
        return 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return 0


def is_nested(node: ast.AST) -> bool:
    """Return True for a comprehension of several loops or conditions."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    return len(node.generators) > 1 or len(node.generators[0].ifs) > 1


def measure(path: Path) -> Counter[str]:
    """Return tokens, lines and decisions of function bodies, and nested comprehensions."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = docstring_lines(tree)
    tokens = 0
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.start[0] not in docstrings:
            tokens += 1
            code |= set(range(token.start[0], token.end[0] + 1))

    counts = Counter(tokens=tokens)
    bodies: set[int] = set()
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        counts["nested"] += is_nested(node)
        if isinstance(node, FUNCTIONS):
            inside |= set(ast.walk(node))
            bodies |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    counts["lines"] = len(bodies & code)
    counts["decisions"] = sum(map(decisions_of, inside))
    return counts


def test_package_is_as_readable_as_before() -> None:
    total: Counter[str] = Counter()
    packages: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        counts = measure(path)
        total += counts
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        packages.setdefault(package, Counter()).update(counts)

    for name, counts in packages.items():
        most = MOST_PER_LINE_OF_A_PACKAGE * max(counts["lines"], 60)  # small files vary more
        assert counts["decisions"] <= most, f"{name}: {counts}"
    assert total["decisions"] <= MOST_PER_LINE * total["lines"], total
    assert total["decisions"] <= MOST_PER_1000_TOKENS * total["tokens"] / 1000, total
    assert total["tokens"] <= MOST_TOKENS, total
    assert total["nested"] == 0, total


def test_measure_counts_decisions_but_no_comments_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        '"""Text."""\n'
        "def first(a, b):  # a comment\n"
        '    """Text."""\n'
        "    if a and b:\n"
        "        return [c for c in a if c]\n"
        "    return 1 if a else [d for e in b for d in e]\n"
    )
    # 8 tokens in the first line of code, then 5, 10 and 16
    assert measure(path) == {"tokens": 39, "lines": 3, "decisions": 7, "nested": 1}
