"""Checks of figures before their first run is trained."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

from lightning_sv.corpus import is_remote
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.kinds.base import PlannedPanel
from lightning_sv.experiments.results import PlannedFigure, requests_of
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import Run
from lightning_sv.runs.tags import VAL_LOSS

# kinds of claims about more than the last loss of a run
_OF_CURVES = ("widens", "keeps", "efficiency")


def check_trainable(figures: Sequence[PlannedFigure]) -> None:
    """Refuse a figure without an available panel, except if conf/paper leaves it out.

    Raises:
        ConfigError: the sentence of the first panel, which names the missing rate or the command
            that tunes it
    """
    for figure in figures:
        reasons = [panel.why_not for panel in figure.panels]
        if None in reasons:
            continue
        for panel, why_not in zip(figure.panels, reasons, strict=True):
            if figure.budget not in panel.spec.skip_under:
                raise ConfigError(f"--fig {figure.spec.name}: {why_not}.")


def check_corpora(figures: Sequence[PlannedFigure]) -> None:
    """Refuse runs whose corpus is not prepared.

    Raises:
        ConfigError: names the folder and the command that prepares it
    """
    for run_spec, _ in requests_of(figures):
        folder = json.loads(run_spec.identity)["data"]["corpus"]["dir"]
        if is_remote(folder) or (Path(folder).expanduser() / FILENAME).is_file():
            continue
        command = shlex.join(["lightning-sv", "prepare", *_of_corpus(run_spec.args)])
        raise ConfigError(
            f"data.corpus.dir is {folder}; expected a prepared corpus. Run `{command}`."
        )


def _of_corpus(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a run that `prepare` takes too."""
    for name, value in pairwise(args):
        is_file = name == "--config" and Path(value).parent.name == "data"
        if is_file or name.startswith("--data.corpus."):
            yield name
            yield value


def check_recorded(
    figures: Sequence[PlannedFigure], recorded: Mapping[str, Run], paths: Sequence[Path]
) -> None:
    """Refuse recordings of other figures.

    Args:
        figures: figures whose runs are needed
        recorded: recorded runs by the names of their directories
        paths: folders or files of the recordings

    Raises:
        ConfigError: no run of the figures is recorded
    """
    names_of_runs = {run_spec.key(seed) for run_spec, seed in requests_of(figures)}
    if not recorded or not names_of_runs or names_of_runs & recorded.keys():
        return
    budget = figures[0].budget
    names = " ".join(figure.spec.name for figure in figures)
    expected = f"a recording with runs of {names} under budget {budget}. Omit it, or change --fig."
    raise ConfigError(f"--results_from is {' '.join(map(str, paths))}; expected {expected}")


def check_recorded_curves(figures: Sequence[PlannedFigure], runs: RunStore) -> None:
    """Refuse to train next to recorded runs that lack the loss curve of a claim.

    Raises:
        ConfigError: names the run and the command that trains it
    """
    for figure in figures:
        name = figure.spec.name
        for claim, run in _claims_without_curve(figure, runs):
            found = f"--results_from: {run} has a single loss"
            expected = f"a curve of val/loss, which a claim {claim.kind!r} of {name} needs"
            command = f"lightning-sv paper --budget {figure.budget} --fig {name}"
            without = f"Run `{command}` without --results_from"
            hint = f"{without}, or judge the other claims with --no_train."
            raise ConfigError(f"{found}; expected {expected}. {hint}")


def _claims_without_curve(figure: PlannedFigure, runs: RunStore) -> Iterator[tuple[ClaimSpec, str]]:
    """Yield each claim about a curve whose recorded runs lack it, and the first of these runs."""
    for panel in figure.panels:
        for claim in filter(_reads_curve, panel.spec.claims):
            run = _recorded_without_curve(claim, panel, runs)
            if run is not None:
                yield claim, run


def _reads_curve(claim: ClaimSpec) -> bool:
    """Return True if a claim is about losses before the end of a run."""
    parts = KINDS[claim.kind].parts(claim)
    return any(part.kind in _OF_CURVES or part.until < 1 for part in parts)


def _recorded_without_curve(claim: ClaimSpec, panel: PlannedPanel, runs: RunStore) -> str | None:
    """Return the name of the first recorded run of a claim's arms that has only its last loss."""
    compared = [arm for arm in panel.arms if (arm.series or arm.label) in claim.arms]
    requests = chain.from_iterable(arm.requests for arm in compared)
    for request in requests:
        if not runs.is_recorded(*request):
            continue
        run = runs.read(*request)
        if len(run.curve(VAL_LOSS).tokens) == 1:
            return run.dir.name
    return None
