"""Add the verdicts of all recordings to log.csv, and draw log.md: python results/log.py."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import pandas as pd

from lightning_sv.experiments.spec import budget_names

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LOG = RESULTS / "log.csv"
PAGE = RESULTS / "log.md"

#: columns of a verdict; two rows with equal values in all of them are one verdict
VERDICT = ["budget", "figure", "claim", "estimate", "low", "high", "n", "verdict", "p", "corrected"]
COLUMNS = ["date", *VERDICT, "commit", "corpus", "machine"]
DIFFERENCE = ["figure", "panel", "arm", "quantity", "baseline", "estimate", "low", "high", "n"]

HEAD = """# Log of results

Every recording, whatever came of it. `python results/log.py` writes this page from the tables next to it, and a test
compares them. Conclusions: [results](../docs/results.md).
"""
CHANGED = "Those that were not the same each time:"
GONE = """Those that the last recording of their budget does not decide: split into parts, of sizes that end too early,
or not trained again:"""
ARMS = """## Arms

Each is trained once for all figures that share it. The loss is on held-out text, in nats per token, the mean over the
seeds. The difference is to the baseline of the figure, over pairs that share a seed, with its 95% interval, and
without correction for their number.
"""
ARM_COLUMNS = [
    "finished", "figure", "model", "strategy", "lr", "tokens", "seeds", "loss", "difference", "", "commit",
]  # fmt: skip
NUMBERS = {"lr", "tokens", "seeds", "loss"}


def read(path: Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return a table as text, without apostrophes before formulas; missing columns are empty."""
    table = pd.DataFrame()
    if path.read_text().strip():  # a recording without differences has an empty file
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if columns is not None:
        table = table.reindex(columns=list(columns), fill_value="")
    return table.replace(r"^'(?=[-+=@])", "", regex=True)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[str]) -> str:
    """Return a table whose columns `numbers` are aligned to the right."""
    rule = "|".join("---:" if column in numbers else "---" for column in columns)
    lines = [f"| {' | '.join(columns)} |".replace("  ", " "), f"|{rule}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


# Rows of log.csv


def recorded_verdicts(folder: Path) -> pd.DataFrame:
    """Return the tested claims of a recording as rows of the log."""
    verdicts = read(folder / "verdicts.csv", ["panel", *VERDICT])
    verdicts = verdicts.assign(claim=claims_with_panels(verdicts))
    verdicts = verdicts[verdicts.verdict != "not testable here"]
    runs = read(
        folder / "results.csv", ["figure", "date", "commit", "corpus_hash", "machine"]
    ).groupby("figure")
    for column in ("estimate", "low", "high", "p"):
        verdicts[column] = verdicts[column].map(six_digits)
    return verdicts.assign(
        budget=max((name for name in budget_names() if folder.name.startswith(name)), key=len),
        date=verdicts.figure.map(runs.date.max()),
        commit=verdicts.figure.map(runs.commit.agg(distinct)),
        corpus=verdicts.figure.map(runs.corpus_hash.agg(distinct)),
        machine=verdicts.figure.map(runs.machine.agg(distinct)),
    )[COLUMNS]


def six_digits(cell: str) -> str:
    """Return a number with the digits of the log."""
    return f"{float(cell):.6g}" if cell else ""


def distinct(cells: pd.Series) -> str:
    """Return the different values of a column."""
    return "; ".join(sorted(set(cells) - {""}))


def claims_with_panels(verdicts: pd.DataFrame) -> pd.Series:
    """Return the claims; one that several panels of a figure have begins with its panel."""
    panels = verdicts.groupby(["figure", "claim"]).panel.transform("nunique")
    return verdicts.claim.where(panels == 1, verdicts.panel + ": " + verdicts.claim)


def new_verdicts(log: pd.DataFrame) -> pd.DataFrame:
    """Return the verdicts of results/ that the log lacks."""
    folders = sorted(path.parent for path in RESULTS.glob("*/verdicts.csv"))
    verdicts = pd.concat([recorded_verdicts(folder) for folder in folders])
    known = set(log[VERDICT].itertuples(index=False, name=None))
    is_new = [row not in known for row in verdicts[VERDICT].itertuples(index=False, name=None)]
    return verdicts[is_new].drop_duplicates(VERDICT)


# Verdicts of log.md

Claim = tuple[str, str]


@dataclass
class Recording:
    """Verdicts of one budget that were recorded together.

    Attributes:
        commits: claim -> commits of its runs
        verdicts: claim -> verdict
    """

    date: str
    budget: str
    corpus: str
    commits: dict[Claim, set[str]] = field(default_factory=dict)
    verdicts: dict[Claim, str] = field(default_factory=dict)

    def continues_with(self, claim: Claim, corpus: str, commits: set[str]) -> bool:
        """Return whether a verdict belongs to this recording.

        It does not if it is about a different text, or if its claim was judged on runs of different
        commits. A claim that was judged on runs of the same commits now has more of them.
        """
        if corpus != self.corpus:
            return False
        return claim not in self.commits or not commits.isdisjoint(self.commits[claim])


def recordings(log: pd.DataFrame) -> list[Recording]:
    """Group the rows of the log into recordings."""
    found: list[Recording] = []
    current: dict[str, Recording] = {}
    for row in log.itertuples():
        claim = row.figure, row.claim
        commits = set(row.commit.split("; "))
        recording = current.get(row.budget)
        if recording is None or not recording.continues_with(claim, row.corpus, commits):
            recording = Recording(row.date[:10], row.budget, row.corpus)
            current[row.budget] = recording
            found.append(recording)
        recording.commits[claim] = commits
        recording.verdicts[claim] = row.verdict
    return found


def verdicts_section(log: pd.DataFrame) -> str:
    """Return each recording's number of each verdict, and claims whose verdicts have changed."""
    words = sorted(log.verdict.unique())
    every = recordings(log)
    counts = []
    for recording in every:
        numbers = Counter(recording.verdicts.values())
        counts.append([recording.date, recording.budget, *(str(numbers[word]) for word in words)])
    summary = markdown_table(["recorded", "budget", *words], counts, set(words))

    history = log.groupby(["budget", "figure", "claim"], sort=False).verdict.agg(list)
    is_changed = history.map(lambda verdicts: len(set(verdicts)) > 1)
    last = {recording.budget: recording for recording in every}
    is_gone = [
        (figure, claim) not in last[budget].verdicts for budget, figure, claim in history.index
    ]
    parts = ["## Verdicts", summary, CHANGED, history_table(history[is_changed])]
    return "\n\n".join([*parts, GONE, history_table(history[is_gone])]) + "\n"


def history_table(history: pd.Series) -> str:
    """Return a row per claim with its verdicts in their order."""
    rows = [[*claim, ", then ".join(verdicts)] for claim, verdicts in history.items()]
    return markdown_table(["budget", "figure", "claim", "verdicts"], rows, set())


# Arms of log.md


def arms_section(folder: Path) -> str:
    """Return the table of the arms of one recording."""
    runs = read(folder / "results.csv")
    corpora = " ".join(f"`{corpus[:12]}`" for corpus in sorted(set(runs.corpus_hash)))
    about = f"[{runs.run.nunique()} runs]({folder.name}/results.csv) on corpus {corpora}."
    differences = read(folder / "differences.csv", DIFFERENCE)
    differences = differences[differences.quantity == "final loss"]
    rows = [row for _, row in sorted(arm_rows(runs, differences))]
    return f"### {folder.name}\n\n{about}\n\n{markdown_table(ARM_COLUMNS, rows, NUMBERS)}\n"


def arm_rows(
    runs: pd.DataFrame, differences: pd.DataFrame
) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Yield (key of the order, row) once per set of runs; figures share arms."""
    of_arm = {(row.figure, row.panel, row.arm): row for row in differences.itertuples()}
    names_of: dict[frozenset[str], list[tuple[str, str, str]]] = {}
    arms = runs.groupby(["figure", "panel", "arm"], sort=False)
    for name, arm in arms:
        names_of.setdefault(frozenset(arm.run), []).append(name)
    for names in names_of.values():
        name = next((name for name in names if name in of_arm), names[0])
        arm = arms.get_group(name)
        difference = ["", ""]
        if name in of_arm:
            difference = difference_cells(of_arm[name])
        row = [
            *arm_cells(arm),
            *difference,
            " ".join(sorted({f"`{commit[:7]}`" for commit in arm.commit})),
        ]
        yield (arm.date.max(), " | ".join(row)), row


def arm_cells(arm: pd.DataFrame) -> list[str]:
    """Return the cells of an arm up to its loss."""
    first = arm.iloc[0]
    model, _, strategy = re.sub(r"-seed\d+-\w+$", "", Path(first.run).name).rpartition("-")
    cells = [arm.date.max()[:10], first.figure, model]
    size = first.arm.partition(", ")[2]
    note = f"; {size}" if size not in ("", model) else ""
    loss = arm.val_loss.astype(float).mean(skipna=False)
    return [
        *cells,
        f"`{strategy.partition('_')[0]}`{note}",
        f"{float(first.lr):g}",
        f"{int(first.tokens):,}",
        str(len(arm)),
        f"{loss:.4f}" if isfinite(loss) else "diverged",
    ]


def difference_cells(row: pd.Series) -> list[str]:
    """Return a difference of losses, and what its interval shows."""
    estimate = f"{float(row.estimate):+.4f}"
    if not row.low:  # one pair gives no interval
        return [f"{estimate} to {row.baseline}, one pair", "not resolved"]
    low, high = float(row.low), float(row.high)
    word = "not resolved"
    if high < 0:
        word = "lower"
    elif low > 0:
        word = "**higher**"
    return [f"{estimate} ({low:+.4f} to {high:+.4f}) to {row.baseline}, {row.n} pairs", word]


def page() -> str:
    """Return the page: the verdicts, and a table of arms per folder with runs."""
    folders = sorted(path.parent for path in RESULTS.glob("*/results.csv"))
    return "\n".join(
        [HEAD, verdicts_section(read(LOG)), ARMS, *(arms_section(folder) for folder in folders)]
    )


def main() -> None:
    """Append new verdicts to the log, and write the page."""
    added = new_verdicts(read(LOG))
    added.to_csv(LOG, mode="a", header=False, index=False, lineterminator="\n")
    print(f"{LOG}: {len(added)} verdicts added")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
