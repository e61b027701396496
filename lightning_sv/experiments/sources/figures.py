"""conf/paper/*.yaml -> figures, and conf/paper/budgets/*.yaml -> what they may spend.

A misspelled key, figure or budget is answered in one sentence with the nearest right name.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

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
        raise unknown(what, name, known)
    path = folder / f"{name}.yaml"
    check_yaml(path, str(path))
    given = OmegaConf.to_container(OmegaConf.load(path))
    made: T = _made(cls, {"name": name, **given} if isinstance(given, dict) else given, str(path))
    return made


def _made(hint: Any, value: Any, where: str) -> Any:
    """Build what a type hint says of plain YAML, or say where it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _made(args[0], value, where)
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__") and isinstance(value, Mapping):
        known, hints = {f.name: f for f in fields(hint)}, get_type_hints(hint)
        for key in value:
            if key not in known:
                raise unknown(f"{where}: key", str(key), list(known))
        absent = [f.name for f in fields(hint) if f.default is f.default_factory is MISSING and f.name not in value]
        if absent:
            raise ValueError(f"{where} has no {absent[0]}; add it.")
        return hint(**{key: _made(hints[key], each, f"{where}: {key}") for key, each in value.items()})
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _made(args[1], each, f"{where}.{key}") for key, each in value.items()}
    if origin is list and isinstance(value, list):
        return [_made(args[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin not in (dict, list) and hint is not Any:  # a choice, or a plain type
        choices = args or None
        plain = (int, float) if hint is float else hint
        right = value in choices if choices else isinstance(value, plain) and isinstance(value, bool) == (hint is bool)
        if not right:
            raise ValueError(f"{where} is {value!r}; it must be {' or '.join(choices) if choices else hint.__name__}.")
    elif hint is not Any:
        raise ValueError(f"{where} is {value!r}; it must hold {'keys and values' if origin is dict else 'a list'}.")
    return value
