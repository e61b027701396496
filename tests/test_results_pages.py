"""Numbers on the pages equal the recordings in results/, and records are added to their page."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import permutation_test, spearmanr

from lightning_sv.experiments.report.copying import FORMED
from lightning_sv.statistics.block_anova import BlockDesign
from lightning_sv.statistics.paired import paired_difference, tokens_to_reach
from tests.conftest import ROOT

VERDICTS = ("holds", "contradicted", "not resolved", "not testable here")
OWN_OPTIMUM = {"figure": "own-optimum", "panel": "Each arm at its own optimum"}


def page(name: str) -> str:
    """Return a page of docs/, or the page of a recording, with hyphens as minus signs."""
    path = ROOT / f"docs/{name}.md"
    return (path if path.exists() else ROOT / f"results/{name}/README.md").read_text().replace("−", "-")


def recorded(path: str, **only: str) -> pd.DataFrame:
    """Return the rows of a recording that have these values."""
    rows = pd.read_csv(ROOT / "results" / path, dtype={"seed": str})
    for column, value in only.items():
        rows = rows[rows[column] == value]
    return rows


def table(text: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose head contains `head`."""
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def intervals(rows: pd.DataFrame, digits: str = "+.3f") -> list[str]:
    """Return the estimate and interval of each row."""
    figures = zip(rows.estimate, rows.low, rows.high, strict=True)
    return [f"{mean:{digits}} ({low:{digits}} to {high:{digits}})" for mean, low, high in figures]


def claims(folder: str) -> list[str]:
    """Return the lines of a report's table of claims, the head first."""
    section = (ROOT / f"results/{folder}/report.md").read_text().partition("## Claims")[2].partition("\n## ")[0]
    return [line.replace("−", "-") for line in section.splitlines() if line.startswith("| ")]


def test_reliability_table_sums_equal_faults_json() -> None:
    """A row of the page may sum several faults, so the sums over all faults and over each word are compared."""
    shown = pd.DataFrame(re.findall(r"^\| (.+)" + r" \| ([\d,]+)" * 3 + r" \|$", page("reliability"), re.MULTILINE))
    measured = pd.read_json(ROOT / "results/faults.json")
    shown.columns = ["fault", *(figures := ["tries", "recovered", "lost"])]
    for figure in figures:
        shown[figure] = shown[figure].str.replace(",", "").astype(int)
    for word in ("", "kill -9", "SIG", "worker killed", "left out", "hostile checkpoint"):
        ours, theirs = (rows[rows.fault.str.contains(word, regex=False)] for rows in (shown, measured))
        assert ours[figures].sum().tolist() == theirs[figures].sum().tolist(), word


def test_cpu_page_verdicts_equal_the_report() -> None:
    """A row has the first claim of a figure, and the number of its claims per verdict."""
    verdicts = recorded("cpu/verdicts.csv").assign(line=claims("cpu")[2:])
    expected = []
    for _, own in verdicts.groupby("figure", sort=False):
        first = (own[own.primary] if own.primary.any() else own).line.iloc[0]
        counts = own.verdict.value_counts().reindex(VERDICTS, fill_value=0)
        expected.append(f"{first} {' · '.join(map(str, counts))} |")
    first_section = page("cpu").partition("\n## ")[0]
    assert [line for line in first_section.splitlines() if line.startswith("| ")][2:] == expected
    ours = verdicts.figure.isin(["own-optimum", "routing", "sharpness", "tuning"]) | (verdicts.paper == "not stated")
    counts = [
        own[words].value_counts().reindex(VERDICTS, fill_value=0).astype(str).tolist()
        for own in (verdicts, verdicts[~ours]) for words in ("verdict", "corrected")
    ]  # fmt: skip
    assert [cells for _, *cells in table(page("cpu"), "| claims | hold")] == counts
    more = verdicts[ours & (verdicts.paper != "not stated")].verdict.value_counts()[list(VERDICTS[:3])].tolist()
    text = " ".join(page("cpu").split())
    assert f"This recording has {len(verdicts)} claims, of which {(~ours).sum()} are the paper's" in text
    assert (
        "{} more claims with a statement of the paper: {} hold, {} are contradicted, and {} are not".format(
            sum(more), *more
        )
        in text
    )


