"""Checks of figures before their first run is trained."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lightning_sv.corpus import is_remote
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.results import PlannedFigure, requests_of
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.runs.events import Run


def check_trainable(figures: Sequence[PlannedFigure]) -> None:
    """Refuse a figure without an available panel, except if conf/paper leaves it out.

    Raises:
        ConfigError: the sentence of the first panel, which names the missing rate or the command
            that tunes it
    """
    for figure in figures:
        panels = figure.panels
        reasons = [panel.why_not for panel in panels if figure.budget not in panel.spec.skip_under]
        is_untrained = bool(reasons) and None not in reasons
        if is_untrained:
            raise ConfigError(f"--fig {figure.spec.name}: {reasons[0]}.")


def check_corpora(figures: Sequence[PlannedFigure]) -> None:
    """Refuse runs whose corpus is not prepared, or not that of the others.

    Raises:
        ConfigError: names the folder, and the command that prepares it
    """
    run_specs = [run_spec for run_spec, _ in requests_of(figures)]
    if not run_specs:
        return
    first = run_specs[0]
    folder = _corpus_folder(first)
    hint = "Set --data.corpus.dir for all runs, with an --out per corpus."
    expected = f"{folder}, that of {first.title}. {hint}"
    for run_spec in run_specs:
        other = _corpus_folder(run_spec)
        expect(other == folder, f"data.corpus.dir of {run_spec.title}", other, expected)
    if is_remote(folder):
        return
    manifest = Path(folder).expanduser() / FILENAME
    command = shlex.join(["lightning-sv", "prepare", *_prepare_args(first.args)])
    expect(manifest.is_file(), "data.corpus.dir", folder, f"a prepared corpus. Run `{command}`.")


def _corpus_folder(run_spec: RunSpec) -> str:
    return str(run_spec.settings["data"]["corpus"]["dir"])


def _prepare_args(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a run that `prepare` takes too."""
    for name, value in pairwise(args):
        is_data_file = name == "--config" and Path(value).parent.name == "data"
        is_corpus_key = name.startswith("--data.corpus.")
        if is_data_file or is_corpus_key:
            yield from (name, value)


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
    is_of_others = bool(paths) and bool(needed) and needed.isdisjoint(recorded)
    if is_of_others:
        names = " ".join(figure.spec.name for figure in figures)
        runs = f"runs of {names} under budget {figures[0].budget}"
        found = " ".join(map(str, paths))
        expected = f"a recording with {runs}. Omit it, or change --fig."
        raise ConfigError(f"--results_from is {found}; expected {expected}")
