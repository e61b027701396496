"""Numbers on the pages equal the recordings in results/, and records are added to their page.

Every interval of a page is one of a recording, and tables equal it cell by cell.
"""

import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lightning_sv.experiments.spec import load_figure
from lightning_sv.statistics.block_anova import BlockDesign
from lightning_sv.statistics.paired import PairedDifference, paired_difference
from tests.conftest import ROOT, named

Rows = list[list[str]]
#: parts of a difference by kind of token, in the order of the pages' rows
PARTS = ("final loss", *(f"final loss, part of {kind}" for kind in ("repeat", "seen", "unseen")))
SMALLER = "Initial std 0.02, "
LARGER = "Initial std 0.55/sqrt(d_model)"
OWN_OPTIMUM = {"figure": "own-optimum", "panel": "Each arm at its own optimum"}
OF_LLAMA = {"figure": "own-optimum", "panel": "All arms at the optimum of llama"}
#: preset -> name of the arm in the recordings, which are older
RECORDED_AS = {"unified-head-dp": "unified, dp at the lm_head"}
HEAD_DP = RECORDED_AS["unified-head-dp"]


@cache
def recording(path: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "results" / path, dtype={"seed": str})


def recorded(path: str, **only: str) -> pd.DataFrame:
    """Return the rows of a recording that have these values."""
    rows = recording(path)
    for column, value in only.items():
        rows = rows[rows[column] == value]
    return rows


def once(path: str, **only: str) -> pd.DataFrame:
    """Return each run once, although panels share some."""
    return recorded(path, **only).drop_duplicates(["arm", "seed"])


def interval(mean: float, low: float, high: float, digits: str = "+.3f") -> str:
    return f"{mean:{digits}} ({low:{digits}} to {high:{digits}})"


def intervals(rows: pd.DataFrame, digits: str = "+.3f") -> list[str]:
    """Return the estimate and interval of each row."""
    numbers = rows[["estimate", "low", "high"]].to_numpy()
    return [interval(mean, low, high, digits) for mean, low, high in numbers]


def difference(folder: str, arm: str, quantity: str = "final loss", panels: str = SMALLER) -> str:
    """Return the first difference of an arm in the panels that begin with these words."""
    rows = recorded(f"{folder}/differences.csv", arm=arm, quantity=quantity)
    return intervals(rows[rows.panel.str.startswith(panels)])[0]


def tuned(steps: int) -> dict[str, float]:
    """Return the tuned settings of llama in `tiny`."""
    arms = yaml.safe_load((ROOT / f"conf/paper/tuned/tiny-{steps}.yaml").read_text())["arms"]
    return {key: float(value) for key, value in arms["llama"].items()}


# Pages


def page(name: str) -> str:
    """Return the README, a page of docs/, or the page of a recording, with hyphens as minus
    signs."""
    paths = [ROOT / f"{name}.md", ROOT / f"docs/{name}.md", ROOT / f"results/{name}/README.md"]
    return next(path for path in paths if path.exists()).read_text().replace("−", "-")


def table(name: str, head: str) -> pd.DataFrame:
    """Return the table of a page whose head contains `head`; the first column is the index."""
    start = re.search(rf"^\|.*{re.escape(head.lstrip('| '))}.*(\n\|.*)*", page(name), re.MULTILINE)
    lines = start[0].replace("`", "").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return pd.DataFrame(cells[2:], columns=cells[0]).set_index(cells[0][0])


# Tables: page, head -> expected cells after the first column; a row may have more


def parts(folder: str, panels: str = SMALLER) -> Callable[[pd.DataFrame], Rows]:
    """Expect the difference of the arms of the head, and its parts by kind of token."""

    def expected(shown: pd.DataFrame) -> Rows:
        return [[difference(folder, arm, part, panels) for arm in shown.columns] for part in PARTS]

    return expected


def parts_of_mini(_: pd.DataFrame) -> Rows:
    """Expect the difference at each optimum of `mini`, and its parts by kind of token."""
    rows = []
    for part in PARTS:
        of_panels = [("cpu-mini-own-optimum", HEAD_DP, part, panel) for panel in ("Each", "All")]
        rows.append([difference(*each) for each in of_panels])
    return rows


