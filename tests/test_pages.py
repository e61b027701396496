"""The pages' links, commands, Python, tables and log; workflows, citation and the site's
contents."""

import ast
import re
import runpy
import shlex
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from lightning_sv import __version__
from lightning_sv.__main__ import COMMANDS, main
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import tuned_lr
from lightning_sv.plan.parameters import PAPER_NUMBERS, count_parameters
from lightning_sv.scale.strategy import ScaleStrategy
from tests.conftest import ROOT, argv, config_args, named, thinned
from tests.test_makefile import NEEDS_MAKE, make
from tests.test_results_pages import table

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("data/*.md")),
]


def blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the commands of a page, in its blocks and in the first column of its tables."""
    code = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [re.sub("(^|  )#.*", "", line).strip() for line in code.splitlines()]
    found = [line for line in lines if line]
    return found + re.findall(r"^\| `((?:make|lightning-sv) [^`]+)` \|", text, re.MULTILINE)


ALL_COMMANDS = sorted(set().union(*(commands(path.read_text()) for path in PAGES)))


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
            assert anchor in {
                re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
            }, link


@NEEDS_MAKE
def test_page_commands_exist_and_targets_read_their_variables() -> None:
    for command in ALL_COMMANDS:
        words = shlex.split(
            re.sub(r"^[A-Z_]+=\S+ ", "", command)
        )  # without a variable of the environment
        if words[0] == "make":
            words = [
                re.sub("^DATA=notes/?$", "DATA=docs", word) for word in words
            ]  # the reader's folder
            assert make(*words[1:]).returncode == 0, command
        elif re.match(r"\.venv[\w-]*/bin/python -m", command):
            assert find_spec(words[2]) is not None, command
        elif words[0] == "for":
            assert (
                "requirements/install.sh" in command
                and (ROOT / "requirements/install.sh").is_file()
            )
        elif words[0] not in (
            "git",
            "cd",
            "torchrun",
            "pip",
            ".venv/bin/pip",
            "sbatch",
            "lm_eval",
            "aws",
            "nvidia-cuda-mps-control",
        ):
            assert words[0] == "lightning-sv" and words[1] in COMMANDS, command


def test_own_block_page_under_llama_equals_plain_attention() -> None:
    code = blocks("docs/own-block.md")[0]
    assert 'parse("unified")' in code
    defined: dict[str, Any] = {}
    exec(code.replace("unified", "llama"), defined)
    block = defined["model"][0].double()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    xhat = F.rms_norm(x, (64,), eps=1e-5)
    q, k, v = (
        (xhat @ w.weight.T).view(2, 5, -1, 8).transpose(1, 2) for _, w in block.qkv.branches()
    )
    k, v = (y.repeat_interleave(4, dim=1) for y in (k, v))
    expected = block.o_proj(
        F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    )
    torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-12)


RUNS = [c for c in ALL_COMMANDS if re.match("make (train|compare)", c)]


@pytest.mark.parametrize("command", thinned(RUNS, RUNS[::3]))
def test_page_runs_have_a_tuned_learning_rate(command: str) -> None:
    words = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    default = {
        "MODEL": "tiny" if "compare" in command else "mini",
        "OPTIM": "adamw",
        "SCHEDULE": "cos",
    }
    chosen = default | words
    layers = [
        "base",
        f"optim/{chosen['OPTIM']}",
        f"schedule/{chosen['SCHEDULE']}",
        "trainer/cpu",
        "data/stdlib",
    ]
    layers += [
        f"model/{chosen['MODEL']}",
        *([f"probes/{chosen['PROBES']}"] if "PROBES" in chosen else []),
    ]
    args = config_args(*layers)
    for scale in [chosen.get("SCALE"), chosen.get("A"), *chosen.get("B", "").split()]:
        named = ["--model.scale", scale] if scale else []
        module, *_ = parse_run(
            [*args, *named, *shlex.split(chosen.get("B_ARGS", ""))], check_corpus=False
        )
        assert module.plan.lr > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:scale strategy .* is the same model")
def test_commands_page_commands_exit_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = "files:" + ",".join(map(str, files))
    monkeypatch.chdir(tmp_path)
    prepare(CorpusConfig(source=text, val_fraction=0.2), progress=False)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "notes").mkdir()
    for number, file in enumerate(files):
        (tmp_path / f"notes/{number}.txt").write_text(file.read_text())
    short = argv("--trainer.max_steps 4 --data.val_sequences 16")
    small = {
        "fit": short,
        "validate": ["--data.val_sequences", "16"],
        "compare": ["--seeds", "1", *short],
        "sweep": ["--seeds", "1", *short],
        "generate": ["--max_new_tokens", "5"],
        "plan": ["--model.backbone.n_layer", "2"],
        "prepare": [
            f"--data.corpus.source={text}",
            "--data.corpus.tokenizer=bpe:300",
            "--data.corpus.val_fraction=.2",
        ],
    }
    ran = []
    for command in commands((ROOT / "docs/commands.md").read_text()):
        words = shlex.split(command)
        if words[0] == "lightning-sv":
            own = [f"--data.corpus.dir={len(ran)}"] if words[1] == "prepare" else []
            assert main([*words[1:], *small.get(words[1], []), *own]) == 0, command
            ran.append(words[1])
    assert set(ran) == set(COMMANDS)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)], ids=named)
def test_page_python_parses_and_its_imports_exist(path: Path) -> None:
    for block in blocks(path):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_sv"):
                missing = [
                    name.name
                    for name in node.names
                    if not hasattr(import_module(str(node.module)), name.name)
                ]
                assert not missing, f"{node.module} has no {missing}"


def test_strategies_page_layer_equals_the_product() -> None:
    """The second block of the page compares."""
    exec("".join(blocks("docs/strategies.md")), {})


def test_own_model_example_learns_under_both_strategies() -> None:
    """The loss is below that of byte frequencies."""
    example = runpy.run_path(str(ROOT / "examples/own_model.py"))
    rows = example["blocks"]()
    counts = rows[:256, 1:].flatten().bincount(minlength=256).double()
    unigram = torch.special.entr(counts / counts.sum()).sum()
    for scale in ("llama", "unified"):
        assert example["train"](scale, rows, 30) < unigram


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").iterdir())], ids=named)
def test_page_run_names_are_those_of_fit(path: Path) -> None:
    if path.is_file():
        for name in re.findall(r"runs/[\w.-]+/([\w+]+)-seed\d", path.read_text()):
            assert name == str(ScaleStrategy.parse(name)), (
                f"a run of {name} is named after {ScaleStrategy.parse(name)}"
            )


def test_log_page_equals_the_recorded_verdicts() -> None:
    """By the page's program. New verdicts may follow; none may change."""
    program = runpy.run_path(str(ROOT / "results/log.py"))
    text = (ROOT / "results/log.md").read_text()
    made = program["page"]()
    said, _, arms = text.partition("## Arms")
    found, _, expected = made.partition("## Arms")
    assert arms == expected, "results/ changed: python results/log.py"
    for line in said.splitlines():
        assert any(row.startswith(line.removesuffix(" |")) for row in found.splitlines()), line
    intervals = re.findall(
        r"\| [+-]\S+ \(([+-]\S+) to ([+-]\S+)\) to [^|]+, \d pairs \| \**([a-z ]+)\**", text
    )
    assert len(intervals) > 30
    for low, high, word in intervals:
        assert word.strip() == (
            "lower" if float(high) < 0 else "higher" if float(low) > 0 else "not resolved"
        )


