"""Safe YAML loading of config files and dataclasses."""

import io
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_sv.atomic import reading
from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.sections import leaves, without_empty

#: errors of the parsers; ValueError for a 13th month, OSError for a single number
_INVALID = (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError)
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
        raise ConfigError(f"{where} is not valid YAML: {yaml_problem(error)}") from error
    expect(isinstance(content, dict), where, f"a {type(content).__name__}", "keys and values.")
    return deepcopy(content)


def yaml_problem(error: Exception) -> str:
    """Return the fault of a YAML text and its line, without the parser's quotation of the text."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    hint = ""
    if "cannot start any token" in problem:
        hint = ". Indent with spaces, not tabs."
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


@lru_cache(maxsize=64)  # a figure's plan reads the same ten files a hundred times
def _parse(text: str) -> Any:
    # OmegaConf instead of yaml, because YAML 1.1 reads 1e-5 as text and accepts a repeated key
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def read_leaves(file: str | Path) -> dict[str, Any]:
    """Return the dotted keys of a config file with their values."""
    return leaves(read_yaml(file, f"--config {file}"))
