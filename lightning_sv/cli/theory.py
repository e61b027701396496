"""`lightning-sv theory`: check the paper's theorems."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lightning_sv.atomic import check_writable, write_atomically
from lightning_sv.errors import expect_known
from lightning_sv.json_text import json_text
from lightning_sv.plots.theory_plots import draw_panels
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.theory.claims import CLAIMS, Result
from lightning_sv.theory.claims.base import Panel

_STYLE = {"holds": "green", "fails, as expected": "yellow", "CONTRADICTED": "bold red"}


def run(argv: list[str]) -> int:
    """Parse the arguments, check, print; return 1 if a claim is contradicted, else 0."""
    names = list(dict.fromkeys(claim.claim for claim in CLAIMS))
    text = "Check the paper's theorems by exact power series, accurate integration and an SDE."
    parser = PlainParser("theory", text, json="Print the results as JSON.")
    listed = f"Any of: {' '.join(names)}; all by default."
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=listed)
    out = Path("runs/theory")
    parser.add_argument("--out", type=Path, default=out, help="Folder of pictures and theory.json.")
    options = parser.parse_args(argv)
    for name in options.claims:
        expect_known("claim", name, names)
    check_writable(options.out)

    results = check_claims(options.claims or names)
    save(results, options.out)
    if options.json:
        print(json_text([result.to_dict() for result in results]))
    else:
        console = Console()
        print_results(console, results)
        console.print(f"Pictures and theory.json in {options.out}.", highlight=False)
    return int(any(result.verdict == "CONTRADICTED" for result in results))


def check_claims(names: Collection[str]) -> list[Result]:
    """Check the claims with these names, with a progress bar."""
    claims = [claim for claim in CLAIMS if claim.claim in names]
    stderr = Console(stderr=True)
    bar = track(claims, "claims", console=stderr, transient=True, disable=not stderr.is_terminal)
    return [Result(claim, claim.check()) for claim in bar]


def save(results: Sequence[Result], out: Path) -> None:
    """Write one PNG per claim with panels, and theory.json with the results."""
    panels: dict[str, list[Panel]] = {}
    for result in results:
        panels.setdefault(result.claim.claim, []).extend(result.finding.panels)
    for name, own in panels.items():
        if own:
            draw_panels(own, out / f"{name}.png")
    rows = [result.to_dict() for result in results]
    write_atomically(out / "theory.json", json_text(rows) + "\n")


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Print one row per claim, with its note."""
    names = ("claim", "statement, conditions, figures", "verdict")
    columns = [Column(name, overflow="fold") for name in names]
    title = "The paper's claims, checked"
    table = Table(*columns, title=title, title_justify="left", show_lines=True)
    for result in results:
        style = _STYLE[result.verdict]
        claim = f"{result.claim.claim}\n{result.claim.part}"
        table.add_row(claim, _description(result), f"[{style}]{result.verdict}[/{style}]")
    console.print(table)
    counts = Counter[str](result.verdict for result in results)
    known = [f"{counts[verdict]} {verdict}" for verdict in _STYLE if counts[verdict]]
    console.print(", ".join(known), highlight=False)


def _description(result: Result) -> str:
    """Return statement, conditions, note and numbers of a result."""
    claim = result.claim
    finding = result.finding
    lines = [claim.statement, f"[dim]{claim.conditions}; {claim.source}[/dim]"]
    if finding.note:
        lines.append(f"[italic]{finding.note}[/italic]")
    numbers = {"stated": finding.stated, "measured": finding.measured, "error": finding.error}
    shown = []
    for name, value in numbers.items():
        if isinstance(value, str):
            shown.append(f"{name} {value}")
        elif value is not None:
            shown.append(f"{name} {value:.8g}")
    return "\n".join([*lines, ", ".join(shown)])
