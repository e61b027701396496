"""`lightning-sv report`: report of your own runs."""

import shlex
from itertools import chain
from pathlib import Path

from rich.console import Console

from lightning_sv.experiments.report.folder import check_replaceable
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.sources.from_runs import own_figure, print_pairs
from lightning_sv.json_text import json_text
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments of `report`, write it, print its path; return the exit code."""
    text = (
        "Report runs. Runs with one label form an arm, which is compared with the baseline on the "
        "seeds of both."
    )
    parser = PlainParser(
        "report", text, json="Print the differences as JSON on stdout, and the rest on stderr."
    )
    places = "Run directories, folders of runs, or output directories of compare."
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
    options = parser.parse_args(argv)
    command = shlex.join(["lightning-sv", "report", *(word for word in argv if word != "--json")])
    figure = own_figure(
        options.runs, labels=options.labels, baseline=options.baseline, command=command
    )
    out: Path = options.out or Path("runs/report")
    if options.out:
        arms = chain.from_iterable(panel.arms for panel in figure.panels)
        check_replaceable(out, [run.dir for run in chain.from_iterable(arm.runs for arm in arms)])
    write_report([figure], out, "your own runs")
    console = Console(stderr=options.json)
    pairs = figure.panels[0].pairs
    print_pairs(console, pairs, figure.warnings)
    console.print(str(out / "report.html"), markup=False, highlight=False, soft_wrap=True)
    if options.json:
        head = {
            "report": str(out / "report.html"),
            "unit": "nats per token",
            "a": figure.panels[0].arms[0].label,
        }
        differences = [pair.to_dict() for pair in pairs]
        print(json_text({**head, "differences": differences, "warnings": figure.warnings}))
    return 0
