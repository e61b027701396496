"""conf/paper/*.yaml -> figures, and conf/paper/budgets/*.yaml -> what they may spend.

A misspelled key, figure or budget is answered in one sentence with the nearest right name.
"""

from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_sv.experiments.spec import CONF, Budget, FigureSpec, unknown
from lightning_sv.settings.yaml_file import check_yaml

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
        ValueError: no such figure, or a key or value that it cannot have
    """
    return _load(FigureSpec, name, conf / "paper", figure_names(conf), "figure")


def load_budget(name: str, conf: Path = CONF) -> Budget:
    """Read conf/paper/budgets/NAME.yaml.

    Raises:
        ValueError: no such budget, or a key or value that it cannot have
    """
    return _load(Budget, name, conf / "paper" / "budgets", budget_names(conf), "budget")


def _load(cls: type[T], name: str, folder: Path, known: list[str], what: str) -> T:
    if name not in known:
        raise ValueError(unknown(what, name, known))
    path = folder / f"{name}.yaml"
    check_yaml(path, str(path))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), {"name": name}, OmegaConf.load(path))
        made: T = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error
    return made
