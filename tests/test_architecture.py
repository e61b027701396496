"""Architecture: layers, import cycles, configs, and the commands and numbers on the pages."""

import ast
import csv
import json
import re
import shlex
import sysconfig
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from lightning_sv.__main__ import COMMANDS, main
from lightning_sv.callbacks.branch_norms import branch_norms
from lightning_sv.cli.main import FILE_OF
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.optim.tuned import TUNED_LR
from lightning_sv.runs import directory
from lightning_sv.settings.parse import parse_run
from tests.conftest import thinned

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_sv"
FILES = sorted(PACKAGE.rglob("*.py"))
#: layer of each package; a package imports lower layers only
LAYER_OF = {
    "errors": -2, "log": -2, "version": -2, "atomic": -1, "scale": 0, "corpus": 0, "curvature": 0, "nn": 1, "optim": 1,
    "theory": 2,
    "roles": 2, "interop": 3, "settings": 2, "callbacks": 3, "runs": 3, "plan": 3, "analysis": 4, "lit": 5,
    "experiments": 6, "cli": 7, "__main__": 8, "doctor": 8, "__init__": 8,
}  # fmt: skip
KNOW_LIGHTNING = {"lit", "callbacks"}
#: layers of a run; conf/paper holds experiments
EXPERIMENTS = ("paper", "budgets", "tuned", "experiment")
LAYERS = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.parts[-2] not in EXPERIMENTS)
MODELS = sorted((ROOT / "conf/model").glob("*.yaml"))
FEW_MODELS = [path for path in MODELS if path.stem in ("llama-0.12b", "moe-0.25b", "gemma-0.5b", "tiny")]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_imports_run_down() -> None:
    for path in FILES:
        where, home = path.relative_to(ROOT), path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith("lightning_sv."):
                other = name.split(".")[1]
                allowed = other == home or LAYER_OF[other] < LAYER_OF[home]
                assert allowed, f"{where} imports {name} from its own layer or above"
            if name.split(".")[0] == "lightning":
                assert home in KNOW_LIGHTNING, f"{where} knows Lightning"
            if name.split(".")[0] == "matplotlib":
                assert {PACKAGE / "analysis", PACKAGE / "experiments/report"} & set(path.parents), f"{where} draws"
        assert path.name != "utils.py"


def test_a_command_is_a_file_and_its_options_are_snake_case() -> None:
    files = {path.stem: path.read_text() for path in (PACKAGE / "cli").glob("*.py")}
    assert files.keys() - {"__init__", "main"} == {FILE_OF.get(name, name) for name in COMMANDS}
    options = [option for text in files.values() for option in re.findall(r"add_argument\(\s*\"--([\w.-]+)", text)]
    assert len(options) > 40 and not [option for option in options if "-" in option]


