"""`lightning-sv report`: report of your own runs."""

import shlex
from pathlib import Path

from rich.console import Console

from lightning_sv.experiments.report.folder import HTML, check_replaceable
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import runs_of_figures
from lightning_sv.experiments.sources.from_runs import own_figure, print_pairs
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments of `report`, write it, print its path; return the exit code."""
    options = _parser().parse_args(argv)
    figure = own_figure(
        options.runs,
        labels=options.labels,
        baseline=options.baseline,
        command=shlex.join(["lightning-sv", "report", *argv]),
    )
    out: Path = options.out or Path("runs/report")
    if options.out:
        check_replaceable(out, [run.dir for run in runs_of_figures([figure])])
    write_report([figure], out, "your own runs")
    console = Console()
    print_pairs(console, figure.panels[0].pairs, figure.warnings)
    console.print(str(out / HTML), markup=False, highlight=False, soft_wrap=True)
    return 0


def _parser() -> PlainParser:
    text = (
        "Report runs. Runs with one label form an arm, which is compared with the baseline on the "
        "seeds of both."
    )
    parser = PlainParser("report", text)
    places = "Run directories, or folders of runs."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help=places)
    parser.add_argument(
        "--labels", nargs="+", help="Names of the runs instead of their strategies, one per run."
    )
    parser.add_argument(
        "--baseline", help="Label of the baseline; by default that of the first run."
    )
    parser.add_argument(
        "--out", type=Path, help="Output directory; by default runs/report, which is overwritten."
    )
    return parser