@pytest.mark.parametrize("budget", ["cpu-long", "cpu-100"])
def test_longer_run_pages_verdicts_equal_the_report(budget: str) -> None:
    section = page(budget).partition("\n## ")[0]
    shown = [row for row in section.partition("| figure |")[2].splitlines() if row.startswith("| ")]
    assert shown == claims(budget)[1:] and len(shown) > 2
    assert f"{recorded(f'{budget}/results.csv').run.nunique()} runs" in section


def test_differences_at_one_setting_equal_the_recording() -> None:
    section = page("cpu-long").partition("## At one setting for all arms\n")[2].partition("\n#")[0]
    quoted = re.findall(r"\| (-\S+ \(-\S+ to \S+\))", section)
    assert sorted(quoted) == sorted(intervals(recorded("cpu-long-one-setting/differences.csv")))


def protocol(folder: str, arm: str, quantity: str = "final loss") -> str:
    """Return the difference of one arm to llama at the paper's protocol."""
    rows = recorded(f"{folder}/differences.csv", arm=arm, quantity=quantity)
    return intervals(rows[rows.panel != "Initial std 0.02"])[0]


def mean_of_both_recordings(arm: str) -> str:
    """Return the difference of one arm to llama at its own optimum: the mean of two recordings per seed."""
    losses = []
    for folder, only in (("cpu-100", OWN_OPTIMUM), ("cpu-100-copying", {})):
        runs = recorded(f"{folder}/results.csv", **only).drop_duplicates(["arm", "seed"])
        losses.append(runs.pivot(index="seed", columns="arm", values="val_loss"))
    mean = (losses[0] + losses[1]) / 2
    difference = paired_difference(mean["llama"], mean[arm])
    return f"{difference.mean:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


def test_results_mean_of_two_recordings_equals_the_recordings() -> None:
    text = " ".join(page("results").split())
    for arm in ("hg+dp+or", "unified", "nop"):
        assert mean_of_both_recordings(arm) in text


#: preset -> name of the arm in the recordings, which are older
RECORDED_AS = {"unified-head-dp": "unified, dp at the lm_head"}


def test_readme_choice_of_strategy_equals_the_recordings() -> None:
    readme = (ROOT / "README.md").read_text().replace("−", "-")
    keeps_std, tunes, serves, norms = [row[2] for row in table(readme, "| your case |")]
    large, small = ("gpu-25", "cpu-100-protocol")
    head_dp = RECORDED_AS["unified-head-dp"]
    assert keeps_std == f"{protocol(large, head_dp)} at 1.05 M, {protocol(small, head_dp)} at 0.2 M"
    assert tunes == f"{mean_of_both_recordings('hg+dp+or')} at 0.2 M"
    assert serves.startswith(f"{protocol(large, 'hg+dp+or')} at 1.05 M, {protocol(small, 'hg+dp+or')} at")
    of_norms = [protocol(small, f"llama with {norm}") for norm in ("QK-norm", "Peri-LN")]
    assert norms.startswith("; ".join(of_norms))


def test_difference_by_std_has_every_quoted_difference() -> None:
    """The points of the picture of the first page, also those that docs/results.md quotes."""
    drawn = runpy.run_path(str(ROOT / "results/draw.py"))["all_points"]()
    points = drawn[drawn.arm == "unified"].estimate.map("{:+.3f}".format).tolist()
    answer = page("results").partition("**Answer.**")[2].partition("**Protocol.**")[0]
    quoted = re.findall(r"[+-]0\.\d{3}", answer.partition("Neither do they")[0])
    assert len(quoted) == 5
    assert set(quoted) <= set(points)


def test_readme_table_equals_the_recordings() -> None:
    """Two sizes at the paper's protocol, then the panel of own-optimum after 45,000 steps."""
    readme = (ROOT / "README.md").read_text().replace("−", "-")
    header = readme.partition("| setting, ")[2].partition("\n")[0].replace("`", "")
    _, *arms = [RECORDED_AS.get(cell.strip(), cell.strip()) for cell in header.strip("| ").split("|")]
    shown = table(readme, "| setting, ")
    assert [cells for _, *cells in shown] == [
        *([protocol(folder, arm) for arm in arms] for folder in ("gpu-25", "cpu-100-protocol")),
        [mean_of_both_recordings(arm) for arm in arms],
    ]
    for folder, (setting, *_) in zip(("gpu-25", "cpu-100-protocol", "cpu-100"), shown, strict=True):
        assert f", {recorded(f'{folder}/differences.csv').n[0]} seeds" in setting


