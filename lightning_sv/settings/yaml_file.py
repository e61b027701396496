"""Is a YAML file what a config may be, or a dataclass? Without Lightning, so that reading a run stays quick."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.nodes import MappingNode, Node, SequenceNode

#: values of a config after its aliases are written out; a run's own has some two hundred
MAX_NODES = 100_000
_MAX_DEPTH = 100
_T = TypeVar("_T")


def read_as(record: type[_T], path: Path, change: Callable[[Any], None] = lambda content: None) -> _T:
    """Read a YAML file as a dataclass, whose name is that of the file where it has one.

    Args:
        record: the dataclass; lists and dictionaries of others are made of these
        path: the file
        change: of the content in place, before it is compared with the class

    Raises:
        ValueError: no such file, a key or value that it cannot have, or one that it lacks; names the file and the key
    """
    check_yaml(path, str(path))
    named = {"name": path.stem} if "name" in record.__dataclass_fields__ else {}  # type: ignore[attr-defined]
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
        change(content)
        made: _T = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(record), named, content))  # type: ignore[assignment,arg-type]
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: keys and values are not where they must be ({error!r}).") from error
    return made


def check_yaml(path: str | Path, where: str) -> None:
    """Refuse a file that is no plain YAML of keys and values: tags that name Python objects, aliases that explode.

    Args:
        path: the file
        where: names it in errors

    Raises:
        ValueError: says what is wrong with the file
    """
    if not Path(path).is_file():
        raise ValueError(f"{where}: there is no such file.")
    try:
        kind = _content_type(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bytes that are no UTF-8, a 13th month
        problem = " ".join(str(error).split())
        raise ValueError(f"{where} is not valid YAML: {problem}") from error
    if kind not in (dict, type(None)):
        raise ValueError(f"{where} holds a {kind.__name__}; it must hold keys and values.")


@lru_cache(maxsize=64)  # a figure's plan reads the same ten files a hundred times
def _content_type(text: str) -> type:
    node = yaml.compose(text, yaml.SafeLoader)
    if node is None:
        return type(None)
    if _size(node, {}, 0) > MAX_NODES:
        raise yaml.YAMLError(f"more than {MAX_NODES:,} values with its aliases written out")
    return type(yaml.SafeLoader("").construct_document(node))


def _size(node: Node, known: dict[int, int], depth: int) -> int:
    """Count the nodes below `node`, each alias as often as it stands; aliases of what holds them never end."""
    if depth > _MAX_DEPTH:
        raise RecursionError(f"nested more than {_MAX_DEPTH} deep")
    if id(node) not in known:
        children: list[Node] = []
        if isinstance(node, MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(_size(child, known, depth + 1) for child in children)
    return known[id(node)]
