"""What the commands that do not train import: their start is their imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import thinned

ROOT = Path(__file__).parent.parent
LAYERS = ("base", "optim/adamw", "schedule/cos", "trainer/cpu", "data/stdlib", "model/tiny")
CONFIG = [word for layer in LAYERS for word in ("--config", str(ROOT / f"conf/{layer}.yaml"))]
HEAVY = (
    "lightning", "torchmetrics", "transformers", "litdata", "scipy.signal", "scipy.stats", "torch._dynamo", "matplotlib"
)  # fmt: skip
DRAWS, COMPILER = {"matplotlib"}, {"torch._dynamo"}
#: command -> those of HEAVY that it needs: fake tensors import torch's compiler
COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "params": (["params", *CONFIG], set()),
    "prepare": (["prepare", "--help"], set()),
    "generate": (["generate", "--help"], set()),
    "export": (["export", "--help"], set()),
    "roles": (["roles", "--help"], set()),
    "inspect": (["inspect", "--help"], set()),
    "runs": (["runs", "--help"], set()),
    "report": (["report", "--help"], DRAWS),
    "theory": (["theory", "--help"], DRAWS),
    "plan": (["plan", "--gpus", "1", *CONFIG], COMPILER),
    "paper": (["paper", "--dry-run", "--fig", "necessity"], set()),
    "compare": (["compare", "--help"], DRAWS),
}
PROGRAM = """
import json, sys
from lightning_sv.__main__ import main
try:
    code = main(sys.argv[2:])
except SystemExit as stop:
    code = stop.code
print("\\n" + json.dumps([code or 0, [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


@pytest.mark.parametrize("name", thinned(COMMANDS, ["params", "report"]))
def test_command_without_training_imports_no_lightning(name: str) -> None:
    argv, expected = COMMANDS[name]
    command = [sys.executable, "-c", PROGRAM, json.dumps(HEAVY), *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, found = json.loads(done.stdout.splitlines()[-1])
    assert (code, set(found)) == (0, expected)


def test_command_without_tensors_imports_no_torch() -> None:
    """`report` reads what runs left behind, on any machine."""
    program = "import sys\n"
    for work in (
        "from lightning_sv.__main__ import main; main(['--help'])",
        "import lightning_sv.cli.report",
        "import lightning_sv.cli.theory",
    ):
        program += f"{work}; assert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize(("given", "used"), [({}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_cli_openmp_spin_count_is_0_unless_given(given: dict[str, str], used: str) -> None:
    """The variable is read when torch is imported, so it is set before."""
    program = (
        "import os, sys; from lightning_sv.cli.main import cli; sys.argv = ['lightning-sv', '--version']\n"
        "assert 'torch' not in sys.modules\n"
        "try: cli()\n"
        "except SystemExit: print(os.environ['GOMP_SPINCOUNT'])"
    )
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"} | given
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == used
