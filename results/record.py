"""Adds the newest comparison to docs/experiments.md if it is a record, for `make record`."""

import sys
from pathlib import Path

import pandas as pd

from lightning_sv.runs.directory import config_value, read_config

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/experiments.md"
#: longest training of a challenger, in that of the record
LIMIT = 1.10


def row(folder: Path) -> str:
    """Return the row of the challenger, or exit with the reason why it is not a record."""
    differences = pd.read_csv(folder / "differences.csv").query("quantity == 'final loss'")
    if len(differences) != 1 or differences.n.iloc[0] < 2:
        sys.exit("no record: expected one B and at least two seeds")
    pair = differences.iloc[0]
    runs = pd.read_csv(folder / "results.csv").drop_duplicates("run")  # a run may be in two panels
    if runs.val_loss.isna().any():
        sys.exit("no record: a run diverged")
    ours = runs[runs.arm == pair.arm]
    theirs = runs[runs.arm == pair.baseline]

    difference = f"{pair.estimate:+.3f} ({pair.low:+.3f} to {pair.high:+.3f})"
    ratio = ours.seconds.mean() / theirs.seconds.mean()
    if pair.high >= 0 or ratio > LIMIT:
        sys.exit(
            f"not a record: {pair.arm} is {difference} nats per token and took {ratio:.2f} times"
            f" as long; expected an interval below 0 and at most {LIMIT:.2f}"
        )
    first = ours.iloc[0]
    config = read_config(folder / first.run)
    cells = [
        ours.date.max()[:10],
        f"`{config_value(config, 'model.scale')}`",
        f"{first.lr:g}, {config_value(config, 'model.backbone.init_std'):g}",
        difference.replace("-", "−"),
        f"{ours.val_loss.mean():.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def add(folder: Path, page: Path = PAGE) -> None:
    """Add the row below the last one of the page's table."""
    new = row(folder)
    lines = page.read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("|"))
    page.write_text("\n".join([*lines[: last + 1], new, *lines[last + 1 :], ""]), encoding="utf-8")
    print(
        f"a record: {page} has a new row. Set A and A_ARGS of the target `record` in the Makefile"
        " to this strategy."
    )


if __name__ == "__main__":
    tables = Path("runs/compare").glob("*/*/results.csv")
    add(max(tables, key=lambda path: path.stat().st_mtime).parent)