def losses(folder: str, panels: str = "") -> Callable[[pd.DataFrame], Rows]:
    """Expect the final loss of each arm and seed, whichever of them the rows are."""

    def expected(shown: pd.DataFrame) -> Rows:
        runs = recorded(f"{folder}/results.csv")
        runs = runs[runs.panel.str.startswith(panels)].drop_duplicates(["arm", "seed"])
        texts = runs.pivot(index="arm", columns="seed", values="val_loss").map("{:.4f}".format)
        is_by_seed = shown.index.name == "seed"
        arms = shown.columns if is_by_seed else shown.index
        seeds = shown.index if is_by_seed else shown.columns.str.removeprefix("seed ")
        cells = texts.loc[arms, seeds]
        return (cells.T if is_by_seed else cells).to_numpy().tolist()

    return expected


def claims(folder: str) -> Callable[[pd.DataFrame], Rows]:
    """Expect the interval and the corrected verdict of each claim."""

    def expected(_: pd.DataFrame) -> Rows:
        verdicts = recorded(f"{folder}/verdicts.csv").dropna(subset="low")
        return [list(row) for row in zip(intervals(verdicts), verdicts.corrected, strict=True)]

    return expected


def ratios(folder: str, figure: str) -> Callable[[pd.DataFrame], Rows]:
    """Expect the ratio with its interval and the corrected verdict of each claim."""

    def expected(_: pd.DataFrame) -> Rows:
        verdicts = recorded(f"{folder}/verdicts.csv", figure=figure)
        return [
            [f"{row.estimate:.2f} ({row.low:.2f} to {row.high:.2f})", row.corrected]
            for row in verdicts.itertuples()
        ]

    return expected


def tuning(path: str, panel: str = "Initial std 0.02", arm: str = "llama") -> pd.Series:
    """Return the losses of the tuning runs per learning rate."""
    rows = recorded(path, panel=panel)
    rows = rows[
        rows.figure.isin(["protocol-rates", "english", "protocol-lengths"])
        & rows.arm.str.startswith(arm)
    ]
    return rows.sort_values("seed").groupby("lr").val_loss.apply(list)


def rates(*which: str) -> Callable[[pd.DataFrame], Rows]:
    """Expect the losses of the tuning runs, a row per rate."""

    def expected(shown: pd.DataFrame) -> Rows:
        of_rates = tuning(*which)
        assert shown.index.tolist() == [f"{rate:g}" for rate in of_rates.index]
        return [[f"{loss:.3f}" for loss in of_seeds] for of_seeds in of_rates]

    return expected


def by_length(shown: pd.DataFrame) -> Rows:
    """Expect the differences of the protocol at three lengths of training."""
    arms = [name.partition(":")[0] for name in shown.index]
    lengths = ("7 tokens", "27 tokens")
    rows = []
    for arm in arms:
        cells = [difference("cpu-100-protocol-lengths", arm, panels=panel) for panel in lengths]
        rows.append([*cells, difference("cpu-100-protocol", arm)])
    return rows


def mean_of_both(arm: str) -> str:
    """Return the difference to llama at the own optimum: the mean of two recordings per seed."""
    first = once("cpu-100/results.csv", **OWN_OPTIMUM).pivot(
        index="seed", columns="arm", values="val_loss"
    )
    second = once("cpu-100-copying/results.csv").pivot(
        index="seed", columns="arm", values="val_loss"
    )
    mean = (first + second) / 2
    d = paired_difference(mean[arm], mean["llama"])
    return interval(d.mean, d.low, d.high)


def readme_table(shown: pd.DataFrame) -> Rows:
    arms = [RECORDED_AS.get(name, name) for name in shown.columns]
    at_std = ("gpu-25", "cpu-100-protocol", "cpu-english")
    for folder, setting in zip((*at_std, "cpu-100"), shown.index, strict=True):
        assert f", {recorded(f'{folder}/differences.csv').n.iloc[0]} seeds" in setting
    rows = [
        [difference(folder, arm, panels="Initial std 0.02") for arm in arms] for folder in at_std
    ]
    return [*rows, [mean_of_both(arm) for arm in arms]]


