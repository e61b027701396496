"""Safe YAML loading of config files and dataclasses, and config keys as command-line words."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.nodes import MappingNode, Node, SequenceNode

from lightning_sv.atomic import reading
from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.paths import EXPANSIONS, config_path
from lightning_sv.settings.words import options_of

#: section of a callback of every run -> its class, which only `fit` imports
CALLBACKS = {
    "scalars": "lightning_sv.callbacks.TrainingMonitor",
    "branch_norms": "lightning_sv.callbacks.BranchNorms",
    "experts": "lightning_sv.callbacks.RouterMonitor",
    "samples": "lightning_sv.lit.text_samples.TextSamples",
    "checkpoint": "lightning_sv.lit.checkpoint.last_checkpoint.LastCheckpoint",
    "progress": "lightning_sv.callbacks.RunProgress",
}
#: keys that contain further keys
SECTIONS = frozenset(CALLBACKS) | {
    "model", "model.backbone", "model.backbone.router", "model.backbone.rope_scaling",
    "model.scale_options", "model.optim", "model.schedule",
    "data", "data.corpus", "trainer",
}  # fmt: skip
#: Maximum number of values of a config with its aliases expanded; a run's config has about two
#: hundred.
MAX_NODES = 10_000
_MAX_DEPTH = 100
#: errors of the parsers; ValueError for a 13th month
_INVALID = (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError)
_T = TypeVar("_T")


def read_as(record: type[_T], path: Path) -> _T:
    """Read a YAML file as a dataclass; a field `name` becomes the name of the file."""
    content = read_yaml(path, str(path))
    if "name" in record.__dataclass_fields__:  # type: ignore[attr-defined]
        content = {"name": path.stem, **content}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(record), content)  # type: ignore[arg-type]
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{path} has no keys and values; expected YAML such as KEY: VALUE ({error!r})."
        ) from error


def read_yaml(path: str | Path, where: str) -> dict[str, Any]:
    """Read keys and values of a file without empty sections; errors name the file `where`."""
    with reading(path):
        text = _read_text(Path(path), where)
    return without_empty(parse_yaml(text, where))


def _read_text(file: Path, where: str) -> str:
    if not file.is_file():  # a run reads it several times
        expected = f"expected a file with keys.{_missing_folder_hint(file)}"
        raise ConfigError(f"{where:.200} does not exist or is not a regular file; {expected}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def _missing_folder_hint(path: Path) -> str:
    """Return a sentence about the first folder of `path` that does not exist, if there is one."""
    for folder in reversed(path.parents):
        if not folder.exists():
            return f" There is no folder {folder}."
    return ""


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse text of keys and values; `where` is its name in errors."""
    try:
        content = _parse(text)
    except _INVALID as error:
        raise ConfigError(f"{where} is not valid YAML: {_problem(error)}") from error
    expect(isinstance(content, dict), where, f"a {type(content).__name__}", "keys and values.")
    return deepcopy(content)


def _problem(error: Exception) -> str:
    """Return the fault of a YAML text and its line, without the parser's quotation of the text."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    hint = ". Indent with spaces, not tabs." if "'\\t'" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


@lru_cache(maxsize=64)  # a figure's plan reads the same ten files a hundred times
def _parse(text: str) -> Any:
    node = yaml.compose(text, yaml.SafeLoader)
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return {}
    if _size(node, {}, 0) > MAX_NODES:
        raise yaml.YAMLError(f"more than {MAX_NODES:,} values with aliases expanded")
    if not isinstance(node, MappingNode):
        return node.value
    # OmegaConf instead of yaml, because YAML 1.1 reads 1e-5 as text and accepts a repeated key
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def without_empty(content: dict[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Remove empty sections of a run's config, which would reset those of earlier files.

    >>> without_empty({"trainer": None, "model": {"optim": None, "seed": None}})
    {'model': {'seed': None}}
    """
    kept = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            kept[name] = without_empty(value, f"{key}.")
        elif value is not None or key not in SECTIONS:
            kept[name] = value
    return kept


def _size(node: Node, known: dict[int, int], depth: int) -> int:
    """Count the nodes below `node` with aliases expanded; recursive aliases raise an error."""
    if depth > _MAX_DEPTH:
        raise RecursionError(f"nested more than {_MAX_DEPTH} deep")
    if id(node) not in known:
        sizes = [_size(child, known, depth + 1) for child in _children(node)]
        known[id(node)] = 1 + sum(sizes)
    return known[id(node)]


def _children(node: Node) -> list[Node]:
    """Return the values of a list, or the keys and values of a mapping."""
    if isinstance(node, SequenceNode):
        return list(node.value)
    if isinstance(node, MappingNode):
        return list(chain.from_iterable(node.value))
    return []


def parse_overrides(words: Sequence[str], command: str) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of `--config FILE`, and the `--key value` that no later file overrides."""
    files: list[Path] = []
    keys: dict[str, Any] = {}
    for key, text in option_pairs(words, command):
        if key == "config":
            file = Path(config_path(text, "--config"))
            files.append(file)
            if keys:
                for overridden in read_leaves(file):
                    keys.pop(overridden, None)
        elif key.endswith("+") and key in keys:
            hint = "Put the others into a YAML file."
            raise ConfigError(f"{command}: --{key} is set twice; expected one. {hint}")
        else:
            keys[key] = _value(key, text, command)
    return files, keys


def _value(key: str, text: str, command: str) -> Any:
    """Return the value of a key, read by OmegaConf as in config files: 1e-3 is a number."""
    if key in EXPANSIONS and text != "null":  # a path may look like a number
        return text
    try:
        content: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = _problem(error)
        raise ConfigError(f"{command}: --{key} {text!r} is not valid YAML: {problem}") from error
    return content["value"]


def option_pairs(words: Sequence[str], command: str) -> list[tuple[str, str]]:
    """Return (key, value) of words such as `--key value` and `--key=value`."""
    pairs: list[tuple[str, str]] = []
    for option in options_of(words):
        if not option.name or option.value is None:
            given = " ".join(words)
            expected = "neither an option nor a key of fit; expected --KEY VALUE."
            raise ConfigError(f"{command}: {given} is {expected}")
        pairs.append((option.name, option.value))
    return pairs


def read_leaves(file: str | Path) -> dict[str, Any]:
    """Return the dotted keys of a config file with their values."""
    return leaves(read_yaml(file, f"--config {file}"))


def leaves(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of nested sections with their values."""
    values: dict[str, Any] = {}
    for name, child in content.items():
        key = f"{prefix}{name}"
        if isinstance(child, Mapping):
            values |= leaves(child, f"{key}.")
        else:
            values[key] = child
    return values


def to_args(keys: Mapping[str, Any]) -> list[str]:
    """Return keys and values as command-line arguments.

    >>> to_args({"model.optim.lr": 0.1, "trainer.fast": True, "a": {"b": math.inf, "c": None}})
    ['--model.optim.lr', '0.1', '--trainer.fast', 'true', '--a', '{b: .inf, c: null}']
    """
    words: list[str] = []
    for key, value in keys.items():
        words += [f"--{key}", _plain(value)]
    return words


def _plain(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, Mapping | list):
        return yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, width=math.inf
        ).strip()
    if isinstance(value, bool | None):
        return json.dumps(value)
    return str(value)
