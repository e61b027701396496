"""Figures, budgets and tuned optima from the YAML files of conf/paper.

The report of the figure `tuning` (report/write.py) has the files of conf/paper/tuned, which are copied by hand.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.spec import CONF, Budget, FigureSpec, Tuned
from lightning_sv.settings.yaml_file import read_as

if TYPE_CHECKING:  # it imports torch, which `report` does not need
    from lightning_sv.scale.strategy import ScaleStrategy

T = TypeVar("T")
#: placement -> strategy whose values an untuned arm has
KIN = {"nop": "nop", "bp": "llama", "ap": "hg+dp+or", "dp": "hg+dp+or", "dnp": "hg+dnp+or+iwd"}
_STD = "model.backbone.init_std"


def figure_names(conf: Path = CONF) -> list[str]:
    """Return the names of all figures."""
    return _names(conf / "paper")


def budget_names(conf: Path = CONF) -> list[str]:
    """Return the names of all budgets."""
    return _names(conf / "paper" / "budgets")


def load_figure(name: str, conf: Path = CONF) -> FigureSpec:
    """Read conf/paper/NAME.yaml.

    Raises:
        ConfigError: an unknown figure, an invalid key or value, or an unknown budget
    """
    figure, budgets = _load(FigureSpec, name, conf / "paper", "figure"), budget_names(conf)
    for where, named in _budgets_named(figure):
        for budget in named:
            if budget not in budgets:
                raise ConfigError(unknown(f"conf/paper/{name}.yaml: {where}: budget", budget, budgets))
    return figure


def _budgets_named(figure: FigureSpec) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield each place in a figure that names budgets, with the names."""
    for panel in figure.panels:
        at = f"panel {panel.title!r}"
        arms = [(f"{at}: arm {label!r}", arm) for label, arm in panel.arms.items()]
        claims = [(f"{at}: claim {claim.kind!r}", claim) for claim in panel.claims]
        for where, spec in ((at, panel), *arms, *claims):
            for key in ("seeds", "skip_under", "one_at_a_time", "lr"):
                yield f"{where}: {key}", getattr(spec, key, None) or ()
            yield from ((f"{where}: axes: {key}", of) for key, of in getattr(spec, "axes", {}).items())


def load_budget(name: str, conf: Path = CONF) -> Budget:
    """Read conf/paper/budgets/NAME.yaml.

    Raises:
        ConfigError: an unknown budget, or an invalid key or value
    """
    return _load(Budget, name, conf / "paper" / "budgets", "budget")


def load_tuned(name: str, conf: Path = CONF) -> Tuned | None:
    """Read conf/paper/tuned/NAME.yaml; None if it does not exist.

    Raises:
        ConfigError: an invalid key or value
    """
    path = conf / "paper" / "tuned" / f"{name}.yaml"
    return read_as(Tuned, path) if path.is_file() else None


def _load(cls: type[T], name: str, folder: Path, what: str) -> T:
    known = _names(folder)
    if name not in known:
        raise ConfigError(unknown(what, name, known))
    return read_as(cls, folder / f"{name}.yaml")


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def tuned_keys(tuned: Tuned, strategy: "ScaleStrategy", label: str, d_model: int) -> tuple[dict[str, float], str]:
    """Return the values of an arm, and a sentence if they are those of a related arm.

    The related arm is the tuned one of the same strategy with most of its exceptions and no other, else that of `KIN`.

    Raises:
        ConfigError: neither the arm nor its related arm is tuned
    """
    kin = KIN.get(strategy.placement, "")
    related = [name for name in tuned.arms if _split(name)[0] == str(strategy) and _split(name)[1] <= _split(label)[1]]
    source = max(related, key=lambda name: len(_split(name)[1]), default=kin)
    if source not in tuned.arms:
        raise ConfigError(f"conf/paper/tuned/{tuned.name}.yaml has no values for {label}, nor for its kin {kin!r}.")
    values = dict(tuned.arms[source])
    if _STD in values and d_model != tuned.d_model:
        values[_STD] = rounded(values[_STD] * math.sqrt(tuned.d_model / d_model))
    return values, "" if source == label else f"{label} is not tuned itself: it has the values of {source}."


def _split(label: str) -> tuple[str, frozenset[str]]:
    """Split `hg+or[lm_head=dp]` into the strategy and its exceptions."""
    strategy, _, exceptions = label.rstrip("]").partition("[")
    return strategy, frozenset(filter(None, exceptions.split(",")))


def rounded(value: float) -> float:
    """Round to two digits; the errors are larger than the third."""
    return float(f"{value:.2g}")
