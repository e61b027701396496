"""Architecture: layers, import cycles, imports of commands, configs, arguments in docstrings."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sv.__main__ import COMMANDS, main
from tests.conftest import CONFIG, ROOT, SMALL_LAYERS, config_args, named, thinned

PACKAGE = ROOT / "lightning_sv"
FILES = sorted(PACKAGE.rglob("*.py"))
#: layer of each package; a package imports lower layers only
LAYER_OF = {
    "errors": -2,
    "log": -2,
    "version": -2,
    "atomic": -1,
    "gpus": -1,
    "own_code": -1,
    "json_text": -1,
    "markdown_text": -1,
    "scale": 0,
    "corpus": 0,
    "curvature": 0,
    "nn": 1,
    "optim": 1,
    "theory": 2,
    "roles": 2,
    "settings": 2,
    "runs": 3,
    "interop": 4,
    "callbacks": 4,
    "plan": 4,
    "statistics": 4,
    "plots": 5,
    "lit": 6,
    "experiments": 7,
    "cli": 8,
    "__main__": 9,
    "__init__": 9,
}
#: layers of a run; conf/paper holds experiments
EXPERIMENTS = ("paper", "budgets", "tuned", "experiment")
LAYERS = sorted(
    path for path in (ROOT / "conf").rglob("*.yaml") if path.parts[-2] not in EXPERIMENTS
)
FEW_LAYERS = [path for path in LAYERS if path.parts[-2] != "model"][::3]
FEW_LAYERS += [path for path in LAYERS if path.stem in ("gemma-0.5b", "tiny")]


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, in functions too, and the names that it imports from
    them."""
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
        where = path.relative_to(ROOT)
        home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith("lightning_sv."):
                other = name.split(".")[1]
                allowed = other == home or LAYER_OF[other] < LAYER_OF[home]
                assert allowed, f"{where} imports {name} from its own layer or above"
            if name.split(".")[0] == "lightning":
                assert home in ("lit", "callbacks"), f"{where} knows Lightning"
            if name.split(".")[0] == "matplotlib":
                assert {PACKAGE / "plots", PACKAGE / "experiments/report"} & set(path.parents), (
                    f"{where} draws"
                )
        assert path.name != "utils.py"


def test_files_have_no_import_cycle() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    try:
        TopologicalSorter(
            {name: imports(path) & files.keys() - {name} for name, path in files.items()}
        ).prepare()
    except CycleError as error:
        pytest.fail(" < ".join(error.args[1]))


HEAVY = (
    "lightning",
    "torchmetrics",
    "transformers",
    "litdata",
    "scipy.signal",
    "scipy.stats",
    "torch._dynamo",
    "matplotlib",
    "jaxtyping",
)
#: those of HEAVY that a command needs: fake tensors import torch's compiler
NEEDED = {name: {"matplotlib"} for name in ("report", "theory", "compare")}
#: commands that parse the arguments of a run, and so import Lightning for those of its Trainer
PARSED = ("plan", "paper")
WORDS = {name: ["--help"] for name in COMMANDS if name not in ("fit", "validate", "sweep")} | {
    "params": CONFIG,
    "plan": ["--gpus", "1", *CONFIG],
    "paper": ["--dry-run", "--fig", "necessity"],
}
PROGRAM = """
import json, sys
from lightning_sv.__main__ import main
try:
    code = main(sys.argv[2:])
except SystemExit as stop:
    code = stop.code
imported = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
print("\\n" + json.dumps([code or 0, imported]))
"""


@pytest.mark.parametrize(
    "name", thinned([name for name in WORDS if name not in PARSED], ["params", "report"])
)
def test_command_without_training_imports_no_lightning(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(HEAVY), name, *WORDS[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, found = json.loads(done.stdout.splitlines()[-1])
    assert (code, set(found)) == (0, NEEDED.get(name, set()))


def test_command_without_tensors_imports_no_torch() -> None:
    """`report` reads what runs left behind, on any machine."""
    program = (
        "import sys, lightning_sv.cli.report, lightning_sv.cli.theory; from lightning_sv.__main__"
        " import main\nmain(['--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize(("given", "used"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_cli_openmp_spin_count_is_set_unless_given(given: dict[str, str], used: str) -> None:
    """The variable is read when torch is imported, so it is set before."""
    program = (
        "import os, sys; from lightning_sv.cli.main import cli; sys.argv = ['lightning-sv',"
        " '--version']\nassert 'torch' not in sys.modules\ntry: cli()\nexcept SystemExit:"
        " print(os.environ['GOMP_SPINCOUNT'])"
    )
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"} | given
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == used


@pytest.mark.parametrize("path", thinned(LAYERS, FEW_LAYERS), ids=named)
def test_config_file_in_a_run_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {layer.partition("/")[0]: layer for layer in (*SMALL_LAYERS, "model/llama-0.12b")}
    layers[path.parent.name] = str(path.relative_to(ROOT / "conf").with_suffix(""))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--print_config", *config_args(*layers.values())])  # last or not
    assert stop.value.code == 0
    resolved = yaml.safe_load(capsys.readouterr().out)

    def contains(big: Any, small: Any) -> bool:
        if isinstance(small, dict):
            return all(contains(big[key], value) for key, value in small.items())
        if isinstance(small, list):
            return all(contains(*pair) for pair in zip(big, small, strict=True))
        return bool(big == small)

    assert contains(resolved, yaml.safe_load(path.read_text()))


def entries(docstring: str, section: str) -> list[str]:
    lines = f"{docstring}\n".partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    return re.findall(r"^ {4}\**([\w.]+): ", lines, re.MULTILINE)


def arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the names of a function's arguments, or of a class's __init__ or fields."""
    if isinstance(node, ast.ClassDef):
        made = [
            child
            for child in node.body
            if isinstance(child, ast.FunctionDef) and child.name == "__init__"
        ]
        return arguments(made[0]) if made else fields(node)
    return [
        a.arg
        for a in ast.iter_child_nodes(node.args)
        if isinstance(a, ast.arg) and a.arg not in ("self", "cls")
    ]


def fields(node: ast.ClassDef) -> list[str]:
    annotated = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
    return [
        target.id
        for target in annotated
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def test_docstring_arguments_are_the_real_ones() -> None:
    """Ruff checks functions only; this also checks classes, and the order."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                check_docstring(node, f"{path.relative_to(PACKAGE)}:{node.lineno}, {node.name}")


def check_docstring(node: ast.FunctionDef | ast.ClassDef, where: str) -> None:
    docstring = ast.get_docstring(node) or ""
    names = entries(docstring, "Args")
    assert names in ([], arguments(node)), where
    has_methods = any(isinstance(child, ast.FunctionDef) for child in node.body)
    if isinstance(node, ast.ClassDef) and not has_methods:
        assert set(entries(docstring, "Attributes")) <= set(fields(node)), where


def test_main_help_and_wrong_command_have_their_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "known: fit validate" in capsys.readouterr().err