def one_setting(_: pd.DataFrame) -> Rows:
    """Expect the differences at one setting for all arms, each by the scatter of its own pairs."""
    runs = once("cpu-long-one-setting/results.csv", figure="param-ablation")
    runs = runs.pivot(index="seed", columns="arm", values="val_loss")
    rows = []
    for arm in ("unified", HEAD_DP, "hg+dp+or", "llama, d_ff + 8"):
        d = paired_difference(runs[arm], runs["llama"])
        rows.append([interval(d.mean, d.low, d.high)])
    return rows


def tuning_losses(shown: pd.DataFrame) -> Rows:
    """Expect the loss of each arm and seed at each rate and std of its tuning in `mini`."""
    losses = recorded("cpu-mini-tuning/results.csv").set_index(["arm", "seed"]).val_loss
    shown_losses = losses.map("{:.4f}".format)
    rows = []
    for point in shown.index:
        rate, std = point.split(", ")
        cells = []
        for column in shown.columns:
            arm, _, seed = column.rpartition(", seed ")
            run = (f"{arm}, lr {rate}, init_std {std}", seed)
            cells.append(shown_losses.get(run, "not trained"))
        rows.append(cells)
    return rows


def own_optima(shown: pd.DataFrame) -> Rows:
    rows = recorded(
        "cpu-100/differences.csv",
        figure="horizon",
        panel=OWN_OPTIMUM["panel"],
        quantity="final loss",
    )
    names = rows.arm.str.rpartition(", ")[0]
    by_arm = rows.assign(text=intervals(rows)).groupby(names, sort=False).text.apply(list)
    assert [name.partition(":")[0] for name in shown.index] == by_arm.index.tolist()
    return by_arm.tolist()


def optima_of_llama(shown: pd.DataFrame) -> Rows:
    arms = [name.partition(":")[0] for name in shown.index]
    columns = []
    for folder in ("cpu", "cpu-long", "cpu-100"):
        rows = recorded(f"{folder}/differences.csv", **OF_LLAMA, quantity="final loss")
        columns.append(intervals(rows.set_index("arm").loc[arms]))
    return [list(row) for row in zip(*columns, strict=True)]


def final_gains(runs: pd.DataFrame) -> pd.Series:
    """Return the loss on a second copy minus that on the first, at the end."""
    return runs["copying/second_minus_first"].str.rpartition(":")[2].astype(float)


def record(_: pd.DataFrame) -> Rows:
    own = tuned(3000)
    loss = recorded("cpu/results.csv", **OWN_OPTIMUM, arm="llama").val_loss.mean()
    rate = own["model.optim.lr"]
    std = own["model.backbone.init_std"]
    assert (
        f"record: A_ARGS = --model.optim.lr {rate} --model.backbone.init_std {std}\n"
        in (ROOT / "Makefile").read_text()
    )
    return [["llama", f"{rate}, {std}", "–", f"{loss:.3f}"]]


def verdict_counts(_: pd.DataFrame) -> Rows:
    """Expect the number of each verdict, of all claims and of the paper's."""
    verdicts, ours = paper_claims()
    rows = []
    for own in (verdicts, verdicts[~ours]):
        rows += [counts_of(own.verdict), counts_of(own.corrected)]
    return rows


def counts_of(words: pd.Series) -> list[str]:
    order = ["holds", "contradicted", "not resolved", "not testable here"]
    return words.value_counts().reindex(order, fill_value=0).astype(str).tolist()


def paper_claims() -> tuple[pd.DataFrame, pd.Series]:
    """Return the verdicts of `cpu`, and which of them are on claims that are not in the paper's
    figures."""
    verdicts = recorded("cpu/verdicts.csv")
    ours = verdicts.figure.isin(["own-optimum", "routing", "tuning"])
    return verdicts, ours | (verdicts.paper == "not stated")


