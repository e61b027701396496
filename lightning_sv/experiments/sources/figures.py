"""conf/paper/*.yaml -> figures, and conf/paper/budgets/*.yaml -> what they may spend.

A misspelled key, figure or budget is answered in one sentence with the nearest right name.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.spec import CONF, Budget, FigureSpec, Tuned
from lightning_sv.settings.yaml_file import read_as

T = TypeVar("T")


def figure_names(conf: Path = CONF) -> list[str]:
    """Names of all figures."""
    return sorted(path.stem for path in (conf / "paper").glob("*.yaml"))


def budget_names(conf: Path = CONF) -> list[str]:
    """Names of all budgets."""
    return sorted(path.stem for path in (conf / "paper" / "budgets").glob("*.yaml"))


def load_figure(name: str, conf: Path = CONF) -> FigureSpec:
    """Read conf/paper/NAME.yaml.

    Raises:
        ConfigError: no such figure, a key or value that it cannot have, or a budget that there is not
    """
    figure, budgets = _load(FigureSpec, name, conf / "paper", figure_names(conf), "figure"), budget_names(conf)
    for where, named in _budgets_named(figure):
        for budget in named:
            if budget not in budgets:
                raise ConfigError(unknown(f"conf/paper/{name}.yaml: {where}: budget", budget, budgets))
    return figure


def _budgets_named(figure: FigureSpec) -> Iterator[tuple[str, Iterable[str]]]:
    """Where a figure says something of budgets, and of which."""
    for panel in figure.panels:
        at = f"panel {panel.title!r}"
        yield from ((f"{at}: seeds", panel.seeds), (f"{at}: not_at", panel.not_at), (f"{at}: cross", panel.cross))
        yield f"{at}: lr", panel.lr or ()
        yield from ((f"{at}: axes: {key}", of) for key, of in panel.axes.items())
        yield from ((f"{at}: claim {claim.kind!r}: not_at", claim.not_at) for claim in panel.claims)
        for label, arm in panel.arms.items():
            yield from ((f"{at}: arm {label!r}: lr", arm.lr), (f"{at}: arm {label!r}: not_at", arm.not_at))
            yield from ((f"{at}: arm {label!r}: axes: {key}", of) for key, of in arm.axes.items())


def load_budget(name: str, conf: Path = CONF) -> Budget:
    """Read conf/paper/budgets/NAME.yaml.

    Raises:
        ConfigError: no such budget, a key or value that it cannot have, or no pairs
    """
    budget = _load(Budget, name, conf / "paper" / "budgets", budget_names(conf), "budget")
    if budget.seeds < 1:
        raise ConfigError(
            f"budget {name}: its seeds are {budget.seeds}; give the number of pairs, two to judge claims."
        )
    return budget


def load_tuned(name: str, conf: Path = CONF) -> Tuned | None:
    """Read conf/paper/tuned/NAME.yaml; None where nobody has tuned it yet.

    Raises:
        ConfigError: a key or value that it cannot have
    """
    known = sorted(path.stem for path in (conf / "paper" / "tuned").glob("*.yaml"))
    return _load(Tuned, name, conf / "paper" / "tuned", known, "tuned") if name in known else None


def _load(cls: type[T], name: str, folder: Path, known: list[str], what: str) -> T:
    if name not in known:
        raise ConfigError(unknown(what, name, known))
    return read_as(cls, folder / f"{name}.yaml")
