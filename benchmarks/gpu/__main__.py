"""Measure this CUDA machine: limits, correctness, cost of scale vectors, peers, kernels.

python -m benchmarks.gpu [--out results/gpu] [--seconds 560] [--stages ceilings,fit]
"""

import os
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.process import ROOT
from lightning_sv.errors import ConfigError, expect_known

#: oldest supported torch
OLDEST = (2, 11)


def main(argv: list[str] | None = None) -> int:
    """Run the report; exit code 0 even if a stage failed, 1 if all failed, 2 for wrong input."""
    options = _parser().parse_args(argv)
    problem = _problem(options.device)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        return _report(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="results/gpu", help="folder of report.json and report.md")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of the report")
    parser.add_argument("--stages", help="run only these, separated by commas")
    parser.add_argument(
        "--again", action="store_true", help="repeat stages that the report contains"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--toy", action="store_true", help="use toy sizes, to test that it runs")
    parser.add_argument("--work", help="folder for everything else")
    return parser


def _report(options: Namespace) -> int:
    """Run the chosen stages and write the page, also if the report is stopped."""
    # These import torch, whose absence has its own message.
    from benchmarks.gpu import markdown
    from benchmarks.gpu.runner import Runner
    from benchmarks.gpu.stages import cache

    names = _chosen_stages(options.stages)
    out = _writable("--out", options.out)
    work = _writable("--work", options.work or Path(tempfile.gettempdir()) / "lightning_sv_gpu")
    missing = _missing()
    if missing is not None:
        print(missing, flush=True)

    cache.set_place(work)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    print(cache.load(out / cache.FILE), flush=True)

    signal.signal(signal.SIGTERM, _stop)
    runner = Runner(
        out, work, options.device, options.toy, options.seconds, options.again,
        tell=lambda line: print(line, flush=True),
    )  # fmt: skip
    try:
        report = runner.run(names)
    finally:
        markdown.write(out, runner.report)

    states = [stage["state"] for stage in report["stages"].values()]
    print(f"{out / 'report.md'}: {states.count('done')} of {len(states)} stages done", flush=True)
    return 0 if "done" in states else 1


def _chosen_stages(names: str | None) -> list[str] | None:
    """Return the names of --stages; None means all."""
    from benchmarks.gpu.plan import STAGES

    if not names:
        return None
    chosen = names.split(",")
    for name in chosen:
        expect_known("stage", name, [stage.name for stage in STAGES])
    return chosen


def _writable(option: str, path: str | Path) -> Path:
    """Make a folder, and return its absolute path."""
    folder = Path(path).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"expected a folder to write to ({error.strerror})"
        raise ConfigError(f"{option} is {folder}; {reason}") from None
    return folder


def _stop(*_: object) -> NoReturn:
    """End the stages, and write the page."""
    sys.exit(128 + signal.SIGTERM)


def _missing() -> str | None:
    """Name the missing packages, and how to copy their wheels to a machine without a network."""
    lock = (ROOT / "requirements/lock.txt").read_text().splitlines()
    installed = {_normal(found.metadata["Name"]) for found in metadata.distributions()}
    missing = [
        pin for pin in lock if "==" in pin and _normal(pin.partition("==")[0]) not in installed
    ]
    if not missing:
        return None
    names = " ".join(pin.partition("==")[0] for pin in missing)
    return (
        f"not installed: {names}; stages that need them fail. To carry them here, on a machine with"
        f" a network\n    python -m pip download --no-deps -d wheels {' '.join(missing)}\nand"
        f" here\n    {sys.executable} -m pip install --no-deps --no-index --find-links wheels"
        f" {names}"
    )


def _normal(name: str) -> str:
    """Return the normalized name of a package."""
    return name.lower().replace("_", "-").replace(".", "-")


def _problem(device: str) -> str | None:
    """Return the reason why the report cannot run here, in one sentence."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); use the Python that has it, PYTHON=..."
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"torch {torch.__version__} is too old; {oldest} or newer is needed."
    return None if device == "cpu" else _problem_of_card()


def _problem_of_card() -> str | None:
    import torch

    if torch.version.cuda is None:
        built = f"torch {torch.__version__} is built without CUDA"
        return f"{built}; install a CUDA build on a machine that has a card."
    if not torch.cuda.is_available():
        return _problem_of_driver()
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        has = f"{capability[0]}.{capability[1]}"
        return f"{torch.cuda.get_device_name()} has no bf16 (capability {has}); 8.0 is needed."
    return None


def _problem_of_driver() -> str:
    """Return what CUDA says about a device that torch cannot use."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:
        reason = " ".join(str(error).split())
        return f"there is no CUDA device that torch {torch.__version__} can use ({reason})."
    return "there is no CUDA device."


if __name__ == "__main__":
    sys.exit(main())