PARTS = ("final loss", *(f"final loss, part of {kind}" for kind in ("repeat", "seen", "unseen")))
ARMS = ["unified", "unified, dp at the lm_head", "hg+dp+or", "nop"]
FURTHER = ["hg", "dp", "dnp", "llama with QK-norm", "llama with Peri-LN"]


def losses_by_seed(folder: str) -> pd.DataFrame:
    """Return the final losses at the paper's protocol, a row per seed and a column per arm."""
    runs = recorded(f"{folder}/results.csv", figure="protocol").drop_duplicates(["arm", "seed"])
    return runs.pivot(index="seed", columns="arm", values="val_loss").map("{:.4f}".format, na_action="ignore")


@pytest.mark.parametrize(("folder", "model"), [("cpu-100-protocol", "tiny"), ("gpu-25", "mini")])
def test_protocol_tables_equal_the_recording(folder: str, model: str) -> None:
    """The difference and its parts by kind of token, and the losses of each seed."""
    shown = [cells for _, *cells in table(page("results"), f"| difference to `llama` of `{model}`, nats")]
    assert shown == [[protocol(folder, arm, part) for arm in ARMS] for part in PARTS]
    losses = losses_by_seed(folder)[["llama", "nop", "hg+dp+or", *ARMS[:2]]].dropna().reset_index()
    assert table(page(folder), "| seed |") == losses.to_numpy().tolist()


@pytest.mark.parametrize(("folder", "n"), [("gpu-25", 3), ("cpu-100-protocol", 6)])
def test_protocol_differences_without_a_claim_equal_the_recording(folder: str, n: int) -> None:
    """Between two strategies, with the scatter of all; and the standard deviations of `mini`."""
    runs = recorded(f"{folder}/results.csv", figure="protocol")
    runs = runs[~runs.panel.str.startswith(LARGER) & (runs.arm != "nop, own rate")].drop_duplicates(["arm", "seed"])
    design = BlockDesign({arm: dict(zip(rows.seed, rows.val_loss, strict=True)) for arm, rows in runs.groupby("arm")})
    found = {other: design.difference(ARMS[1], other) for other in ("unified", "hg+dp+or")}
    words = {b: f"{-d.mean:.3f} ({-d.high:.3f} to {-d.low:.3f}) below `{b}`" for b, d in found.items()}
    text = " ".join(page("results").split())
    assert f"{words['unified']} itself" in text and all(d.n == n for d in found.values())
    if folder == "gpu-25":
        sd = runs.groupby("arm").val_loss.std().map("{:.3f}".format)
        said = f"from {sd['hg+dp+or']} (`hg+dp+or`) over {sd['llama']} (`llama`) to {sd[ARMS[1]]} (`{ARMS[0]}` with"
        assert words["hg+dp+or"] in text and said in text and (sd.min(), sd.max()) == (sd["hg+dp+or"], sd[ARMS[1]])


def test_protocol_split_by_kind_equals_the_recording() -> None:
    """How much comes from tokens in the context, and the gain of `hg+dp+or` from a second copy."""
    rows = recorded("cpu-100-protocol/differences.csv").set_index(["panel", "arm", "quantity"]).estimate
    small, large = ("Initial std 0.02, {}", f"{LARGER}, {{}}")

    def parts(panel: str, arm: str) -> list[float]:
        return [rows[panel, arm, part] for part in PARTS[1:]]

    ours = parts(small.format("hg+dp+or"), "hg+dp+or")
    apart = [a - b for a, b in zip(parts(small.format("hg+dp+or"), "unified"), ours, strict=True)]
    head = parts(large.format("dp at the lm_head"), ARMS[1])
    runs = recorded("cpu-100-protocol/results.csv", panel="Initial std 0.02, hg+dp+or")
    pages = " ".join((page("results") + page("cpu-100-protocol")).split())
    gains = runs.assign(gain=runs["copying/second_minus_first"].str.rpartition(":")[2].astype(float))
    gains = gains.pivot(index="seed", columns="arm", values="gain")
    gain = paired_difference(gains["hg+dp+or"], gains["llama"])
    for said in (
        f"`unified` has {-apart[2]:.3f} less from tokens that are not in the context, and {sum(apart[:2]):.3f} more",
        f"it is {-sum(ours):.3f} below `llama`, of which {-sum(ours[:2]):.3f} comes from tokens in the context",
        f"lowers its loss by {gain.mean:.3f} ({gain.low:.3f} to {gain.high:.3f}) more than that of `llama`",
        f"But {-sum(head[:2]):.3f} of the {-sum(head):.3f} that are measured for `dp` at the lm_head",
    ):
        assert said in pages, said


