"""Train what figures need and is not there yet.

    out/  runs/<model>-<strategy>-seed<n>-<hash>/ ...  slurm.sh      the runs are shared by all figures

A run that is complete is skipped, one that is not is resumed.
"""

from collections.abc import Sequence

import torch
from rich.console import Console

from lightning_sv.experiments.results import Figure, by_seed
from lightning_sv.experiments.run_store import RunStore, diverged
from lightning_sv.runs.launch import default_parallel, run_jobs
from lightning_sv.settings.data import DataConfig
from lightning_sv.version import __version__


def train(figures: Sequence[Figure], runs: RunStore, *, parallel: int | None, console: Console) -> dict[str, str]:
    """Train what is missing.

    Returns:
        Key of a run that failed -> why; the others are trained all the same.

    Raises:
        RunError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped them all; finished runs are kept
    """
    wanted = by_seed(run for figure in figures for run in figure.requests())
    left = runs.missing(wanted)
    recorded = sum(runs.is_recorded(*run) for run in wanted)
    elsewhere = sum(runs.dir(*run).parent != runs.out / "runs" for run in wanted)
    where = f", {elsewhere} of them under other budgets" if elsewhere else ""
    where += f", {recorded} of them as recorded" if recorded else ""
    console.print(f"{len(wanted) - len(left)} of {len(wanted)} runs are complete{where}", markup=False)
    for job in left:
        if diverged(job):
            console.print(f"{job.title} diverged; remove {job.run_dir} to train it again", markup=False)
    missing = [job for job in left if not diverged(job)]
    if not missing:
        return {}
    try:
        at_once = min(parallel or default_parallel(), len(missing))
        return run_jobs(missing, parallel=at_once, console=console)
    except KeyboardInterrupt:
        console.print("Stopped. Finished runs are kept, the same command reuses them and resumes the others.")
        raise


def context_of(data: DataConfig) -> dict[str, str]:
    """Return what the results of runs depend on beside their commands: of `RunStore`, which refuses to mix them."""
    return {"corpus_hash": data.manifest.corpus_hash, "torch": torch.__version__, "lightning_sv": __version__}
