"""`lightning-sv presets`: list the names of config files."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from lightning_sv.json_text import json_text
from lightning_sv.settings.paths import presets
from lightning_sv.settings.plain_parser import PlainParser

#: folder of conf/ -> heading
_HEADINGS = {
    "experiment": "complete experiments, e.g. lightning-sv fit --config tiny-unified",
    "model": "models, e.g. lightning-sv fit --model tiny",
    "data": "corpora: --data NAME",
    "optim": "optimizers: --optim NAME",
    "schedule": "schedules of the learning rate: --schedule NAME",
    "trainer": "machines: --trainer NAME",
    "probes": "measurements: --probes NAME",
    "scale": "scale vectors: --config NAME",
    "conf": "layer below all others: --config NAME",
}


def run(argv: list[str]) -> int:
    """Parse the arguments, list the presets; return the exit code."""
    text = "List the names that --model, --data, other options of `fit` and --config take."
    parser = PlainParser("presets", text, json="Print name and file of each as JSON.")
    options = parser.parse_args(argv)
    files = presets()
    if options.json:
        print(json_text({name: str(path) for name, path in files.items()}))
        return 0
    for folder, heading in _HEADINGS.items():
        _print(heading, [path for path in files.values() if path.parent.name == folder])
    return 0


def _print(heading: str, files: Sequence[Path]) -> None:
    if files:
        print(heading)
    for path in files:
        print(f"  {path.stem:26} {_summary(path)}")


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a config file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    sentence, end, _ = text.partition(". ")
    return sentence + end.strip()