TABLES: dict[tuple[str, str], Callable[[pd.DataFrame], Rows]] = {
    ("README", "| setting, 100 tokens"): readme_table,
    ("results", "of `mini`, nats per token"): parts("gpu-25"),
    ("results", "of `tiny`, nats per token"): parts("cpu-100-protocol"),
    ("results", "of `tiny`, three seeds"): parts("cpu-100-protocol"),
    ("cpu-100-protocol", "of `tiny` at std 0.07"): parts("cpu-100-protocol", LARGER),
    ("results", "of `tiny` on English"): parts("cpu-english", "Initial std"),
    ("cpu-english", "| strategy | seed 10"): losses("cpu-english", "Initial std"),
    ("cpu-english", "| claim"): claims("cpu-english"),
    ("results", "| strategy - `llama`, each"): own_optima,
    ("cpu-long", "| arm - `llama`, nats"): one_setting,
    ("results", "| strategy - `llama`, both"): optima_of_llama,
    ("cpu-100-protocol", "| rate of `tiny` at std 0.02"): rates("cpu-100/runs.csv"),
    ("cpu-100-protocol", "| rate of `tiny` at std 0.07"): rates("cpu-100/runs.csv", LARGER),
    ("cpu-100-protocol", "| rate of `tiny` without scale"): rates(
        "cpu-100/runs.csv", "Initial std 0.02", "nop"
    ),
    ("gpu-25", "| rate of `mini` at std 0.02"): rates("gpu-25/results.csv"),
    ("cpu", "| claims | hold"): verdict_counts,
    ("cpu-small", "| learning rate | seed 100"): rates("cpu-small/runs.csv"),
    ("experiments", "| date |"): record,
    ("gpu-25", "| seed |"): losses("gpu-25", "Initial std 0.02"),
    ("gpu-25", "| claim |"): claims("gpu-25"),
    ("cpu-100-protocol", "| seed |"): losses("cpu-100-protocol", "Initial std 0.02"),
    ("cpu-100-protocol", "| strategy | seed"): losses("cpu-100-protocol", "Initial std 0.02"),
    ("cpu-100-protocol", "| strategy at std 0.07"): losses("cpu-100-protocol", LARGER),
    ("cpu-100-protocol", "| claim |"): claims("cpu-100-protocol"),
    ("cpu-100-parts", "| strategy | seed"): losses("cpu-100-parts"),
    ("cpu-100-parts", "| claim |"): claims("cpu-100-parts"),
    ("cpu-100-other-norms", "| strategy | seed"): losses("cpu-100-other-norms"),
    ("cpu-100-other-norms", "| claim |"): claims("cpu-100-other-norms"),
    ("cpu-100-copying", "| difference to `llama`"): parts("cpu-100-copying", ""),
    ("cpu-mini", "| strategy | seed"): losses("cpu-mini"),
    ("cpu-mini", "| claim |"): claims("cpu-mini"),
    ("cpu-mini-tuning", "| rate, initial std |"): tuning_losses,
    ("cpu-mini-own-optimum", "| claim |"): claims("cpu-mini-own-optimum"),
    ("cpu-mini-own-optimum", "| part of the difference"): parts_of_mini,
    ("results", "of `mini`, six seeds"): parts_of_mini,
    ("cpu-mini-own-optimum", "| at the optimum of "): losses("cpu-mini-own-optimum", "All"),
    ("cpu-mini-own-optimum", "| at the own optimum |"): losses("cpu-mini-own-optimum", "Each"),
    ("cpu-english", "| rate of `tiny`"): rates("cpu-english/results.csv", "Learning rate of llama"),
    ("cpu-largest-rate", "| claim: depends"): claims("cpu-largest-rate"),
    ("cpu-curves", "| claim of balance |"): ratios("cpu-curves", "balance"),
    ("cpu-100-protocol-lengths", "| claim |"): claims("cpu-100-protocol-lengths"),
    ("cpu-100-protocol-lengths", "| strategy after 7 |"): losses("cpu-100-protocol-lengths", "7 "),
    ("cpu-100-protocol-lengths", "| strategy after 27 |"): losses(
        "cpu-100-protocol-lengths", "27 "
    ),
    ("cpu-100-protocol-lengths", "| rate of `tiny`, 7 "): rates(
        "cpu-100-protocol-lengths/results.csv", "Learning rate of llama, 7 tokens per parameter"
    ),
    ("cpu-100-protocol-lengths", "| rate of `tiny`, 27 "): rates(
        "cpu-100-protocol-lengths/results.csv", "Learning rate of llama, 27 tokens per parameter"
    ),
    ("cpu-100-unified-rates", "| strategy and rate |"): losses("cpu-100-unified-rates"),
    ("results", "| difference to `llama` by length"): by_length,
}


