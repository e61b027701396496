"""`lightning-sv theory`: check the paper's theorems, or study students on your own teacher."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_sv.analysis.theory_plots import draw_panels
from lightning_sv.atomic import check_writable, write_atomically
from lightning_sv.errors import ConfigError, unknown
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.theory.claims import CLAIMS, Claim, Result
from lightning_sv.theory.study import SHOWN, Study, load_student, parse_teacher, study

_STYLE = {"holds": "green", "fails, as expected": "yellow", "CONTRADICTED": "bold red"}


def run(argv: list[str]) -> int:
    """Parse the arguments, check, print the results; return 1 if a claim is contradicted, else 0."""
    names = list(dict.fromkeys(claim.claim for claim in CLAIMS))
    parser = PlainParser(
        "theory",
        "Check the paper's theorems by exact power series, accurate integration and a simulated SDE. With --teacher: "
        "show the gradient flows of all students on your own teacher instead.",
        json="Print the results as JSON.",
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"Any of: {' '.join(names)}; all by default.")
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="Folder of pictures and theory.json.")
    parser.add_argument("--teacher", help='Rows of W*, e.g. "8 1" or "1 2; 3 -1/2".')
    parser.add_argument("--student", action="append", default=[], help="module:Class, your own Student; repeatable.")
    options = parser.parse_args(argv)
    out: Path = options.out
    if options.teacher is not None:
        if options.claims:
            raise ConfigError(f"--teacher shows flows and checks no claims; remove {' '.join(options.claims)!r}.")
        check_writable(out)
        found = study(parse_teacher(options.teacher), [load_student(path) for path in options.student])
        draw_panels(found.panels(), out / "study.png")
        if options.json:
            print(json.dumps(found.to_dict(), indent=2))
        else:
            console = Console()
            print_study(console, found)
            console.print(f"Picture in {out / 'study.png'}.", highlight=False)
        return 0
    if options.student:
        raise ConfigError('--student needs --teacher, e.g. --teacher "8 1".')
    if wrong := [name for name in options.claims if name not in names]:
        raise ConfigError(unknown("claim", wrong[0], names))
    chosen = [claim for claim in CLAIMS if not options.claims or claim.claim in options.claims]
    check_writable(out)
    results = check_all(chosen)
    save(results, out)
    if options.json:
        print(json.dumps([result.to_dict() for result in results], indent=2, ensure_ascii=False))
    else:
        console = Console()
        print_results(console, results)
        console.print(f"Pictures and theory.json in {out}.", highlight=False)
    return int(any(result.verdict == "CONTRADICTED" for result in results))


def print_study(console: Console, found: Study) -> None:
    """Print one row per student."""
    console.print("Gradient flows on your teacher: losses, and the eigenvalues of J Jᵀ at the end", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("student", min_width=8)
    for column in (*(f"L({t:g})" for t in SHOWN), "L − L_f\nat t³"):
        table.add_column(column, no_wrap=True)
    table.add_column("J Jᵀ")
    for student in found.students:
        ends = f"{student.spectrum[-1, 0]:.3g} to {student.spectrum[-1, -1]:.3g}"
        cubic = "not rational" if student.cubic is None else str(student.cubic)
        table.add_row(student.name, *(f"{x:.2e}" for x in student.losses.values()), cubic, ends)
    console.print(table)


def check_all(claims: Sequence[Claim]) -> list[Result]:
    """Check the claims in turn, with a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("theory", total=len(claims))
        for k, claim in enumerate(claims):
            progress.update(task, description=f"{claim.claim} {claim.part}")
            results.append(claim.run(lambda share, done=k: progress.update(task, completed=done + share)))  # type: ignore[misc]
    return results


def save(results: Sequence[Result], out: Path) -> None:
    """Write one PNG per claim with panels, and theory.json with the results."""
    out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(result.claim.claim for result in results):
        panels = [panel for result in results if result.claim.claim == name for panel in result.finding.panels]
        if panels:
            draw_panels(panels, out / f"{name}.png")
    rows = [result.to_dict() for result in results]
    write_atomically(out / "theory.json", json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Print one row per claim, with its note."""
    table = Table(title="The paper's claims, checked", title_justify="left", show_lines=True)
    for name in ("claim", "statement, conditions, figures", "verdict"):
        table.add_column(name, overflow="fold")
    for result in results:
        claim, finding = result.claim, result.finding
        text = f"{claim.statement}\n[dim]{claim.conditions}; {claim.source}[/dim]"
        if finding.note:
            text += f"\n[italic]{finding.note}[/italic]"
        figures = {"stated": finding.stated, "measured": finding.measured, "error": finding.error}
        text += "\n" + ", ".join(f"{name} {_number(x)}" for name, x in figures.items() if x is not None)
        style = _STYLE[result.verdict]
        table.add_row(f"{claim.claim}\n{claim.part}", text, f"[{style}]{result.verdict}[/{style}]")
    console.print(table)
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _STYLE}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count), highlight=False)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.8g}"