def expert_cells(config: BackboneConfig, activated: int) -> tuple[str, str, str]:
    """Return the width of a dense layer, the experts, and the activated parameters."""
    if not config.n_expert:
        return f"{config.ffn_width:,}", "", ""
    experts = f"{config.n_expert_active} of {config.n_expert} of {config.expert_width:,}"
    if config.n_expert_shared:
        experts += f" + 1 of {config.ffn_width:,}"
    return "", experts, f"{activated:,}"


def tuned_rate(model: str) -> str:
    try:
        return f"{tuned_lr(model, 'adamw', 'cos', ScaleStrategy.parse('llama')):g}"
    except ValueError:
        return ""


def models_row(path: Path) -> list[str]:
    """One line of the table: parameters of `llama`, the learning rate of AdamW and cos."""
    content = yaml.safe_load(path.read_text())
    config = BackboneConfig(**content["model"]["backbone"])
    name = config.name
    assert name == path.stem
    counted = count_parameters(config, "llama").numbers
    width, experts, activated = expert_cells(config, counted["activated"])
    own = [number for number in PAPER_NUMBERS if (number.model, number.scale) == (name, "llama")]
    printed = {number.computed: number.printed for number in own}
    sizes = ", ".join(printed[key] for key in ("total", "activated") if key in printed)
    data = content["data"]
    return [
        name, f"{config.d_model:,}", str(config.n_layer), str(config.n_head), width, experts,
        f"{config.vocab_size:,}", f"{data['seq_len']:,}", str(data["global_batch"]),
        f"{counted['total']:,}", activated, tuned_rate(name), sizes,
    ]  # fmt: skip


