"""What the commands that do not train import: their start is their imports."""

import json
import os
import subprocess
import sys

import pytest

from lightning_sv.cli.main import COMMANDS
from tests.conftest import ROOT, SMALL_LAYERS, config_args, thinned

CONFIG = config_args(*SMALL_LAYERS)
HEAVY = (
    "lightning", "torchmetrics", "transformers", "litdata", "scipy.signal", "scipy.stats", "torch._dynamo", "matplotlib"
)  # fmt: skip
#: those of HEAVY that a command needs: fake tensors import torch's compiler
NEEDED = {"report": {"matplotlib"}, "theory": {"matplotlib"}, "compare": {"matplotlib"}, "plan": {"torch._dynamo"}}
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
print("\\n" + json.dumps([code or 0, [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


@pytest.mark.parametrize("name", thinned(WORDS, ["params", "report"]))
def test_command_without_training_imports_no_lightning(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(HEAVY), name, *WORDS[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, found = json.loads(done.stdout.splitlines()[-1])
    assert (code, set(found)) == (0, NEEDED.get(name, set()))


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
