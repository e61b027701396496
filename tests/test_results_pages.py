"""Numbers on the pages equal the recordings in results/."""

import csv
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
VERDICTS = ("holds", "contradicted", "not resolved", "not testable here")


def page(name: str) -> str:
    """Return a page of docs/, or the page of a recording, with hyphens as minus signs."""
    path = ROOT / f"docs/{name}.md"
    return (path if path.exists() else ROOT / f"results/{name}/README.md").read_text().replace("−", "-")


def rows(path: str) -> list[dict[str, str]]:
    with (ROOT / "results" / path).open(newline="") as file:
        return list(csv.DictReader(file))


def table(text: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose head contains `head`."""
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def interval(row: dict[str, str]) -> str:
    mean, low, high = (float(row[key]) for key in ("estimate", "low", "high"))
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def claims(folder: str) -> list[str]:
    """Return the lines of a report's table of claims, the head first."""
    section = (ROOT / f"results/{folder}/report.md").read_text().partition("## Claims")[2].partition("\n## ")[0]
    return [line.replace("−", "-") for line in section.splitlines() if line.startswith("| ")]


def test_reliability_table_sums_equal_faults_json() -> None:
    """A row of the page may sum several faults, so the sums over all faults and over each word are compared."""
    table = re.findall(r"^\| (.+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page("reliability"), re.MULTILINE)
    quoted = [(name, *(int(figure.replace(",", "")) for figure in figures)) for name, *figures in table]
    measured = json.loads((ROOT / "results/faults.json").read_text())
    columns = ("tries", "recovered", "lost")
    for word in ("", "kill -9", "SIG", "worker killed", "left out", "hostile checkpoint"):
        found = [row for row in measured if word in row["fault"]]
        shown = [row[1:] for row in quoted if word in row[0]]
        sums = [sum(row[column] for row in found) for column in columns]
        assert sums == [sum(column) for column in zip(*shown, strict=True)], word


def test_verdicts_of_cpu_page_equal_the_report() -> None:
    """A row has the first claim of a figure, and the number of its claims per verdict."""
    judged = list(zip(claims("cpu")[2:], rows("cpu/verdicts.csv"), strict=True))
    expected = []
    for figure in dict.fromkeys(row["figure"] for _, row in judged):
        own = [(line, row) for line, row in judged if row["figure"] == figure]
        first = next((line for line, row in own if row["primary"] == "True"), own[0][0])
        counts = [sum(row["verdict"] == word for _, row in own) for word in VERDICTS]
        expected.append(f"{first} {' · '.join(map(str, counts))} |")
    assert [line for line in page("cpu").splitlines() if line.startswith("| ")][2:] == expected
    words = [row["verdict"] for _, row in judged]
    said = re.search(
        r"Of the (\d+) claims of `cpu` (\d+) hold, (\d+) are contradicted, (\d+) are not resolved .*?, (\d+) cannot ",
        " ".join(page("results").split()),
    )
    assert said and list(map(int, said.groups())) == [len(words), *map(words.count, VERDICTS)]


@pytest.mark.parametrize("budget", ["cpu-long", "cpu-100"])
def test_verdicts_of_longer_runs_equal_the_report(budget: str) -> None:
    section = page(budget).partition("\n## ")[0]
    shown = [row for row in section.partition("| figure |")[2].splitlines() if row.startswith("| ")]
    assert shown == claims(budget)[1:] and len(shown) > 2
    assert f"{len({row['run'] for row in rows(f'{budget}/results.csv')})} runs" in section


def test_differences_at_one_setting_equal_the_recording() -> None:
    section = page("cpu-long").partition("## At one setting for all arms\n")[2].partition("\n#")[0]
    quoted = re.findall(r"\| (-\S+ \(-\S+ to \S+\))", section)
    assert sorted(quoted) == sorted(map(interval, rows("cpu-long-one-setting/differences.csv")))


def protocol(folder: str, arm: str, quantity: str = "final loss") -> str:
    """Return the difference of one arm to llama at the paper's protocol."""
    found = (row for row in rows(f"{folder}/differences.csv") if row["panel"] != "Initial std 0.02")
    return next(interval(row) for row in found if (row["arm"], row["quantity"]) == (arm, quantity))


def test_readme_table_equals_the_recordings() -> None:
    """Two sizes at the paper's protocol, then the panel of own-optimum after 45,000 steps."""
    readme = (ROOT / "README.md").read_text().replace("−", "-")
    arms = re.findall(r"`([^`]+)`", readme.partition("| setting |")[2].partition("\n")[0])
    own = {
        row["arm"]: row
        for row in rows("cpu-100/differences.csv")
        if (row["figure"], row["panel"], row["quantity"])
        == ("own-optimum", "Each arm at its own optimum", "final loss")
    }
    shown = table(readme, "| setting |")
    assert [cells for _, *cells in shown] == [
        *([protocol(folder, arm) for arm in arms] for folder in ("gpu-25", "cpu-100-protocol")),
        [interval(own[arm]) for arm in arms],
    ]
    for folder, (setting, *_) in zip(("gpu-25", "cpu-100-protocol", "cpu-100"), shown, strict=True):
        pairs = rows(f"{folder}/differences.csv")[0]["n"]
        assert f", {pairs} seeds" in setting


def test_protocol_tables_equal_the_recording() -> None:
    """The difference and its parts by kind of token, the losses of each seed, and the verdict."""
    parts = ("final loss", *(f"final loss, part of {kind}" for kind in ("repeat", "seen", "unseen")))
    arms = ("unified", "hg+dp+or")
    for folder, head, columns in (
        ("cpu-100-protocol", "| difference to `llama`, nats per token | `unified` |", arms),
        ("gpu-25", "| difference to `llama` of `mini`", ("unified", "unified, dp at the lm_head", "hg+dp+or", "nop")),
    ):
        shown = [cells for _, *cells in table(page("results"), head)]
        assert shown == [[protocol(folder, arm, part) for arm in columns] for part in parts]
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows("cpu-100-protocol/results.csv"):
        losses[row["seed"]][row["arm"]] = float(row["val_loss"])
    assert table(page("cpu-100-protocol"), "| seed |") == [
        [
            seed,
            *(f"{found[arm]:.4f}" for arm in ("llama", *arms)),
            *(f"{found[arm] - found['llama']:+.4f}" for arm in arms),
        ]
        for seed, found in sorted(losses.items())
    ]
    verdicts = rows("cpu-100-protocol/verdicts.csv")[:3]
    for row in verdicts:
        shown = "{:+.3f} (90%: {:+.3f} to {:+.3f}".format(*(float(row[key]) for key in ("estimate", "low", "high")))
        assert shown in page("cpu-100-protocol")
    assert [row["corrected"] for row in verdicts] == [row["verdict"] for row in verdicts] == [
        "holds", "holds", "not resolved",
    ]  # fmt: skip


def test_tables_of_the_proxy_equal_the_recording() -> None:
    """Losses of each seed, verdicts, and how well and after how many tokens each run copies."""
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows("gpu-25/results.csv"):
        if row["figure"] == "protocol" and row not in runs[row["arm"]]:
            runs[row["arm"]].append(row)
    losses = {arm: {row["seed"]: f"{float(row['val_loss']):.4f}" for row in found} for arm, found in runs.items()}
    arms = ("llama", "nop", "hg+dp+or", "unified", "unified, dp at the lm_head")
    assert table(page("gpu-25"), "| seed |") == [
        [seed, *(losses[arm][seed] for arm in arms)] for seed in ("10", "11", "12")
    ]
    head_dp, unified = (
        sum(float(row["val_loss"]) for row in found) / len(found)
        for found in (runs["unified, dp at the lm_head"], runs["unified"])
    )
    assert f"{unified - head_dp:.3f} lower in `mini`" in page("readings")
    judged = [row for row in rows("gpu-25/verdicts.csv") if row["low"]]
    assert [cells[1:3] for cells in table(page("gpu-25"), "| claim |")] == [
        [interval(row), row["corrected"]] for row in judged
    ]
    for arm, (_, formed, final) in zip(arms, table(page("copying"), "| strategy | formed"), strict=True):
        points = [
            [tuple(map(float, point.split(":"))) for point in row["copying/second_minus_first"].split()]
            for row in sorted({row["seed"]: row for row in runs[arm]}.values(), key=lambda row: row["seed"])
        ]
        assert final == " ".join(f"{series[-1][1]:.2f}" for series in points)
        assert formed == " ".join(f"{next(at for at, value in series if value < -0.5) / 1e6:.1f}" for series in points)


def test_tables_of_the_settings_equal_the_recording() -> None:
    """Mean losses and differences, in the order of the recording; the pages quote the second policy's difference."""
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows("cpu-settings/results.csv"):
        losses[row["panel"], row["arm"]].append(float(row["val_loss"]))
    means = [f"{sum(values) / len(values):.4f}" for values in losses.values()]
    found = [interval(row) for row in rows("cpu-settings/differences.csv") if row["quantity"] == "final loss"]
    settings, policies = (table(page("cpu-settings"), head) for head in ("| setting |", "| decay of |"))
    assert [cell for row in settings for cell in row[1:3]] + [row[1] for row in policies] == means
    assert [row[-1] for row in (*settings, *policies[1:])] == found
    assert "0.008 below" in page("decay") and found[4].startswith("-0.008 (-0.015 to -0.002")


def test_table_of_the_output_decay_equals_the_recording() -> None:
    found = rows("cpu-output-decay/verdicts.csv")
    assert [row["corrected"] for row in found] == ["holds"] * 4
    ratios = [
        "{:.3f} ({:.3f} to {:.3f})".format(*(float(row[key]) for key in ("estimate", "low", "high"))) for row in found
    ]
    assert [cells[-1] for cells in table(page("cpu-output-decay"), "| RMS at the end")] == ratios
    assert all(ratio.partition(" ")[0] in page("decay") for ratio in ratios)


def test_table_of_sgd_equals_the_recording() -> None:
    """Lowest mean loss over the rates of each arm, and the difference of the fitted optima."""
    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows("cpu-sgd/results.csv"):
        losses[row["arm"].partition(",")[0]][float(row["lr"])].append(float(row["val_loss"]))
    found = {row["claim"].partition(" ")[0]: row for row in rows("cpu-sgd/verdicts.csv")}
    for arm, loss, rate, difference in table(page("cpu-sgd"), "| parameterization"):
        means = {lr: sum(values) / len(values) for lr, values in losses[arm].items()}
        assert (loss, float(rate)) == (f"{min(means.values()):.3f}", min(means, key=means.__getitem__))
        if arm in found:
            words = interval(found[arm]) if found[arm]["low"] else f"{float(found[arm]['estimate']):+.3f}"
            assert difference.startswith(f"{words}: {found[arm]['corrected']}")


def test_tables_of_the_largest_rate_equal_the_recording() -> None:
    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows("cpu-largest-rate/results.csv"):
        losses[row["arm"].partition(", lr")[0]][float(row["lr"])].append(float(row["val_loss"]))
    shown = table(page("cpu-largest-rate"), "| strategy | loss at")
    for by_rate, (_, *cells) in zip(losses.values(), shown, strict=True):
        means = {lr: sum(values) / len(values) for lr, values in sorted(by_rate.items())}
        seeds = list(zip(*by_rate.values(), strict=True))
        excess = sum(sum(of_seed) / len(of_seed) - min(of_seed) for of_seed in seeds) / len(seeds)
        largest = max(lr for lr, loss in means.items() if loss <= min(means.values()) + 0.1)
        assert cells == [*(f"{loss:.3f}" for loss in means.values()), f"{excess:.3f}", f"{largest:g}"]
    verdicts = rows("cpu-largest-rate/verdicts.csv")
    assert [cells[1:3] for cells in table(page("cpu-largest-rate"), "| claim: depends")] == [
        [interval(row), row["corrected"]] for row in verdicts
    ]
    assert max(float(row["rise"]) for row in rows("cpu-largest-rate/rises.csv")) < 0.33


def test_results_table_equals_the_recording() -> None:
    """A row is an arm at its own optimum, a column a length."""
    expected: dict[str, list[str]] = defaultdict(list)
    for row in rows("cpu-100/differences.csv"):
        if (row["figure"], row["panel"], row["quantity"]) == ("horizon", "Each arm at its own optimum", "final loss"):
            expected[row["arm"].rpartition(", ")[0]].append(interval(row))
    shown = table(page("results"), "| strategy - `llama`")
    assert [cells for _, *cells in shown] == list(expected.values())
    assert all(arm.partition(",")[0] in name for (name, *_), arm in zip(shown, expected, strict=True))


def losses_by_rate(path: str, **only: str) -> dict[float, list[float]]:
    losses: dict[float, list[float]] = defaultdict(list)
    for row in rows(path):
        if all(row[key].startswith(value) for key, value in only.items()):
            losses[float(row["lr"])].append(float(row["val_loss"]))
    return dict(sorted(losses.items()))


TUNING = {"figure": "protocol-rates", "panel": "Initial std 0.02", "arm": "llama"}


@pytest.mark.parametrize(("budget", "path"), [("cpu-100", "cpu-100/runs.csv"), ("gpu-25", "gpu-25/results.csv")])
def test_rate_of_the_protocol_has_the_lowest_mean_of_its_tuning_runs(budget: str, path: str) -> None:
    losses = losses_by_rate(path, **TUNING)
    assert all(len(values) == 2 for values in losses.values())
    best = min(losses, key=lambda lr: sum(losses[lr]))
    spec = yaml.safe_load((ROOT / "conf/paper/protocol.yaml").read_text())
    assert all(panel["lr"][budget] == best for panel in spec["panels"][:3])
    assert min(losses) < best < max(losses)


@pytest.mark.parametrize(
    ("name", "head", "losses"),
    [
        ("copying", "| learning rate | seed 100", losses_by_rate("cpu-small/runs.csv")),
        ("results", "| rate of `tiny` at std 0.02", losses_by_rate("cpu-100/runs.csv", **TUNING)),
        ("results", "| rate of `mini` at std 0.02", losses_by_rate("gpu-25/results.csv", **TUNING)),
    ],
    ids=["small", "tiny", "mini"],
)
def test_table_of_tuning_runs_equals_the_recording(name: str, head: str, losses: dict[float, list[float]]) -> None:
    expected = [[f"{lr:g}", *(f"{value:.3f}" for value in values)] for lr, values in losses.items()]
    assert table(page(name), head) == expected


def test_record_is_the_recording_and_what_make_record_trains() -> None:
    arms = yaml.safe_load((ROOT / "conf/paper/tuned/tiny-3000.yaml").read_text())["arms"]["llama"]
    lr, std = arms["model.optim.lr"], arms["model.backbone.init_std"]
    losses = [
        float(row["val_loss"])
        for row in rows("cpu/results.csv")
        if (row["figure"], row["panel"], row["arm"]) == ("own-optimum", "Each arm at its own optimum", "llama")
    ]
    last = table(page("records"), "| date |")[-1]
    assert last[2:] == [f"{lr}, {std}", "–", f"{sum(losses) / len(losses):.3f}"]
    keys = f"record: A_ARGS = --model.optim.lr {lr} --model.backbone.init_std {std}\n"
    assert keys in (ROOT / "Makefile").read_text()
    text = " ".join(page("records").split())
    challengers = re.findall(r"`([^`]+)` at \S+ and \S+ is 0.\d+ (?:lower|higher) \((.*?)\)", text)
    panel = ("own-optimum", "Each arm at its own optimum")
    shown = {row["arm"]: interval(row) for row in rows("cpu/differences.csv") if (row["figure"], row["panel"]) == panel}
    assert len(challengers) == 2
    for name, found in challengers:
        assert shown[name].endswith(f"({found})")
