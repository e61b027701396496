"""Architecture: layers, import cycles, configs, and the links and commands of the pages."""

import ast
import re
import shlex
import sysconfig
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from lightning_sv.__main__ import COMMANDS, main
from lightning_sv.cli.main import FILE_OF
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.optim.tuned import TUNED_LR
from lightning_sv.settings.parse import parse_run
from tests.conftest import thinned

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_sv"
FILES = sorted(PACKAGE.rglob("*.py"))
#: layer of each package; a package imports lower layers only
LAYER_OF = {
    "errors": -2, "log": -2, "version": -2, "atomic": -1, "scale": 0, "corpus": 0, "curvature": 0, "nn": 1, "optim": 1,
    "theory": 2, "roles": 2, "interop": 3, "settings": 2, "callbacks": 3, "runs": 3, "plan": 3, "analysis": 4, "lit": 5,
    "experiments": 6, "cli": 7, "__main__": 8, "__init__": 8,
}  # fmt: skip
KNOW_LIGHTNING = {"lit", "callbacks"}
#: layers of a run; conf/paper holds experiments
EXPERIMENTS = ("paper", "budgets", "tuned", "experiment")
LAYERS = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.parts[-2] not in EXPERIMENTS)
MODELS = sorted((ROOT / "conf/model").glob("*.yaml"))
FEW_MODELS = [path for path in MODELS if path.stem in ("llama-0.12b", "moe-0.25b", "gemma-0.5b", "tiny")]
OTHER_LAYERS = [path for path in LAYERS if path not in MODELS]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, in functions too, and the names that it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_packages_import_lower_layers_only() -> None:
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


def test_commands_are_files_with_snake_case_options() -> None:
    files = {path.stem: path.read_text() for path in (PACKAGE / "cli").glob("*.py")}
    assert files.keys() - {"__init__", "main"} == {FILE_OF.get(name, name) for name in COMMANDS}
    options = [option for text in files.values() for option in re.findall(r"add_argument\(\s*\"--([\w.-]+)", text)]
    assert len(options) > 40 and not [option for option in options if "-" in option]


def test_files_have_no_import_cycle() -> None:
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    try:
        TopologicalSorter({name: imports(path) & files.keys() - {name} for name, path in files.items()}).prepare()
    except CycleError as error:
        pytest.fail(" < ".join(error.args[1]))


@pytest.mark.parametrize("path", thinned(LAYERS, [*FEW_MODELS[::3], *OTHER_LAYERS[::3]]), ids=named)
def test_config_file_in_a_run_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nouns = ("optim", "schedule", "trainer", "data")
    layers = {noun: next((ROOT / "conf" / noun).glob("*.yaml")) for noun in nouns}
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
def test_model_config_has_a_learning_rate_and_parameter_counts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = yaml.safe_load(path.read_text())["model"]
    name = model["backbone"]["name"]
    assert name == path.stem and (any(row[0] == name for row in TUNED_LR) or model["optim"]["lr"])
    assert main(["params", "--config", str(path), "--model.scale", "hg+dp+or"]) == 0
    out = capsys.readouterr().out
    assert "input scale" in out and "output scale" in out


PAGES = [*sorted(ROOT.glob("[!.]*.md")), ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """Return the commands of a page, in its blocks and in the first column of its tables."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    return found + re.findall(r"^\| `((?:make|lightning-sv) [^`]+)` \|", text, re.MULTILINE)


ALL_COMMANDS = sorted({command for path in PAGES for command in commands(path.read_text())})


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_page_links_exist(path: Path) -> None:
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


def test_page_commands_exist_and_targets_read_their_variables() -> None:
    makefile = (ROOT / "Makefile").read_text()
    layered = re.findall(r"^LAYERED := (.*)$", makefile, re.MULTILINE)[0]
    reads = dict(re.findall(r"^reads-([\w-]+) := (.*)$", makefile, re.MULTILINE))
    targets = set(re.findall(r"^([a-z0-9_-]+):", makefile, re.MULTILINE))
    for command in ALL_COMMANDS:
        words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", command))  # without a variable of the environment
        if words[0] == "make":
            names = reads.get(words[1], "ARGS").replace("$(LAYERED)", layered).split()
            for word in words[1:]:
                name, is_variable, _ = word.partition("=")
                assert name in ([*names, "PYTHON", "TORCH", "VENV"] if is_variable else targets), command
        elif words[:2] == [".venv/bin/python", "-m"]:
            assert find_spec(words[2]) is not None, command
        elif words[0] not in (
            "git", "cd", "torchrun", "pip", ".venv/bin/pip", "sbatch", "lm_eval", "aws", "nvidia-cuda-mps-control",
        ):  # fmt: skip
            assert words[0] == "lightning-sv" and words[1] in COMMANDS, command


def test_own_block_page_under_llama_equals_plain_attention() -> None:
    code = (ROOT / "docs/own-block.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert 'parse("unified")' in code
    defined: dict[str, Any] = {}
    exec(code.replace("unified", "llama"), defined)
    block, x = defined["model"][0].double(), torch.randn(2, 5, 64, dtype=torch.float64)
    xhat = F.rms_norm(x, (64,), eps=1e-5)
    q, k, v = ((xhat @ w.weight.T).view(2, 5, -1, 8).transpose(1, 2) for _, w in block.qkv.branches())
    k, v = (y.repeat_interleave(4, dim=1) for y in (k, v))
    expected = block.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-12)


RUNS = [c for c in ALL_COMMANDS if re.match("make (train|compare)", c)]


@pytest.mark.parametrize("command", thinned(RUNS, RUNS[::3]))
def test_page_runs_have_a_tuned_learning_rate(command: str) -> None:
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
def test_commands_page_commands_exit_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "prepare": shlex.split(
            f"--data.corpus.source {text} --data.corpus.tokenizer bpe:300 --data.corpus.val_fraction 0.2"
        ),
    }
    ran = []
    for command in commands((ROOT / "docs/commands.md").read_text()):
        words = shlex.split(command)
        if words[0] == "lightning-sv":
            assert main([*words[1:], *small.get(words[1], [])]) == 0, command
            ran.append(words[1])
    assert set(ran) == set(COMMANDS)


def test_main_help_and_wrong_command_have_their_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "known: fit validate" in capsys.readouterr().err