def test_other_norms_page_equals_the_recording() -> None:
    """The losses of each seed, and the differences that the pages quote."""
    folder = "cpu-100-other-norms"
    runs = recorded(f"{folder}/results.csv")
    losses = runs.pivot(index="arm", columns="seed", values="val_loss").map("{:.4f}".format)
    for arm, *shown in table(page(folder), "| strategy | seed"):
        assert shown == losses.loc[arm].tolist()

    differences = recorded(f"{folder}/differences.csv", quantity="final loss").set_index("arm")
    best = differences.loc["hg+dp+or with Peri-LN"]
    text = " ".join(page("results").split())
    assert f"{-best.estimate:.3f} ({-best.high:.3f} to {-best.low:.3f}) below `llama`, lower than any" in text
    assert differences.estimate.idxmin() == "hg+dp+or with Peri-LN"
    assert f"{-best.estimate:.3f} below `llama`" in (ROOT / "README.md").read_text()


def test_log_script_adds_the_verdicts_of_the_folders_that_the_log_lacks() -> None:
    script = runpy.run_path(str(ROOT / "results/log.py"))
    log = script["read"](ROOT / "results/log.csv")
    assert script["new_verdicts"](log).empty
    assert script["new_verdicts"](log[:-3]).to_numpy().tolist() == log[-3:].to_numpy().tolist()


def test_limitations_equal_the_log_and_the_runs() -> None:
    """The number of verdicts on one question, and how often the text was read."""
    log = recorded("log.csv")
    verdicts = log[log.claim.str.contains("unified ends below llama(?! with)")]
    settings = verdicts.groupby(["budget", "figure"]).ngroups
    text = " ".join(page("results").split())
    assert f'has {len(verdicts)} verdicts on "unified ends below llama", in {settings} figures and budgets' in text

    stdlib_tokens = 30_279_913  # docs and data/README.md; corpus 9f59d20f
    for folder, epochs in (("gpu-25", "3.5 times"), ("cpu-mini", "0.7 of it")):
        tokens = recorded(f"{folder}/results.csv").tokens.max()
        assert f"{tokens / stdlib_tokens:.1f}" == epochs.split()[0]
        assert epochs in text


def test_protocol_tables_of_further_arms_equal_the_recording() -> None:
    shown = [cells for _, *cells in table(page("results"), "| difference to `llama` of `tiny`, three seeds")]
    assert shown == [[protocol("cpu-100-protocol", arm, part) for arm in FURTHER] for part in PARTS]
    losses = losses_by_seed("cpu-100-protocol")[FURTHER].dropna().T.reset_index()
    assert table(page("cpu-100-protocol"), "| strategy | seed") == losses.to_numpy().tolist()
    low, high = (protocol("cpu-100-protocol", arm)[1:6] for arm in FURTHER[3:])
    assert f"{low} and {high} nats per token below `llama`" in page("related")
    readme = (ROOT / "README.md").read_text()
    hours = recorded("cpu-100-protocol/results.csv").drop_duplicates("run").seconds.sum() / 3600 / 2
    assert all(
        f"in about {hours:.0f} hours on two cores" in " ".join(text.split()) for text in (readme, page("results"))
    )


def test_tables_of_the_larger_std_equal_the_recording() -> None:
    folder = "cpu-100-protocol"
    found = recorded(f"{folder}/differences.csv")
    found = found[found.panel.isin([f"{LARGER}, {arm}" for arm in ("hg+dp+or", "nop", "dp at the lm_head")])]
    expected = [intervals(found[found.quantity == part].set_index("arm").loc[ARMS]) for part in PARTS]
    assert [cells for _, *cells in table(page(folder), "| difference to `llama` of `tiny` at std 0.07")] == expected
    runs = recorded(f"{folder}/results.csv")
    runs = runs[runs.panel.str.startswith(LARGER)].drop_duplicates(["arm", "seed"])
    losses = runs.pivot(index="arm", columns="seed", values="val_loss")
    shown = losses.loc[["llama", *ARMS]].map("{:.4f}".format).reset_index().to_numpy().tolist()
    assert table(page(folder), "| strategy at std 0.07") == shown


