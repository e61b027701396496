"""Numbers on the pages equal the recordings in results/, and records are added to their page.

Every interval of a page is one of a recording, and tables equal it cell by cell.
"""

import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

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


def tables(text: str) -> list[pd.DataFrame]:
    """Return the tables of a page; the first column is the index."""
    found = []
    for match in re.finditer(r"^\|.*(\n\|.*)*", text.replace("`", ""), re.MULTILINE):
        lines = match[0].splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found.append(pd.DataFrame(cells[2:], columns=cells[0]).set_index(cells[0][0]))
    return found


def table(name: str, *heads: str) -> pd.DataFrame:
    """Return the table of a page whose first columns have these heads."""
    (found,) = (
        shown
        for shown in tables(page(name))
        if (shown.index.name, *shown.columns)[: len(heads)] == heads
    )
    return found


# Tables that are found by their head: the cells after the first column are those of a recording


@cache
def recordings(name: str) -> list[pd.DataFrame]:
    """Return the files of this name of all recordings."""
    paths = sorted(ROOT.glob(f"results/*/{name}"))
    return [recording(f"{path.parent.name}/{name}") for path in paths if path.read_text().strip()]


def by_title(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the rows of the panels whose titles begin alike, and those of all panels."""
    return [*(own for _, own in rows.groupby(rows.panel.str.split(",").str[0])), rows]


@cache
def recorded_losses() -> list[pd.DataFrame]:
    """Return final losses, arm x seed."""
    found = []
    for runs in recordings("results.csv"):
        for own in by_title(runs):
            each_once = own.drop_duplicates(["arm", "seed"])
            by_arm = each_once.pivot(index="arm", columns="seed", values="val_loss")
            found.append(by_arm.map("{:.4f}".format, na_action="ignore").fillna(""))  # no run
    return found


@cache
def recorded_parts() -> list[pd.DataFrame]:
    """Return the difference and its parts, part x arm, and for each arm part x panel."""
    found = []
    for rows in recordings("differences.csv"):
        shown = rows.assign(text=intervals(rows))
        for own in by_title(shown):
            each_once = own.drop_duplicates(["quantity", "arm"])
            found.append(each_once.pivot(index="quantity", columns="arm", values="text"))
        for _, own in shown.drop_duplicates(["quantity", "arm", "panel"]).groupby("arm"):
            of_arm = own.pivot(index="quantity", columns="panel", values="text")
            found.append(of_arm[own.panel.unique()])
    return [of_parts.loc[list(PARTS)] for of_parts in found if {*PARTS} <= {*of_parts.index}]


def losses(shown: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the losses of the arms and seeds of a table, whichever of them the rows are."""
    if shown.index.name == "seed":
        yield from (found.T for found in losses(shown.T.rename_axis("arm")))
        return
    seeds = shown.columns.str.removeprefix("seed ")
    for known in recorded_losses():
        if {*shown.index} <= {*known.index} and {*seeds} <= {*known.columns}:
            yield known.loc[shown.index, seeds]


def claims(shown: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield interval and corrected verdict of the claims of a recording, and of a figure."""
    digits = ".2f" if shown.columns[0].startswith("ratio") else "+.3f"
    for verdicts in recordings("verdicts.csv"):
        resolved = verdicts.dropna(subset="low")
        for own in (resolved, *(own for _, own in resolved.groupby("figure"))):
            yield pd.DataFrame({"interval": intervals(own, digits), "verdict": own.corrected})


def rates(shown: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the losses of tuning runs at the rates of a table."""
    for runs in (*recordings("runs.csv"), *recordings("results.csv")):
        of_seeds = runs[runs.seed.isin(shown.columns.str.removeprefix("seed "))]
        strategy = of_seeds.arm.str.split(",").str[0]
        for _, own in of_seeds.groupby(["figure", "panel", strategy], dropna=False):
            by_rate = own.pivot_table(index="lr", columns="seed", values="val_loss")
            if [f"{rate:g}" for rate in by_rate.index] == shown.index.tolist():
                yield by_rate.map("{:.3f}".format)


def parts(shown: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the parts of the differences of the arms of a table, or of all panels."""
    for known in recorded_parts():
        if {*shown.columns} <= {*known.columns}:
            yield known[shown.columns]
        yield known


def kind_of(shown: pd.DataFrame) -> Callable[[pd.DataFrame], Iterator[pd.DataFrame]] | None:
    """Return what a table shows by its head."""
    head = shown.index.name
    has_seeds = shown.columns.str.fullmatch(r"seed \d+").all()
    if re.match("claim( |:|$)", head):
        return claims
    if re.match("(learning )?rate( |$)", head) and has_seeds:
        return rates
    if head == "seed" or has_seeds:
        return losses
    is_of_parts = len(shown) == len(PARTS) and shown.index[0] == PARTS[0]
    return parts if is_of_parts else None


def tables_of_recordings() -> list[Any]:
    """Return the tables of losses, claims, rates and parts of all pages of results."""
    paths = [ROOT / "README.md", ROOT / "docs/results.md", *ROOT.glob("results/*/README.md")]
    found = []
    for path in sorted(paths):
        for shown in tables(path.read_text().replace("−", "-")):
            kind = kind_of(shown)
            if kind is claims:
                shown = shown.iloc[:, :2]  # the others are not ours
            if kind is not None:
                found.append(pytest.param(shown, kind, id=f"{named(path)}: {shown.index.name}"))
    return found


@pytest.mark.parametrize(("shown", "kind"), tables_of_recordings())
def test_table_is_that_of_a_recording(
    shown: pd.DataFrame, kind: Callable[[pd.DataFrame], Iterator[pd.DataFrame]]
) -> None:
    recorded_cells = [known.to_numpy().tolist() for known in kind(shown)]
    assert shown.to_numpy().tolist() in recorded_cells


# Other tables: page, first head -> expected cells after the first column


def tuning(path: str, panel: str = "Initial std 0.02", arm: str = "llama") -> pd.Series:
    """Return the losses of the tuning runs per learning rate."""
    rows = recorded(path, panel=panel)
    rows = rows[
        rows.figure.isin(["protocol-rates", "english", "protocol-lengths"])
        & rows.arm.str.startswith(arm)
    ]
    return rows.sort_values("seed").groupby("lr").val_loss.apply(list)


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


OTHER_TABLES: dict[tuple[str, str], Callable[[pd.DataFrame], Rows]] = {
    ("README", "setting, 100 tokens per parameter"): readme_table,
    ("cpu", "claims"): verdict_counts,
    ("cpu-mini-tuning", "rate, initial std"): tuning_losses,
    ("experiments", "date"): record,
}


@pytest.mark.parametrize(("name", "head"), OTHER_TABLES)
def test_table_equals_the_recording(name: str, head: str) -> None:
    shown = table(name, head)
    expected = OTHER_TABLES[name, head](shown)
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
#: an estimate and its ends, or the ends alone if they have three digits or more
INTERVAL = re.compile(
    rf"(?:({NUMBER})(?: lower| higher| times as many tokens)? \((?:[\w%]+ interval )?"
    rf"|(?:\(|interval |, |: )(?=[+-]?\d+\.\d{{3}}))({NUMBER}) to ({NUMBER})"
)
#: pages whose intervals are measured elsewhere: comparisons on one machine, and step times of a GPU
ELSEWHERE = ("docs/compare.md", "results/gpu/README.md", "results/compare/README.md")
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/*/README.md")),
]
PAGES = [path for path in PAGES if str(path.relative_to(ROOT)) not in ELSEWHERE]
#: page -> intervals that no table of differences has: of other runs, or printed by a command
UNRECORDED = {
    "docs/quickstart.md": {("", "+0.053", "+0.087")},
    "docs/results.md": {
        ("+0.028", "+0.008", "+0.047"),
        ("-0.000", "-0.028", "+0.027"),
        ("+0.018", "-0.025", "+0.060"),
    },
    "results/cpu-100/README.md": {("+0.024", "-0.074", "+0.025")},
    "results/cpu-long/README.md": {("", "+0.033", "+0.0017")},  # stds
}


@cache
def known_intervals() -> set[tuple[str, ...]]:
    """Return the recorded intervals as texts, with and without their estimate; a page may negate
    them (`0.058 below`)."""
    known = {
        tuple(re.findall(NUMBER, mean_of_both(arm)))
        for arm in ("hg+dp+or", "unified", HEAD_DP, "nop")
    }
    for mean, low, high in recorded_intervals():
        for ends in ((mean, low, high), (-mean, -high, -low), (abs(mean), low, high)):
            for digits in ("+.2f", "+.3f", "+.4f"):
                known.add(tuple(f"{end:{digits}}" for end in ends))
    return known | {("", low, high) for _, low, high in known}


def signed(number: str) -> str:
    return f"+{number}" if number[:1].isdigit() else number


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_intervals_of_a_page_are_recorded(path: Path) -> None:
    text = " ".join(path.read_text().replace("−", "-").split())
    found = [tuple(map(signed, match.groups(""))) for match in INTERVAL.finditer(text)]
    assert set(found) - known_intervals() == UNRECORDED.get(str(path.relative_to(ROOT)), set())


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
    shown = table("results", "difference to llama by length, nats per token")
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
    cells = table("README", "your case").iloc[:, 1]
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
    shown = table("reliability", "fault").replace(",", "", regex=True).astype(int).reset_index()
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