@pytest.mark.parametrize(("name", "head"), TABLES)
def test_table_equals_the_recording(name: str, head: str) -> None:
    shown = table(name, head)
    expected = TABLES[name, head](shown)
    cells = shown.to_numpy().tolist()
    assert [row[: len(own)] for row, own in zip(cells, expected, strict=True)] == expected


@pytest.mark.parametrize("name", ["cpu", "cpu-curves", "cpu-long", "cpu-100"])
def test_claims_of_a_page_are_those_of_its_report(name: str) -> None:
    """A row is a claim; on the pages of `cpu`, the first claim of a figure with the number of each
    verdict."""
    report = (ROOT / f"results/{name}/report.md").read_text().replace("−", "-")
    _, *expected = claim_lines(report.partition("## Claims")[2].partition("\n## ")[0])
    if name in ("cpu", "cpu-curves"):
        verdicts = recorded(f"{name}/verdicts.csv").assign(line=expected)
        expected = []
        for _, own in verdicts.groupby("figure", sort=False):
            first = (own[own.primary] if own.primary.any() else own).line.iloc[0]
            expected.append(f"{first} {' · '.join(counts_of(own.verdict))} |")
    shown = claim_lines(page(name).partition("| figure |")[2].partition("\n\n")[0])
    assert shown == expected and len(expected) > 2


def claim_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:2] == "| " and "---" not in line]


# Intervals and numbers of the text


def between(folder: str, b: str) -> PairedDifference:
    """Return the difference of two forms of unified to each other, or to another arm, with the
    scatter of all."""
    runs = recorded(f"{folder}/results.csv", figure="protocol")
    runs = runs[~runs.panel.str.startswith(LARGER) & (runs.arm != "nop, own rate")].drop_duplicates(
        ["arm", "seed"]
    )
    rows = {arm: dict(zip(own.seed, own.val_loss, strict=True)) for arm, own in runs.groupby("arm")}
    return BlockDesign(rows).difference(b, HEAD_DP)


def gain_of_or() -> PairedDifference:
    """Return how much more hg+dp+or gains from a second copy than llama."""
    runs = recorded("cpu-100-protocol/results.csv", panel="Initial std 0.02, hg+dp+or")
    gains = runs.assign(gain=final_gains(runs)).pivot(index="seed", columns="arm", values="gain")
    return paired_difference(gains["llama"], gains["hg+dp+or"])


def against_the_other_llama() -> list[PairedDifference]:
    """Return the differences of the tuned arms of `tiny` to `llama` at its second setting, which
    was equally good in tuning."""
    runs = recorded("cpu-100/runs.csv", figure="own-optimum", arm="llama")
    other = runs[runs.lr == 0.0036].set_index("seed").val_loss
    arms = once("cpu-100/results.csv", **OWN_OPTIMUM).pivot(
        index="seed", columns="arm", values="val_loss"
    )
    return [paired_difference(arms[arm], other.loc[arms.index]) for arm in arms]