def test_tables_of_the_parts_equal_the_recording() -> None:
    for folder in ("cpu-100-parts", "cpu-mini"):
        runs = recorded(f"{folder}/results.csv").drop_duplicates(["arm", "seed"])
        losses = runs.pivot(index="arm", columns="seed", values="val_loss").dropna()  # arms with all seeds
        rows = table(page(folder), "| strategy | seed")
        assert rows == losses.loc[[name for name, *_ in rows]].map("{:.4f}".format).reset_index().to_numpy().tolist()
        assert len(rows) == len(losses)
    verdicts = recorded("cpu-100-parts/verdicts.csv")
    text = " ".join(page("results").partition("**Which part of")[2].partition("\n\n")[0].split())
    for arm, word in (("without or", "higher"), ("dp at the lm_head", "lower"), ("dp at gate and up", "lower")):
        (row,) = verdicts[verdicts.claim.str.endswith(arm)].itertuples()
        assert f"{abs(row.estimate):.3f} {word}" in text and (row.estimate < 0) == (word == "higher")
    judged = recorded("cpu-mini/verdicts.csv")
    cells = [list(row) for row in zip(intervals(judged), judged.corrected, judged.paper, strict=True)]
    assert [row for _, *row in table(page("cpu-mini"), "| claim")] == cells
    assert f"`dp` at q and k it is {-judged.estimate.iloc[0]:.3f} higher" in text
    below = intervals(recorded("cpu-mini/differences.csv", arm="unified", quantity="final loss"))[0]
    assert "{1} ({3} to {2}, a 95%".format(*re.split(r"[ (]*-| to -|\)", below)) in page("cpu-mini")


def test_scatter_of_the_proxy_equals_the_recordings() -> None:
    runs = pd.concat([recorded("cpu-mini/results.csv").drop_duplicates("run"), recorded("cpu-mini/more-seeds.csv")])
    curves = [[tuple(map(float, at.split(":"))) for at in c.split()] for c in runs["copying/second_minus_first"]]
    runs = runs.assign(gain=[points[-1][1] for points in curves])
    assert [(row.arm, row.seed) for row in runs[runs.gain > FORMED].itertuples()] == [("unified, dp at v", "12")]
    own = runs[runs.arm == "llama"].sort_values("seed")
    text, (shown,) = " ".join(page("cpu-mini").split()), table(page("cpu-mini"), "| seed of `llama`")
    assert shown[1:] == own.val_loss.map("{:.4f}".format).tolist() and len(own) == 6
    formed = [curves[i] for i in np.flatnonzero(runs.arm == "llama")]
    times = [tokens_to_reach([at for at, _ in points], [x for _, x in points], FORMED) for points in formed]
    assert f"after {min(times) / 1e6:.1f} to {max(times) / 1e6:.1f} million tokens. At the end" in text
    assert f"is {-own.gain.max():.2f} to {-own.gain.min():.2f} nats per token below" in text
    scatter = f"{own.val_loss.std():.3f}"
    assert f"standard deviation is {scatter}." in text and own.val_loss.std() < 0.01
    assert all(scatter in page(name).partition("six seeds")[2] for name in ("copying", "gpu-25"))


def test_tables_of_copying_runs_equal_both_recordings() -> None:
    """Runs of own-optimum, trained again on a different CPU, and the parts of their differences."""
    again = recorded("cpu-100-copying/results.csv").drop_duplicates(["arm", "seed"])
    first = recorded("cpu-100/results.csv", **OWN_OPTIMUM).set_index(["arm", "seed"]).val_loss
    gains = again["copying/second_minus_first"].str.rpartition(":")[2].astype(float)
    losses = [first[key] for key in zip(again.arm, again.seed, strict=True)]
    cells = zip(again.arm, again.seed, losses, again.val_loss, gains, strict=True)
    shown = [[arm, seed, f"{was:.3f}", f"{now:.3f}", f"{gain:.2f}"] for arm, seed, was, now, gain in cells]
    text = page("cpu-100-copying")
    assert table(text, "| strategy | seed |") == shown
    apart = f"{(again.val_loss - losses).abs().max():.3f}"
    assert f"ends up to {apart} apart" in text and f"end up to {apart} apart" in page("results")
    rows = recorded("cpu-100-copying/differences.csv").set_index("quantity")
    arms = ["unified", "hg+dp+or", "unified, dp at the lm_head", "nop"]
    expected = [intervals(rows.loc[part].set_index("arm").loc[arms]) for part in PARTS]
    assert [row[1:] for row in table(text, "| difference to `llama` in this")] == expected
    for arm in ("llama", "hg+dp+or"):  # the more it copies, the lower it ends
        own = again.arm == arm
        gain, loss = gains[own].to_numpy(), again.val_loss[own].to_numpy()
        found = permutation_test(
            (loss,), lambda order, gain=gain: spearmanr(gain, order).statistic, permutation_type="pairings"
        )
        said = f"{found.statistic:.2f} for `{arm}`"
        assert f"{said} (p = {found.pvalue:.2g})" in " ".join(text.split())
        assert said in " ".join(page("copying").split())


