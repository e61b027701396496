"""What the commands that do not train import: their start is their imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
# torch is imported once, and every command runs in a fork of that process
PROGRAM = """
import json, os, sys
import torch
heavy, commands = json.loads(sys.argv[1])
for name, argv in commands.items():
    sys.stdout.flush()
    if os.fork() == 0:
        out, sys.stdout = sys.stdout, open(os.devnull, "w")
        from lightning_sv.__main__ import main
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        print(json.dumps([name, code or 0, [m for m in heavy if m in sys.modules]]), file=out, flush=True)
        os._exit(0)
    os.wait()
"""


QUICK = ["params", "report"]


@pytest.mark.parametrize("names", [QUICK, pytest.param([*COMMANDS], marks=pytest.mark.long)], ids=["few", "every"])
def test_command_without_training_imports_no_lightning(names: list[str]) -> None:
    commands = {name: COMMANDS[name][0] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([HEAVY, commands])],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {name: (code, set(found)) for name, code, found in map(json.loads, done.stdout.splitlines())}
    assert imported == {name: (0, COMMANDS[name][1]) for name in names}


def test_command_without_tensors_does_not_import_torch() -> None:
    """`report` reads what runs left behind, on any machine."""
    program = "import sys\n"
    for work in (
        "from lightning_sv.__main__ import main; main(['--help'])",
        "import lightning_sv.cli.report",
        "import lightning_sv.cli.theory",
    ):
        program += f"{work}; assert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
