"""Config files and keys on a command line."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.paths import TEXTS, config_path
from lightning_sv.settings.sections import SECTIONS, keys_in_sections, leaves
from lightning_sv.settings.words import Option, options_of
from lightning_sv.settings.yaml_file import parse_yaml, read_leaves, read_yaml, yaml_problem


def parse_overrides(words: Sequence[str], command: str) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of `--config FILE`, and the `--key value` that no later file overrides."""
    files: list[Path] = []
    keys: dict[str, Any] = {}
    for key, text in option_pairs(words, command):
        if key == "config":
            file = Path(config_path(text, "--config"))
            files.append(file)
            _remove_overridden(keys, file)
            continue
        if key.endswith("+") and key in keys:
            hint = "Put the others into a YAML file."
            raise ConfigError(f"{command}: --{key} is set twice; expected one. {hint}")
        if key in SECTIONS and text != "null":
            # `fit` also reads a file here; comparisons record the content of --config files alone
            expected = "keys and values in braces. Give a file with --config."
            expect(_is_in_line(text), f"--{key}", text, expected)
            keys |= keys_in_sections({key: _section(f"--{key}", text)})
        else:
            keys[key] = option_value(key, text, command)
    return files, keys


def _remove_overridden(keys: dict[str, Any], file: Path) -> None:
    """Remove the keys that a later file sets again, also as entries of a dictionary."""
    if not keys:
        return
    for overriding, value in keys_of_file(file).items():
        keys.pop(overriding, None)
        if not is_dictionary(value):  # fit merges the arguments of a class
            continue
        for entry in [key for key in keys if key.startswith(f"{overriding}.")]:
            del keys[entry]


def is_dictionary(value: Any) -> bool:
    """Return True for a value such as `weight_decay_by_role`, but not for a class."""
    return isinstance(value, Mapping) and "class_path" not in value


def keys_of_file(file: Path) -> dict[str, Any]:
    """Return the keys that a config file sets; a dictionary is the value of one key."""
    return keys_in_sections(read_yaml(file, f"--config {file}"))


def option_value(key: str, text: str, command: str) -> Any:
    """Return the value of a key, read by OmegaConf as in config files: 1e-3 is a number."""
    if key in TEXTS and text != "null":
        return text
    try:
        content: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        problem = yaml_problem(error)
        raise ConfigError(f"{command}: --{key} {text!r} is not valid YAML: {problem}") from error
    return content["value"]


def option_pairs(words: Sequence[str], command: str) -> list[tuple[str, str]]:
    """Return (key, value) of words such as `--key value` and `--key=value`."""
    pairs: list[tuple[str, str]] = []
    for option in options_of(words):
        if not option.name or option.value is None:
            given = " ".join(option.words)
            expected = "neither an option nor a key of fit with a value; expected --KEY VALUE."
            raise ConfigError(f"{command}: {given} is {expected}")
        pairs.append((option.name, option.value))
    return pairs


def with_config_paths(words: Iterable[str]) -> list[str]:
    """Return words with the paths of config files, which may be names of presets."""
    resolved: list[str] = []
    for option in options_of(words):
        if option.name == "config":
            resolved.append(f"--config={config_path(option.text, '--config')}")
        else:
            resolved += option.words
    return resolved


def given_values(words: Iterable[str]) -> dict[str, Any]:
    """Return key -> value of words and their config files, all of which must be valid YAML."""
    values: dict[str, Any] = {}
    for option in options_of(words):
        values |= _values_of(option)
    return values


def _values_of(option: Option) -> dict[str, Any]:
    """Return the values that an option sets, which may be a config file or a section."""
    if option.name == "config":
        return read_leaves(option.text)
    if option.name in SECTIONS:
        return leaves(_section(f"--{option.name}", option.text), f"{option.name}.")
    if not option.name:
        return {}
    key = option.name.removesuffix("+")
    return {key: option.value}


def _section(name: str, value: str) -> dict[str, Any]:
    """Return the keys of a section that is given in one line, or as a file."""
    if _is_in_line(value):
        return parse_yaml(value, name)
    return read_yaml(value, f"{name} {value}")


def _is_in_line(value: str) -> bool:
    return value.lstrip().startswith("{")


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