def test_proxy_tables_equal_the_recording() -> None:
    """How well and after how many tokens each run copies."""
    runs = recorded("gpu-25/results.csv", figure="protocol").drop_duplicates(["arm", "seed"]).sort_values("seed")
    losses = runs.pivot(index="seed", columns="arm", values="val_loss")
    arms = ["llama", "nop", "hg+dp+or", "unified", "unified, dp at the lm_head"]
    means = losses.mean()
    assert f"{means['unified'] - means['unified, dp at the lm_head']:.3f} lower in `mini`" in page("readings")
    for arm, (_, formed, final) in zip(arms, table(page("gpu-25"), "| strategy | formed"), strict=True):
        points = [
            [tuple(map(float, point.split(":"))) for point in series.split()]
            for series in runs[runs.arm == arm]["copying/second_minus_first"]
        ]
        assert final == " ".join(f"{series[-1][1]:.2f}" for series in points)
        times = (tokens_to_reach([at for at, _ in series], [x for _, x in series], FORMED) for series in points)
        assert formed == " ".join(f"{at / 1e6:.1f}" for at in times if at)


@pytest.mark.parametrize(
    "folder",
    ["gpu-25", "cpu-100-protocol", "cpu-100-parts", "cpu-100-other-norms", "cpu-largest-rate"],
)
def test_claims_tables_equal_the_recording(folder: str) -> None:
    verdicts = recorded(f"{folder}/verdicts.csv").dropna(subset="low")
    shown = [cells[1:3] for cells in table(page(folder), "| claim")]
    assert shown == [list(row) for row in zip(intervals(verdicts), verdicts.corrected, strict=True)]


def test_settings_tables_equal_the_recording() -> None:
    """Mean losses and differences, in the order of the recording; the pages quote the second policy's difference."""
    means = recorded("cpu-settings/results.csv").groupby(["panel", "arm"], sort=False).val_loss.mean()
    found = intervals(recorded("cpu-settings/differences.csv", quantity="final loss"))
    settings, policies = (table(page("cpu-settings"), head) for head in ("| setting |", "| decay of |"))
    shown = [cell for row in settings for cell in row[1:3]] + [row[1] for row in policies]
    assert shown == [f"{mean:.4f}" for mean in means]
    assert [row[-1] for row in (*settings, *policies[1:])] == found
    assert "0.008 below" in page("results") and found[4].startswith("-0.008 (-0.015 to -0.002")


def test_output_decay_table_equals_the_recording() -> None:
    verdicts = recorded("cpu-output-decay/verdicts.csv")
    assert verdicts.corrected.tolist() == ["holds"] * 4
    ratios = intervals(verdicts, ".3f")
    assert [cells[-1] for cells in table(page("cpu-output-decay"), "| RMS at the end")] == ratios
    assert all(ratio.partition(" ")[0] in page("results") for ratio in ratios)


def test_sgd_table_equals_the_recording() -> None:
    """Lowest mean loss over the rates of each arm, and the difference of the fitted optima."""
    runs = recorded("cpu-sgd/results.csv")
    losses = runs.groupby([runs.arm.str.partition(",")[0], "lr"]).val_loss.mean()
    verdicts = recorded("cpu-sgd/verdicts.csv")
    verdicts.index = verdicts.claim.str.partition(" ")[0]
    for arm, loss, rate, difference in table(page("cpu-sgd"), "| parameterization"):
        assert (loss, float(rate)) == (f"{losses[arm].min():.3f}", losses[arm].idxmin())
        if arm in verdicts.index:
            row = verdicts.loc[[arm]]
            words = f"{row.estimate.iloc[0]:+.3f}" if row.low.isna().all() else intervals(row)[0]
            assert difference.startswith(f"{words}: {row.corrected.iloc[0]}")


