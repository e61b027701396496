"""`lightning-sv report`: runs of one's own, drawn as the paper's are."""

import json
import shlex
from pathlib import Path

from rich.console import Console

from lightning_sv.experiments.pairs import pairs_of, print_pairs
from lightning_sv.experiments.report.tables import check_replaceable
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.sources.from_runs import own_figure
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments of `report`, write it, say where; return the exit code."""
    parser = PlainParser(
        "report",
        "Draw runs from their event files. Runs of one label and different seeds are an arm; every arm is "
        "compared with the baseline in pairs that share a seed.",
        json="Print the differences as JSON, the rest on stderr.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="Run directories, folders that hold them, or those of comparisons.",
    )
    parser.add_argument("--labels", nargs="+", help="Names of the runs, one each, in place of their strategies.")
    parser.add_argument("--baseline", help="Label of the arm compared with; that of the first run by default.")
    parser.add_argument(
        "--out", type=Path, help="Directory of the report; runs/report, which has the last, by default."
    )
    options = parser.parse_args(argv)
    command = shlex.join(["lightning-sv", "report", *(word for word in argv if word != "--json")])
    figure = own_figure(options.runs, labels=options.labels, baseline=options.baseline, command=command)
    out: Path = options.out or Path("runs/report")
    if options.out:
        check_replaceable(out, [run.dir for panel in figure.panels for arm in panel.arms for run in arm.runs])
    write_report([figure], out, "your own runs")
    console = Console(stderr=options.json)
    pairs, _ = pairs_of(figure.panels[0])
    print_pairs(console, pairs, figure.warnings)
    console.print(str(out / "report.html"), markup=False, highlight=False, soft_wrap=True)
    if options.json:
        found = {"report": str(out / "report.html"), "unit": "nats per token", "a": figure.panels[0].arms[0].label}
        differences = [pair.to_dict() for pair in pairs]
        print(json.dumps({**found, "differences": differences, "warnings": figure.warnings}, indent=2))
    return 0