def recorded_intervals() -> Iterator[tuple[float, float, float]]:
    """Yield estimate, low and high of each recorded row, and of the differences that pages compute
    from runs."""
    for path in (*ROOT.glob("results/*/differences.csv"), *ROOT.glob("results/*/verdicts.csv")):
        if path.read_text().strip():
            yield from (
                pd.read_csv(path).dropna(subset="low")[["estimate", "low", "high"]].to_numpy()
            )
    computed = [
        between("gpu-25", "unified"),
        between("gpu-25", "hg+dp+or"),
        between("cpu-100-protocol", "unified"),
        gain_of_or(),
        *against_the_other_llama(),
    ]
    for d in computed:
        yield d.mean, d.low, d.high


NUMBER = r"[+-]?\d+\.\d+"
INTERVAL = re.compile(
    rf"({NUMBER})(?: lower| higher| times as many tokens)? \((?:[\w%]+ interval )?({NUMBER}) to"
    rf" ({NUMBER})"
)
#: pages whose intervals are measured elsewhere: comparisons on one machine, and step times of a GPU
ELSEWHERE = ("docs/compare.md", "results/gpu/README.md", "results/compare/README.md")
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/*/README.md")),
]
PAGES = [path for path in PAGES if str(path.relative_to(ROOT)) not in ELSEWHERE]
#: page -> intervals of runs that no table of differences has
UNRECORDED = {
    "docs/results.md": {
        ("+0.028", "+0.008", "+0.047"),
        ("-0.000", "-0.028", "+0.027"),
        ("+0.018", "-0.025", "+0.060"),
    },
    "results/cpu-100/README.md": {("+0.024", "-0.074", "+0.025")},
}


@cache
def known_intervals() -> set[tuple[str, ...]]:
    """Return the recorded intervals as texts; a page may negate them (`0.058 below`)."""
    known = {
        tuple(re.findall(NUMBER, mean_of_both(arm)))
        for arm in ("hg+dp+or", "unified", HEAD_DP, "nop")
    }
    for mean, low, high in recorded_intervals():
        for ends in ((mean, low, high), (-mean, -high, -low), (abs(mean), low, high)):
            for digits in ("+.2f", "+.3f", "+.4f"):
                known.add(tuple(f"{end:{digits}}" for end in ends))
    return known


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_intervals_of_a_page_are_recorded(path: Path) -> None:
    text = " ".join(path.read_text().replace("−", "-").split())
    found = [
        tuple(end if end[0] in "+-" else f"+{end}" for end in match.groups())
        for match in INTERVAL.finditer(text)
    ]
    assert set(found) - known_intervals() == UNRECORDED.get(str(path.relative_to(ROOT)), set())


#: two ends without their estimate next to them, as in "0.035 lower (90% interval 0.014 to 0.056)"
BOUNDS = re.compile(r"(?:\(|interval |, |: )([+-]?\d+\.\d{3,}) to ([+-]?\d+\.\d{3,})")
#: page -> bounds that no table has: printed by a command, or of runs outside the tables
OTHER_BOUNDS = {
    "docs/quickstart.md": {("+0.053", "+0.087")},
    "results/cpu-long/README.md": {("+0.033", "+0.0017")},  # stds
}


def signed(number: str) -> str:
    return number if number[0] in "+-" else f"+{number}"


@cache
def known_bounds() -> set[tuple[str, str]]:
    """Return the ends of the recorded intervals as texts; a page may negate them."""
    known = set()
    for _, low, high in recorded_intervals():
        for first, last in ((low, high), (-high, -low)):
            for digits in ("+.3f", "+.4f"):
                known.add((f"{first:{digits}}", f"{last:{digits}}"))
    return known | {ends[1:] for ends in known_intervals() if len(ends) == 3}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_bounds_of_a_page_are_recorded(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    text = " ".join(path.read_text().replace("−", "-").split())
    found = {(signed(low), signed(high)) for low, high in BOUNDS.findall(text)}
    exceptions = OTHER_BOUNDS.get(name, set())
    exceptions = exceptions | {ends[1:] for ends in UNRECORDED.get(name, set())}
    assert found - known_bounds() - exceptions == set()


def share_of_seed(folder: str, **only: str) -> float:
    """Return the share of the seed in the variance of a run, by the mean squares of seeds and
    residuals."""
    runs = once(f"{folder}/results.csv", **only)
    losses = runs.pivot(index="arm", columns="seed", values="val_loss").dropna().to_numpy()
    n_arms, n_seeds = losses.shape
    within_arms = losses - losses.mean(axis=1, keepdims=True)
    of_seeds = within_arms.mean(axis=0)
    residuals = within_arms - of_seeds
    residual = (residuals**2).sum() / ((n_arms - 1) * (n_seeds - 1))
    seed = (of_seeds**2).sum() / (n_seeds - 1) - residual / n_arms
    return float(seed / (seed + residual))


#: size of a model or length of training in the name of an arm
POINT = r"(?:, (?:(?:moe-)?tiny[\w-]*|[\d.]+ tokens a parameter))?"


def test_number_of_verdicts_on_the_main_claim_is_that_of_the_log() -> None:
    log = pd.read_csv(ROOT / "results/log.csv")
    main_claim = rf"(?:.*: )?unified{POINT} ends below llama{POINT}(?:, each at its own optimum)?"
    verdicts = log[log.claim.str.fullmatch(main_claim)]
    places = verdicts[["budget", "figure"]].drop_duplicates()
    shown = re.search(r"has (\d+) verdicts on .*? in (\d+) figures", page("results"), re.DOTALL)
    assert shown is not None
    assert list(map(int, shown.groups())) == [len(verdicts), len(places)]


DECAY = "The {} budget ({} billion tokens in the paper)"


@pytest.mark.parametrize(
    ("text", "folder", "only"),
    [
        ("{} among the arms of `reparameterization`", "cpu", {"figure": "reparameterization"}),
        ("{} (the figure `sharpness`)", "cpu-curves", {"figure": "sharpness"}),
        ("{} (`iwd-dp`)", "cpu-settings", {"figure": "iwd-dp"}),
        ("{} under Muon", "cpu-curves", {"figure": "muon"}),
        ("{} under `wsd`", "cpu-curves", {"figure": "wsd"}),
        ("{} and 94% among Gemma's", "cpu", {"panel": DECAY.format("shorter", 10)}),
        ("91% and {} among Gemma's", "cpu", {"panel": DECAY.format("longer", 50)}),
        ("{} (the arms of `served`)", "cpu-long", {"figure": "served"}),
        ("{} (those at one setting)", "cpu-long-one-setting", {"figure": "param-ablation"}),
        ("{} in `tiny`", "cpu-100-protocol", {"figure": "protocol"}),
        ("{} in `mini`", "gpu-25", {"figure": "protocol"}),
    ],
)
def test_share_of_the_seed_equals_the_recordings(
    text: str, folder: str, only: dict[str, str]
) -> None:
    text_of_page = " ".join(page("verdicts").split())
    assert text.format(f"{share_of_seed(folder, **only):.0%}") in text_of_page


def test_picture_of_stds_has_the_protocol_at_each_length() -> None:
    """A picture without the lengths at which `unified` ends above llama would show one sign."""
    points = runpy.run_path(str(ROOT / "results/draw.py"))["all_points"]()
    of_protocol = points[(points["std"] == 0.02) & (points.model == "tiny")]
    of_protocol = of_protocol[of_protocol.text == "Python"].sort_values("tokens_per_param")
    shown = table("results", "| difference to `llama` by length")
    for name, cells in shown.iterrows():
        arm = HEAD_DP if "dp at" in str(name) else str(name)
        assert intervals(of_protocol[of_protocol.arm == arm]) == cells.tolist()


def test_readme_choice_of_strategy_equals_the_recordings() -> None:
    large = "gpu-25"
    small = "cpu-100-protocol"
    expected = [
        [difference(large, HEAD_DP), difference(small, HEAD_DP)],
        [mean_of_both("hg+dp+or")],
        [difference(large, "hg+dp+or"), difference(small, "hg+dp+or")],
        [difference(small, f"llama with {norm}") for norm in ("QK-norm", "Peri-LN")],
    ]
    cells = table("README", "| your case |").iloc[:, 1]
    assert [re.findall(rf"{NUMBER} \(.*?\)", cell) for cell in cells] == expected


@pytest.mark.parametrize(
    ("budget", "path", "panel", "arm"),
    [
        ("cpu-100", "cpu-100/runs.csv", "Initial std 0.02", "llama"),
        ("cpu-100", "cpu-100/runs.csv", "Initial std 0.02", "nop"),
        ("cpu-100", "cpu-100/runs.csv", LARGER, "llama"),
        ("gpu-25", "gpu-25/results.csv", "Initial std 0.02", "llama"),
    ],
)
def test_protocol_rate_has_the_lowest_mean_of_its_tuning_runs(
    budget: str, path: str, panel: str, arm: str
) -> None:
    of_rates = tuning(path, panel, arm)
    assert all(len(values) == 2 for values in of_rates)
    best = of_rates.map(sum).idxmin()
    (found,) = [each for each in load_figure("protocol").panels if each.title == panel]
    assert found.lr is not None and found.lr[budget] == best
    assert of_rates.index.min() < best < of_rates.index.max()


def test_reliability_table_sums_equal_faults_json() -> None:
    """A row of the page may sum several faults, so the sums over all faults and over each word are
    compared."""
    shown = table("reliability", "| fault |").replace(",", "", regex=True).astype(int).reset_index()
    measured = pd.read_json(ROOT / "results/faults.json")
    for word in ("", "kill -9", "SIG", "worker killed", "left out", "hostile checkpoint"):
        ours, theirs = (
            rows[rows.fault.str.contains(word, regex=False)] for rows in (shown, measured)
        )
        assert (
            ours.iloc[:, 1:].sum().tolist() == theirs[["tries", "recovered", "lost"]].sum().tolist()
        ), word


def test_log_script_adds_the_verdicts_of_the_folders_that_the_log_lacks() -> None:
    script = runpy.run_path(str(ROOT / "results/log.py"))
    log = script["read"](ROOT / "results/log.csv")
    assert script["new_verdicts"](log).empty
    assert script["new_verdicts"](log[:-1]).to_numpy().tolist() == log[-1:].to_numpy().tolist()


# Records


def comparison(folder: Path, high: float, seconds: float) -> Path:
    differences = (
        f"arm,baseline,quantity,n,estimate,low,high\nx,a,final loss,2,-0.0154,-0.03,{high}"
    )
    (folder / "differences.csv").write_text(differences)
    rows = ["run,arm,val_loss,lr,seconds,date"]
    for arm, loss, time in (("a", 3.577, 10.0), ("x", 3.5618, seconds)):
        rows += [f"{arm},{arm},{loss},0.0065,{time},2026-11-26 10:00 UTC"] * 2  # in two panels
    (folder / "results.csv").write_text("\n".join(rows))
    (folder / "x").mkdir()
    config = "model: {scale: hg+dp+or, backbone: {init_std: 0.033}}"
    (folder / "x/config.yaml").write_text(config)
    return folder


@pytest.mark.parametrize(
    ("high", "seconds", "is_record"),
    [(-0.001, 10.9, True), (0.001, 10, False), (-0.001, 11.1, False)],
)
def test_record_lower_interval_adds_the_last_row(
    tmp_path: Path, high: float, seconds: float, is_record: bool
) -> None:
    add = runpy.run_path(str(ROOT / "results/record.py"))["add"]
    records = tmp_path / "records.md"
    records.write_text("# Records\n\n| a |\n|---|\n| 1 |\n\nThe end.\n")
    found = comparison(tmp_path, high, seconds)
    if not is_record:
        with pytest.raises(SystemExit):
            add(found, records)
        return
    add(found, records)
    row = "| 2026-11-26 | `hg+dp+or` | 0.0065, 0.033 | −0.015 (−0.030 to −0.001) | 3.562 |"
    assert records.read_text() == f"# Records\n\n| a |\n|---|\n| 1 |\n{row}\n\nThe end.\n"