def test_largest_rate_tables_equal_the_recording() -> None:
    runs = recorded("cpu-largest-rate/results.csv")
    arms = runs.groupby(runs.arm.str.partition(", lr")[0], sort=False)
    shown = table(page("cpu-largest-rate"), "| strategy | loss at")
    for (_, rows), (_, *cells) in zip(arms, shown, strict=True):
        losses = rows.pivot(index="seed", columns="lr", values="val_loss")
        means = losses.mean()
        excess = (losses.mean(axis=1) - losses.min(axis=1)).mean()
        largest = means[means <= means.min() + 0.1].index.max()
        assert cells == [*(f"{loss:.3f}" for loss in means), f"{excess:.3f}", f"{largest:g}"]
    assert recorded("cpu-largest-rate/rises.csv").rise.max() < 0.33


def test_results_table_equals_the_recording() -> None:
    """A row is an arm at its own optimum, a column a length."""
    rows = recorded("cpu-100/differences.csv", figure="horizon", panel=OWN_OPTIMUM["panel"], quantity="final loss")
    arms = rows.arm.str.rpartition(", ")[0]
    expected = rows.assign(shown=intervals(rows)).groupby(arms, sort=False).shown.apply(list)
    shown = table(page("results"), "| strategy - `llama`")
    assert [cells for _, *cells in shown] == expected.tolist()
    assert all(arm.partition(",")[0] in name for (name, *_), arm in zip(shown, expected.index, strict=True))


def test_results_at_the_optimum_of_llama_equal_the_recordings() -> None:
    """A row is an arm, a column a length; the answer on top of the page has the first row."""
    columns, own = [], {"figure": "own-optimum", "panel": "All arms at the optimum of llama", "quantity": "final loss"}
    shown = table(page("results"), "| strategy - `llama`, both at")
    arms = [name.partition(":")[0] for name, *_ in shown]
    text, tuned = " ".join(page("results").split()), []
    for folder, steps in (("cpu", 3000), ("cpu-long", 12000), ("cpu-100", 45000)):
        columns.append(intervals(recorded(f"{folder}/differences.csv", **own).set_index("arm").loc[arms]))
        settings = yaml.safe_load((ROOT / f"conf/paper/tuned/tiny-{steps}.yaml").read_text())["arms"]["llama"]
        tuned.append([f"{settings[key]:g}" for key in ("model.optim.lr", "model.backbone.init_std")])
    assert [cells for _, *cells in shown] == [list(row) for row in zip(*columns, strict=True)]
    rates, stds = ("{}, {} and {}".format(*values) for values in zip(*tuned, strict=True))
    assert f"the rates are {rates}, and the stds {stds}." in text
    answer = text.partition("**Answer.**")[2].partition("**Protocol.**")[0]
    each = table(page("results"), "| strategy - `llama`, each")[0][1:]
    for found in (
        columns[0][0],
        columns[1][0],
        columns[2][0],
        *each,
        *(protocol(folder, "unified") for folder in ("gpu-25", "cpu-100-protocol")),
    ):
        assert found.partition(" ")[0] in answer


def tuning(path: str, panel: str = "Initial std 0.02", arm: str = "llama") -> pd.Series:
    """Return the losses of the tuning runs per learning rate."""
    rows = recorded(path, panel=panel)
    rows = rows[rows.figure.isin(["protocol-rates", "english"])]
    return rows[rows.arm.str.startswith(arm)].sort_values("seed").groupby("lr").val_loss.apply(list)


LARGER = "Initial std 0.55/sqrt(d_model)"


@pytest.mark.parametrize(
    ("budget", "path", "panel", "panels"),
    [
        ("cpu-100", "cpu-100/runs.csv", "Initial std 0.02", slice(5)),
        ("cpu-100", "cpu-100/runs.csv", LARGER, slice(5, 8)),
        ("gpu-25", "gpu-25/results.csv", "Initial std 0.02", slice(3)),
    ],
)
def test_protocol_rate_has_the_lowest_mean_of_its_tuning_runs(
    budget: str, path: str, panel: str, panels: slice
) -> None:
    losses = tuning(path, panel)
    assert all(len(values) == 2 for values in losses)
    best = losses.map(sum).idxmin()
    found = yaml.safe_load((ROOT / "conf/paper/protocol.yaml").read_text())["panels"]
    assert all(each["lr"][budget] == best for each in found[panels])
    assert losses.index.min() < best < losses.index.max()
    if panel != LARGER and budget == "cpu-100":
        of_nop = tuning(path, arm="nop").map(sum).idxmin()
        assert found[4]["arms"]["nop, own rate"]["lr"][budget] == of_nop


