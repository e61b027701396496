"""Writes log.md, every verdict and every arm of results/, from the tables there: python results/log.py."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from statistics import mean

from lightning_sv.experiments.report.verdict_log import read_log

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Log of results

Every recording, whatever came of it. `python results/log.py` writes this page from the tables next to it, and a test
compares them. Conclusions: [results](../docs/results.md).
"""
ARMS = """## Arms

Each is trained once for all figures that share it. The loss is on held-out text, in nats per token, the mean over the
seeds. The difference is to the baseline of the figure, over pairs that share a seed, with its 95% interval, and
without correction for their number.
"""
COLUMNS = "| finished | figure | model | strategy | lr | tokens | seeds | loss | difference | | commit |"
RULE = "|---|---|---|---|---:|---:|---:|---:|---|---|---|"


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def compared(row: dict[str, str]) -> list[str]:
    """Return a difference of losses as a cell, and what its interval shows."""
    if not row["low"]:  # one pair gives no interval
        return [f"{float(row['estimate']):+.4f} to {row['baseline']}, one pair", "not resolved"]
    value, low, high = (float(row[key]) for key in ("estimate", "low", "high"))
    word = "lower" if high < 0 else "**higher**" if low > 0 else "not resolved"
    return [f"{value:+.4f} ({low:+.4f} to {high:+.4f}) to {row['baseline']}, {row['n']} pairs", word]


def rows(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (when finished, row) of the arms of one recording; an arm is the runs that one name stands for."""
    arms: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for run in read(folder / "results.csv"):
        arms.setdefault((run["figure"], run["panel"], run["arm"]), []).append(run)
    differences = [row for row in read(folder / "differences.csv") if row["quantity"] == "final loss"]
    found = {(row["figure"], row["panel"], row["arm"]): row for row in differences}
    of_runs: dict[frozenset[str], list[tuple[str, str, str]]] = {}
    for arm, runs in arms.items():
        of_runs.setdefault(frozenset(run["run"] for run in runs), []).append(arm)
    for names in of_runs.values():
        arm = next((name for name in names if name in found), names[0])
        first = arms[arm][0]
        model, _, strategy = re.sub(r"-seed\d+-\w+$", "", Path(first["run"]).name).rpartition("-")
        said = arm[2].partition(", ")[2]
        note = f"; {said}" if said and said != model else ""
        when = max(run["date"] for run in arms[arm])
        cells = [when[:10], arm[0], model, f"`{strategy.partition('_')[0]}`{note}", f"{float(first['lr']):g}"]
        cells += [f"{int(first['tokens']):,}", str(len(arms[arm]))]
        loss = mean(float(run["val_loss"]) for run in arms[arm])
        cells += [f"{loss:.4f}" if isfinite(loss) else "diverged"]
        cells += compared(found[arm]) if arm in found else ["", ""]
        cells += [" ".join(sorted({f"`{run['commit'][:7]}`" for run in arms[arm]}))]
        yield when, f"| {' | '.join(cells)} |"


def verdicts(log: list[dict[str, str]]) -> str:
    """Return the verdicts of a log: how many of each word, recording by recording, and which have moved."""
    words = sorted({row["verdict"] for row in log})
    recorded: list[tuple[str, str, dict[tuple[str, str], tuple[set[str], str]]]] = []
    current: dict[str, dict[tuple[str, str], tuple[set[str], str]]] = {}
    corpora: dict[str, str] = {}
    said: dict[tuple[str, str, str], list[str]] = {}
    for row in log:
        claim = row["figure"], row["claim"]
        had = current.get(row["budget"])
        commits = set(row["commit"].split("; "))
        # A further recording: on another text, or judged already, on runs of other commits. Judged already on runs of
        # the same: what it came to with more of them.
        if (
            had is None
            or corpora[row["budget"]] != row["corpus"]
            or (claim in had and commits.isdisjoint(had[claim][0]))
        ):
            had = current[row["budget"]] = {}
            corpora[row["budget"]] = row["corpus"]
            recorded.append((row["date"][:10], row["budget"], had))
        had[claim] = commits, row["verdict"]
        said.setdefault((row["budget"], row["figure"], row["claim"]), []).append(row["verdict"])
    lines = ["## Verdicts", "", f"| recorded | budget | {' | '.join(words)} |", "|---|---|" + "---:|" * len(words)]
    for day, budget, found in recorded:
        numbers = Counter(word for _, word in found.values())
        lines.append(f"| {day} | {budget} | {' | '.join(str(numbers[word]) for word in words)} |")
    lines += [
        "",
        "Those that were not the same each time:",
        "",
        "| budget | figure | claim | verdicts |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(claim)} | {', then '.join(found)} |" for claim, found in said.items() if len(set(found)) > 1
    ]
    gone = {claim: found for claim, found in said.items() if claim[1:] not in current[claim[0]]}
    lines += [
        "",
        "Those that the last recording of their budget does not decide: split into parts, of sizes that end too early,",
        "or not trained again:",
        "",
        "| budget | figure | claim | verdicts |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(claim)} | {', then '.join(found)} |" for claim, found in gone.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page: the verdicts, and a table of arms for each folder of results/ that holds runs."""
    parts = [HEAD, verdicts(read_log(ROOT / "results/log.csv")), ARMS]
    for table in sorted((ROOT / "results").glob("*/results.csv")):
        runs, name = read(table), table.parent.name
        corpora = " ".join(sorted({f"`{run['corpus_hash'][:12]}`" for run in runs}))
        number = len({run["run"] for run in runs})
        parts.append(f"### {name}\n\n[The report]({name}/report.md): {number} runs on corpus {corpora}.\n")
        parts.append("\n".join([COLUMNS, RULE, *(row for _, row in sorted(rows(table.parent)))]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "results/log.md").write_text(page())
