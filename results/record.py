"""Adds the newest comparison to docs/experiments.md if it is a record, for `make record`."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/experiments.md"
KEYS = ("--model.optim.lr", "--model.backbone.init_std")
#: longest training of a challenger, in that of the record
LIMIT = 1.10


def row(comparison: dict[str, Any]) -> str:
    """Return the row of the challenger, or exit with the reason why it is not a record."""
    if len(comparison["arms"]) != 2 or len(comparison["seeds"]) < 2:
        sys.exit("no record: expected one B and at least two seeds")
    baseline, challenger = comparison["arms"]
    (pair,) = comparison["differences"]
    difference = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**pair["difference"])
    ours = runs_of(challenger, comparison)
    theirs = runs_of(baseline, comparison)
    ratio = total_seconds(ours) / total_seconds(theirs)
    if pair["difference"]["high"] >= 0 or ratio > LIMIT:
        sys.exit(
            f"not a record: {pair['b']} is {difference} nats per token and took {ratio:.2f} times"
            f" as long; expected an interval below 0 and at most {LIMIT:.2f}"
        )
    cells = [
        comparison["date"][:10],
        f"`{challenger['scale']}`",
        ", ".join(value_of(key, ours[0]["command"]) for key in KEYS),
        difference.replace("-", "−"),
        f"{challenger['val_loss']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def runs_of(arm: dict[str, Any], comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an arm's runs, one per seed."""
    return [run for run in comparison["runs"] if run["arm"] == arm["label"]]


def value_of(key: str, command: str) -> str:
    """Return the value of a key in a command; the last one counts."""
    words = command.replace("=", " ").split()
    if key not in words:
        return "default"
    last = len(words) - 1 - words[::-1].index(key)
    return words[last + 1]


def total_seconds(runs: list[dict[str, Any]]) -> float:
    """Return the seconds that runs took together."""
    return sum(run["summary"]["seconds"] for run in runs)


def add(comparison: Path, page: Path = PAGE) -> None:
    """Add the row below the last one of the page's table."""
    new = row(json.loads(comparison.read_text(encoding="utf-8")))
    lines = page.read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("|"))
    page.write_text("\n".join([*lines[: last + 1], new, *lines[last + 1 :], ""]), encoding="utf-8")
    print(
        f"a record: {page} has a new row. Set A and A_ARGS of the target `record` in the Makefile"
        " to this strategy."
    )


if __name__ == "__main__":
    add(
        max(Path("runs/compare").glob("*/*/comparison.json"), key=lambda path: path.stat().st_mtime)
    )