@pytest.mark.parametrize(
    ("name", "head", "which"),
    [
        ("cpu-small", "| learning rate | seed 100", ("cpu-small/runs.csv",)),
        ("cpu-100-protocol", "| rate of `tiny` at std 0.02", ("cpu-100/runs.csv",)),
        ("cpu-100-protocol", "| rate of `tiny` at std 0.07", ("cpu-100/runs.csv", LARGER)),
        ("cpu-100-protocol", "| rate of `tiny` without scale vectors", ("cpu-100/runs.csv", "Initial std 0.02", "nop")),
        ("gpu-25", "| rate of `mini` at std 0.02", ("gpu-25/results.csv",)),
        ("cpu-english", "| rate of `tiny` on English", ("cpu-english/results.csv", "Learning rate of llama")),
    ],
)
def test_tuning_run_tables_equal_the_recording(name: str, head: str, which: tuple[str, ...]) -> None:
    expected = [[f"{lr:g}", *(f"{value:.3f}" for value in values)] for lr, values in tuning(*which).items()]
    assert table(page(name), head) == expected


def test_record_is_the_recording_and_what_make_record_trains() -> None:
    arms = yaml.safe_load((ROOT / "conf/paper/tuned/tiny-3000.yaml").read_text())["arms"]["llama"]
    lr, std = arms["model.optim.lr"], arms["model.backbone.init_std"]
    loss = recorded("cpu/results.csv", **OWN_OPTIMUM, arm="llama").val_loss.mean()
    assert table(page("experiments"), "| date |")[-1][2:] == [f"{lr}, {std}", "–", f"{loss:.3f}"]
    keys = f"record: A_ARGS = --model.optim.lr {lr} --model.backbone.init_std {std}\n"
    assert keys in (ROOT / "Makefile").read_text()
    text = " ".join(page("experiments").split())
    challengers = re.findall(r"`([^`]+)` at \S+ and \S+ is 0.\d+ (?:lower|higher) \((.*?)\)", text)
    assert len(challengers) == 2
    for name, found in challengers:
        assert intervals(recorded("cpu/differences.csv", **OWN_OPTIMUM, arm=name))[-1].endswith(f"({found})")


add = runpy.run_path(str(ROOT / "results/record.py"))["add"]


def comparison(folder: Path, high: float, seconds: float) -> Path:
    difference = {"mean": -0.0154, "low": -0.03, "high": high}
    command = "fit --model.optim.lr 0.1 --model.optim.lr=0.0065 --trainer.max_steps 5"
    times = {"a-seed0": 10.0, "b-seed0": seconds}
    runs = [{"name": name, "summary": {"seconds": time}, "command": command} for name, time in times.items()]
    arms = [{}, {"scale": "hg+dp+or", "val_loss": 3.5618}]
    numbers = {"date": "2026-11-26T10:00:00+00:00", "arms": arms, "runs": runs, "seeds": [0, 1]}
    path = folder / "comparison.json"
    path.write_text(json.dumps(numbers | {"differences": [{"b": "hg+dp+or", "difference": difference}]}))
    return path


def test_record_lower_interval_adds_the_last_row(tmp_path: Path) -> None:
    page = tmp_path / "records.md"
    page.write_text("# Records\n\n| a |\n|---|\n| 1 |\n\nThe end.\n")
    add(comparison(tmp_path, high=-0.001, seconds=10.9), page)
    row = "| 2026-11-26 | `hg+dp+or` | 0.0065, default | −0.015 (−0.030 to −0.001) | 3.562 |"
    assert page.read_text() == f"# Records\n\n| a |\n|---|\n| 1 |\n{row}\n\nThe end.\n"


@pytest.mark.parametrize(("high", "seconds"), [(0.001, 10.0), (-0.001, 11.1)])
def test_record_unresolved_or_slow_challenger_exits(tmp_path: Path, high: float, seconds: float) -> None:
    with pytest.raises(SystemExit, match="not a record"):
        add(comparison(tmp_path, high, seconds), tmp_path / "records.md")