def inner_imports(path: Path, files: dict[str, Path]) -> Iterator[str]:
    """Names in `files` of the modules that one file imports, in functions too: a circle there is one all the same."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from {name, name.rpartition(".")[0]} & files.keys()  # a module, or what one holds


def test_no_circle_of_imports_among_files() -> None:
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    try:
        TopologicalSorter({name: set(inner_imports(path, files)) - {name} for name, path in files.items()}).prepare()
    except CycleError as error:
        pytest.fail(" < ".join(error.args[1]))


#: the one file that spells the names of a run directory's files
OWNER = PACKAGE / "runs/directory.py"


def test_a_run_directory_has_one_owner() -> None:
    names = {value for key, value in vars(directory).items() if key.isupper() and isinstance(value, str)}
    names = (names | {directory.LAST.name}) - {directory.LOCK}  # a corpus has one too
    assert {"summary.json", "config.yaml", "last.ckpt"} <= names
    for path in set(FILES) - {OWNER}:
        tree = ast.parse(path.read_text())
        described = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings may name them
        said = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        spelt = [(node.lineno, name) for node in said for name in names if node not in described and name in node.value]
        assert not spelt, f"{path.relative_to(ROOT)} spells what lightning_sv/runs/directory.py names: {spelt}"


@pytest.mark.parametrize("path", thinned(LAYERS, (set(LAYERS) - set(MODELS)) | set(FEW_MODELS)), ids=named)
def test_every_config_parses_in_a_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {
        noun: next((ROOT / "conf" / noun).glob("*.yaml")) for noun in ("optim", "schedule", "trainer", "data", "model")
    }
    layers["model"] = ROOT / "conf/model/llama-0.12b.yaml"
    layers[path.parent.name] = path
    args = [word for layer in (ROOT / "conf/base.yaml", *layers.values()) for word in ("--config", str(layer))]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args, "--print_config"])
    assert stop.value.code == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    own = yaml.safe_load(path.read_text())

    def contains(big: object, small: object) -> bool:
        if isinstance(small, dict):
            return isinstance(big, dict) and all(contains(big[key], value) for key, value in small.items())
        if isinstance(small, list):
            return isinstance(big, list) and len(big) == len(small) and all(map(contains, big, small))
        return big == small

    assert contains(resolved, own)


@pytest.mark.parametrize("path", thinned(MODELS, FEW_MODELS), ids=named)
def test_every_model_has_a_tuned_learning_rate_and_a_ledger(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = yaml.safe_load(path.read_text())["model"]
    name = model["backbone"]["name"]
    assert name == path.stem and (any(row[0] == name for row in TUNED_LR) or model["optim"]["lr"])
    assert main(["params", "--config", str(path), "--model.scale", "hg+dp+or"]) == 0
    out = capsys.readouterr().out
    assert "input scale" in out and "output scale" in out


PAGES = [*sorted(ROOT.glob("[!.]*.md")), ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    path = ROOT / f"docs/{name}.md"
    return (path if path.exists() else ROOT / f"results/{name}/README.md").read_text()


def commands(text: str) -> list[str]:
    """What a page tells to type, in its blocks and in the first column of its tables."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    return found + re.findall(r"^\| `((?:make|lightning-sv) [^`]+)` \|", text, re.MULTILINE)


ALL_COMMANDS = sorted({command for path in PAGES for command in commands(path.read_text())})


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, link


def test_every_command_of_the_pages_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9_-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \??=", makefile, re.MULTILINE))
    for command in ALL_COMMANDS:
        words = shlex.split(command)
        if words[0] == "make":
            for word in words[1:]:
                name, is_variable, _ = word.partition("=")
                assert name in (variables if is_variable else targets), command
        elif words[:2] == [".venv/bin/python", "-m"]:
            assert find_spec(words[2]) is not None, command
        elif words[0] not in ("git", "cd", "torchrun", "pip", "sbatch", "lm_eval"):
            assert words[0] == "lightning-sv" and words[1] in COMMANDS, command


def test_the_reliability_table_is_that_of_make_test_faults() -> None:
    """Its rows put several of results/faults.json together: the sums of all, and of what a word names, are equal."""
    section = page("reliability")
    table = re.findall(r"^\| (.+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", section, re.MULTILINE)
    quoted = [(name, *(int(figure.replace(",", "")) for figure in figures)) for name, *figures in table]
    measured = json.loads((ROOT / "results/faults.json").read_text())
    columns = ("tries", "recovered", "lost")
    for word in ("", "kill -9", "SIG", "shard", "worker killed", "left out", "hostile checkpoint"):
        rows = [row for row in measured if word in row["fault"] and (word != "shard" or "hostile" not in row["fault"])]
        sums = [sum(row[column] for row in rows) for column in columns]
        ours = [row[1:] for row in quoted if word in row[0] and (word != "shard" or "hostile" not in row[0])]
        assert sums == [sum(column) for column in zip(*ours, strict=True)], word


def test_the_verdicts_of_the_page_are_those_of_the_report() -> None:
    """A row is a figure's first claim as the report has it, and how many of the figure's claims came to each word."""
    report = _claims("results/cpu/report.md")[2:]
    judged, words = _rows("results/cpu/verdicts.csv"), ("holds", "contradicted", "not resolved", "not testable here")
    assert len(report) == len(judged)
    expected = []
    for figure in dict.fromkeys(row["figure"] for row in judged):
        its = [(line, row) for line, row in zip(report, judged, strict=True) if row["figure"] == figure]
        first = next((line for line, row in its if row["primary"] == "True"), its[0][0])
        counts = [sum(row["verdict"] == word for _, row in its) for word in words]
        expected.append(f"{first} {' · '.join(map(str, counts))} |")
    assert [line for line in page("cpu").splitlines() if line.startswith("| ")][2:] == expected
    assert len(expected) > 15


def test_the_counts_of_the_page_are_those_of_the_verdicts() -> None:
    said = re.search(
        r"Of the (\d+) claims of `cpu` (\d+) hold, (\d+) are contradicted, (\d+) are not resolved .*?, (\d+) cannot "
        r".*? makes (\d+) of them: (\d+) hold, (\d+) are contradicted, (\d+) are not resolved, (\d+) cannot be tested",
        " ".join(page("results").split()),
    )
    expected = [*_numbers(without_ours=False), *_numbers(without_ours=True)]
    assert said and [int(number) for number in said.groups()] == expected


@pytest.mark.parametrize("budget", ["cpu-long", "cpu-100"])
def test_the_verdicts_of_longer_runs_are_all_on_the_page(budget: str) -> None:
    section = page(budget).partition("\n## ")[0]
    ours = [row for row in section.partition("| figure |")[2].splitlines() if row.startswith("| ")]
    assert ours == _claims(f"results/{budget}/report.md")[1:] and len(ours) > 2
    assert f"{len({row['run'] for row in _rows(f'results/{budget}/results.csv')})} runs" in section


def _claims(report: str) -> list[str]:
    """Lines of a report's table of claims, its head first."""
    section = (ROOT / report).read_text().partition("## Claims")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")]


def _numbers(*, without_ours: bool) -> list[int]:
    """Claims of results/cpu, and how many came to each word.

    Args:
        without_ours: leave out those of figures that the paper does not have, and those that it does not state
    """
    ours = ("tuning", "own-optimum", "routing", "sharpness")
    rows = _rows("results/cpu/verdicts.csv")
    words = [
        row["verdict"] for row in rows if not (without_ours and (row["figure"] in ours or row["paper"] == "not stated"))
    ]
    return [len(words), *(words.count(w) for w in ("holds", "contradicted", "not resolved", "not testable here"))]


def _rows(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_runs_at_one_setting_of_the_page_are_those_of_the_report() -> None:
    section = page("cpu-long").partition("## At one setting for all arms\n")[2]
    quoted = re.findall(r"^\| .* \| (−.*?) \((−.*?) to (.*?)\)", section.partition("\n#")[0], re.MULTILINE)
    with (ROOT / "results/cpu-long-one-setting/differences.csv").open(newline="") as file:
        ours = [[f"{float(row[key]):+.3f}" for key in ("estimate", "low", "high")] for row in csv.DictReader(file)]
    assert len(ours) == 4
    assert sorted(ours) == sorted([x.replace("−", "-") for x in row] for row in quoted)


def test_the_numbers_of_the_readme_are_those_of_the_recordings() -> None:
    """The first two rows of its table are the two panels of own-optimum after 45,000 steps."""
    lines = (ROOT / "README.md").read_text().replace("−", "-").partition("| setting |")[2].splitlines()
    arms = re.findall(r"`([^`]+)`", lines[0])
    panels = ("Each arm at its own optimum", "All arms at the optimum of llama")
    for panel, line in zip(panels, lines[2:4], strict=True):
        found = {row["arm"]: row for row in _rows("results/cpu-100/differences.csv")
                 if (row["figure"], row["panel"], row["quantity"]) == ("own-optimum", panel, "final loss")}  # fmt: skip
        numbers = ([float(found[arm][key]) for key in ("estimate", "low", "high")] for arm in arms)
        expected = [f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" for mean, low, high in numbers]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == expected
        assert f", {found['unified']['n']} seeds" in line


def test_the_table_of_results_is_that_of_the_recording() -> None:
    """A row is an arm, a column a length, each arm at its own optimum, as in the picture above it."""
    table = page("results").replace("−", "-").partition("| strategy - `llama`")[2].partition("\n\n")[0].splitlines()[2:]
    found: dict[str, list[str]] = {}
    for row in _rows("results/cpu-100/differences.csv"):
        of = (row["figure"], row["panel"], row["quantity"])
        if of == ("horizon", "Each arm at its own optimum", "final loss"):
            mean, low, high = (float(row[key]) for key in ("estimate", "low", "high"))
            arm = row["arm"].rpartition(", ")[0]
            found.setdefault(arm, []).append(f"{mean:+.3f} ({low:+.3f} to {high:+.3f})")
    assert [[cell.strip() for cell in row.split("|")[2:-1]] for row in table] == list(found.values())
    assert [row.count(f"`{arm.partition(',')[0]}`") for row, arm in zip(table, found, strict=True)] == [1] * 4


def test_the_tuning_runs_of_the_proxy_are_on_its_page() -> None:
    losses: dict[float, list[str]] = {}
    for row in _rows("results/cpu-small/runs.csv"):
        losses.setdefault(float(row["lr"]), []).append(f"{float(row['val_loss']):.3f}")
    table = page("copying").partition("| learning rate | seed 100")[2].partition("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in table] == [
        [f"{lr:g}", *values] for lr, values in sorted(losses.items())
    ]


def test_the_rate_of_the_protocol_is_the_best_of_its_tuning_runs() -> None:
    """The mean over both seeds, by the rule at the head of protocol-rates.yaml; the page has the table."""
    losses: dict[float, list[float]] = {}
    for row in _rows("results/cpu-100/runs.csv"):
        if (row["figure"], row["panel"], row["arm"][:5]) == ("protocol-rates", "Initial std 0.02", "llama"):
            losses.setdefault(float(row["lr"]), []).append(float(row["val_loss"]))
    assert all(len(values) == 2 for values in losses.values())
    best = min(losses, key=lambda lr: sum(losses[lr]))
    spec = yaml.safe_load((ROOT / "conf/paper/protocol.yaml").read_text())
    assert spec["panels"][0]["lr"]["cpu-100"] == spec["panels"][1]["lr"]["cpu-100"] == best
    assert min(losses) < best < max(losses)
    table = page("results").partition("| rate of `llama` at std 0.02")[2].partition("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in table] == [
        [f"{lr:g}", *(f"{value:.3f}" for value in values)] for lr, values in sorted(losses.items())
    ]


def test_what_another_rate_of_llama_changes_is_what_its_runs_say() -> None:
    """Six pairs that no figure judges: the means on the page of 45,000 steps are those of runs.csv."""
    losses: dict[tuple[str, float], dict[str, float]] = {}
    for row in _rows("results/cpu-100/runs.csv"):
        if row["figure"] == "own-optimum":
            losses.setdefault((row["arm"], float(row["lr"])), {})[row["seed"]] = float(row["val_loss"])

    def mean(arm: str, lr: float, base: float) -> float:
        a, b = losses[arm, lr], losses["llama", base]
        assert len(b) == 6
        return sum(a[seed] - b[seed] for seed in a) / len(a)

    arms = {"llama": 0.0013, "unified": 0.0014, "hg+dp+or": 0.0016, "nop": 0.0025}
    off = [mean(arm, lr, 0.0036) for arm, lr in arms.items()]
    own = " ".join(page("cpu-100").split())
    _, above, below, level = (f"{abs(each):.3f}" for each in off)
    assert f"`unified` is {above} above" in own and f"`hg+dp+or` {below} below" in own and f"`nop` {level} above" in own
    assert f"with the second: {mean('hg+dp+or', 0.003, 0.0013):+.3f}".replace("-", "−") in own
    assert f"`unified`, {mean('unified', 0.0012, 0.0013):+.3f} with its first values" in own


def test_the_candidates_of_the_page_are_those_of_the_runs() -> None:
    """Losses of two settings an arm on the seeds of tuning, and which mean is the lower; what is missing is a dash."""
    losses: dict[str, dict[str, float]] = {}
    for row in _rows("results/cpu-100/runs.csv"):
        if row["kind"] == "grid":
            losses.setdefault(row["arm"].replace(", other", ""), {})[row["seed"]] = float(row["val_loss"])
    table = page("cpu-100").partition("| arm | rate, std |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 10
    for line in table:
        arm, setting, *cells = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        rate, std = map(float, setting.split(", "))
        found = losses[f"{arm.replace('DP at', 'dp at')}, lr {rate:g}, init_std {std:g}"]
        seeds = [f"{found[seed]:.4f}" if seed in found else "–" for seed in ("100", "101", "102")]
        mean = f"{sum(found.values()) / 3:.4f}" if len(found) == 3 else "–"
        assert cells[:4] == [*seeds, mean], line


def page_block(strategy: str) -> dict[str, Any]:
    """What the page's model of one's own defines."""
    code = page("own-block").partition("```python\n")[2].partition("```")[0]
    assert 'parse("unified")' in code
    defined: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code.replace("unified", strategy), defined)
    return defined


def test_a_model_of_ones_own_is_under_llama_what_it_was() -> None:
    block, x = page_block("llama")["model"][0].double(), torch.randn(2, 5, 64, dtype=torch.float64)
    xhat = F.rms_norm(x, (64,), eps=1e-5)
    q, k, v = ((xhat @ w.weight.T).view(2, 5, -1, 8).transpose(1, 2) for _, w in block.qkv.branches())
    k, v = (y.repeat_interleave(4, dim=1) for y in (k, v))
    expected = block.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-12)


def test_a_model_of_ones_own_trains_with_decay_by_role() -> None:
    defined, x = page_block("unified"), torch.randn(2, 5, 64)
    model, optimizer = defined["model"], defined["optimizer"]
    assert {group["role"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "matrix": 0.1, "input": 0.1, "output": 0.0,
    }  # fmt: skip
    losses = []
    for _ in range(20):
        losses.append((model(x) - x.roll(1, 1)).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert {"layer0/q_proj/effective", "layer1/v_proj/gamma_out"} <= set(branch_norms(model))


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if re.match("make (train|compare)", c)])
def test_every_run_of_the_pages_has_a_learning_rate(command: str) -> None:
    """The layers that make puts together build a module, as `fit` does before it looks at the corpus."""
    words = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    default = {"MODEL": "tiny" if "compare" in command else "mini", "OPTIM": "adamw", "SCHEDULE": "cos"}
    chosen = default | words
    files = ["base", f"optim/{chosen['OPTIM']}", f"schedule/{chosen['SCHEDULE']}", "trainer/cpu", "data/stdlib"]
    files += [f"model/{chosen['MODEL']}", *([f"probes/{chosen['PROBES']}"] if "PROBES" in chosen else [])]
    args = [word for file in files for word in ("--config", str(ROOT / f"conf/{file}.yaml"))]
    for scale in [chosen.get("SCALE"), chosen.get("A"), *chosen.get("B", "").split()]:
        named = ["--model.scale", scale] if scale else []
        module, *_ = parse_run([*args, *named, *shlex.split(chosen.get("B_ARGS", ""))], check_corpus=False)
        assert module.lr > 0


@pytest.mark.long
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in an empty folder, on a small corpus and for a few steps."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = "files:" + ",".join(map(str, files))
    monkeypatch.chdir(tmp_path)
    prepare(CorpusConfig(source=text, val_fraction=0.2), progress=False)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    short = ["--trainer.max_steps", "4", "--data.val_sequences", "16"]
    small = {
        "fit": short,
        "validate": ["--data.val_sequences", "16"],
        "compare": ["--seeds", "1", *short],
        "sweep": ["--seeds", "1", *short],
        "generate": ["--tokens", "5"],
        "plan": ["--model.backbone.n_layer", "2"],
        "prepare": [
            "--data.corpus.source",
            text,
            "--data.corpus.tokenizer",
            "bpe:300",
            "--data.corpus.val_fraction",
            "0.2",
        ],
    }
    ran = []
    for command in commands(page("commands")):
        words = shlex.split(command)
        if words[0] == "lightning-sv":
            assert main([*words[1:], *small.get(words[1], [])]) == 0, command
            ran.append(words[1])
    assert set(ran) == set(COMMANDS)


def test_help_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "known: fit validate" in capsys.readouterr().err