def test_models_page_table_equals_the_configs() -> None:
    shown = table("models", "model").reset_index()
    found = shown.to_numpy().tolist()
    assert sorted(found) == sorted(map(models_row, (ROOT / "conf/model").glob("*.yaml")))
    smallest_first = [
        int(line[9].replace(",", "")) for line in found if line[0].startswith("llama")
    ]
    assert smallest_first == sorted(smallest_first)


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text())["jobs"].values())


@NEEDS_MAKE
@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_workflow_commands_exist(path: Path) -> None:
    steps = chain.from_iterable(job["steps"] for job in jobs(path))
    commands = [step["run"] for step in steps if "run" in step]
    assert commands and all("timeout-minutes" in job for job in jobs(path))
    for command in commands:
        words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "2.13.0", command))
        if words[:2] == [".venv/bin/python", "-m"]:
            assert find_spec(words[2]) is not None, command
            continue
        assert words[0] == "make", command
        assert make(*words[1:]).returncode == 0, command


def test_workflows_have_the_oldest_and_newest_versions() -> None:
    (job,) = jobs(ROOT / ".github/workflows/test.yml")
    tried = job["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    oldest = (
        re.search(r'"torch>=([\d.]+),<2\.(\d+)"', project),
        re.search(r'requires-python = ">=([\d.]+)"', project),
    )
    default = re.search(
        r"^TORCH \?= torch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert oldest[0] and oldest[1] and default
    assert tried["torch"] == [f"{oldest[0][1]}.0", default[1], f"2.{int(oldest[0][2]) - 1}.0"]
    assert tried["python"][0] == oldest[1][1]
    assert {path.stem for path in WORKFLOWS} == {"check", "test", "faults"}


def test_citation_has_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    front = (ROOT / "README.md").read_text()
    paper = citation["preferred-citation"]
    assert citation["version"] == __version__
    assert paper["url"] in front and paper["title"] in " ".join(front.split())
    assert re.search(
        "".join(f".*{author['family-names']}" for author in paper["authors"]),
        front.replace("\n", " "),
    )


def test_site_navigation_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    shown = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert not (pages - set(shown)), "give them a line in mkdocs.yml"
    assert len(shown) == len(set(shown)) and all((ROOT / page).exists() for page in shown)


def test_site_navigation_has_the_api_pages_that_site_py_makes() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    shown = re.findall(r"api/([\w.]+)\.md", nav)
    made = re.search(r"^API = (\[.*?\])", (ROOT / "docs/site.py").read_text(), re.M | re.DOTALL)
    assert made and shown == ast.literal_eval(made[1])
