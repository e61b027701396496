"""`lightning-sv theory`: check the paper's theorems."""

from collections.abc import Sequence
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

_STYLE = {"holds": "green", "fails, as expected": "yellow", "CONTRADICTED": "bold red"}


def run(argv: list[str]) -> int:
    """Parse the arguments, check, print the results; return 1 if a claim is contradicted, else 0."""
    names = list(dict.fromkeys(claim.claim for claim in CLAIMS))
    text = "Check the paper's theorems by exact power series, accurate integration and a simulated SDE."
    parser = PlainParser("theory", text, json="Print the results as JSON.")
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"Any of: {' '.join(names)}; all by default.")
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="Folder of pictures and theory.json.")
    options = parser.parse_args(argv)
    out: Path = options.out
    for name in options.claims:
        expect_known("claim", name, names)
    chosen = [claim for claim in CLAIMS if not options.claims or claim.claim in options.claims]
    check_writable(out)
    stderr = Console(stderr=True)
    bar = track(chosen, "claims", console=stderr, transient=True, disable=not stderr.is_terminal)
    results = [Result(claim, claim.check()) for claim in bar]
    save(results, out)
    if options.json:
        print(json_text([result.to_dict() for result in results]))
    else:
        console = Console()
        print_results(console, results)
        console.print(f"Pictures and theory.json in {out}.", highlight=False)
    return int(any(result.verdict == "CONTRADICTED" for result in results))


def save(results: Sequence[Result], out: Path) -> None:
    """Write one PNG per claim with panels, and theory.json with the results."""
    for name in dict.fromkeys(result.claim.claim for result in results):
        panels = [panel for result in results if result.claim.claim == name for panel in result.finding.panels]
        if panels:
            draw_panels(panels, out / f"{name}.png")
    rows = [result.to_dict() for result in results]
    write_atomically(out / "theory.json", json_text(rows) + "\n")


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Print one row per claim, with its note."""
    columns = (Column(name, overflow="fold") for name in ("claim", "statement, conditions, figures", "verdict"))
    table = Table(*columns, title="The paper's claims, checked", title_justify="left", show_lines=True)
    for result in results:
        claim, finding = result.claim, result.finding
        text = f"{claim.statement}\n[dim]{claim.conditions}; {claim.source}[/dim]"
        if finding.note:
            text += f"\n[italic]{finding.note}[/italic]"
        figures = {"stated": finding.stated, "measured": finding.measured, "error": finding.error}
        shown = {name: x if isinstance(x, str) else f"{x:.8g}" for name, x in figures.items() if x is not None}
        text += "\n" + ", ".join(f"{name} {x}" for name, x in shown.items())
        style = _STYLE[result.verdict]
        table.add_row(f"{claim.claim}\n{claim.part}", text, f"[{style}]{result.verdict}[/{style}]")
    console.print(table)
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _STYLE}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count), highlight=False)
