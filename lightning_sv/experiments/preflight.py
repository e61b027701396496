"""Checks of figures before their first run is trained."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lightning_sv.corpus import is_remote
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.kinds.base import PlannedPanel
from lightning_sv.experiments.results import PlannedFigure, requests_of
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.runs.events import Run
from lightning_sv.runs.tags import VAL_LOSS


def check_trainable(figures: Sequence[PlannedFigure]) -> None:
    """Refuse a figure without an available panel, except if conf/paper leaves it out.

    Raises:
        ConfigError: the sentence of the first panel, which names the missing rate or the command
            that tunes it
    """
    for figure in figures:
        has_panel = any(panel.why_not is None for panel in figure.panels)
        if not has_panel:
            _refuse_unless_left_out(figure)


def _refuse_unless_left_out(figure: PlannedFigure) -> None:
    for panel in figure.panels:
        is_left_out = figure.budget in panel.spec.skip_under
        if not is_left_out:
            raise ConfigError(f"--fig {figure.spec.name}: {panel.why_not}.")


def check_corpora(figures: Sequence[PlannedFigure]) -> None:
    """Refuse runs whose corpus is not prepared.

    Raises:
        ConfigError: names the folder and the command that prepares it
    """
    for run_spec, _ in requests_of(figures):
        _check_corpus(run_spec)


def _check_corpus(run_spec: RunSpec) -> None:
    folder = run_spec.settings["data"]["corpus"]["dir"]
    if is_remote(folder):
        return
    manifest = Path(folder).expanduser() / FILENAME
    command = shlex.join(["lightning-sv", "prepare", *_prepare_args(run_spec.args)])
    expected = f"a prepared corpus. Run `{command}`."
    expect(manifest.is_file(), "data.corpus.dir", folder, expected)


def check_prepared(figures: Sequence[PlannedFigure]) -> None:
    """Refuse runs whose corpus is prepared and does not fit the model.

    Raises:
        ConfigError: names the key, e.g. data.corpus.tokenizer
    """
    checked = set()
    for run_spec, _ in requests_of(figures):
        is_prepared = run_spec.epochs is not None
        corpus_and_model = json.dumps([run_spec.settings["data"], run_spec.model], sort_keys=True)
        if is_prepared and corpus_and_model not in checked:
            checked.add(corpus_and_model)
            run = parse_run(list(run_spec.args), check_corpus=False)
            run.data.check(run.model.backbone.vocab_size, checksums=False)


def _prepare_args(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a run that `prepare` takes too."""
    for name, value in pairwise(args):
        is_data_file = name == "--config" and Path(value).parent.name == "data"
        is_corpus_key = name.startswith("--data.corpus.")
        if is_data_file or is_corpus_key:
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
    needed = {request.name for request in requests_of(figures)}
    if not recorded or not needed:
        return
    names = " ".join(figure.spec.name for figure in figures)
    runs = f"runs of {names} under budget {figures[0].budget}"
    expected = f"a recording with {runs}. Omit it, or change --fig."
    is_used = not needed.isdisjoint(recorded)
    expect(is_used, "--results_from", " ".join(map(str, paths)), expected)


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
    """Yield each claim about a curve with each of its recorded runs that has only the last loss."""
    for panel in figure.panels:
        for claim in filter(_reads_curve, panel.spec.claims):
            for run in _recorded_runs(claim, panel, runs):
                if len(run.curve(VAL_LOSS).tokens) == 1:
                    yield claim, run.dir.name


def _reads_curve(claim: ClaimSpec) -> bool:
    """Return True if a claim is about losses before the end of a run."""
    parts = KINDS[claim.kind].parts(claim)
    return any(KINDS[part.kind].reads_curve or part.until < 1 for part in parts)


def _recorded_runs(claim: ClaimSpec, panel: PlannedPanel, runs: RunStore) -> Iterator[Run]:
    """Yield the recorded runs of the arms of a claim."""
    for arm in panel.arms:
        if not arm.is_of(claim.arms):
            continue
        for request in arm.requests:
            if runs.is_recorded(*request):
                yield runs.read(*request)
