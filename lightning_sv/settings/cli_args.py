"""Conversion between command-line arguments and the keys of a config."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_sv.errors import ConfigError
from lightning_sv.settings.paths import config_path
from lightning_sv.settings.yaml_file import read_yaml


def parse_overrides(words: Sequence[str], command: str) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of `--config FILE`, and the `--key value` or `--key=value` that no later file overrides.

    Raises:
        ConfigError: an argument has no value, or a value or a file is not valid YAML
    """
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(parts) % 2 or not all(part.startswith("--") for part in parts[::2]):
        raise ConfigError(
            f"{command}: {' '.join(words)} is neither an option nor a key of fit, e.g. --data.corpus.dir DIR."
        )
    files: list[Path] = []
    keys: dict[str, Any] = {}
    for key, text in zip(parts[::2], parts[1::2], strict=True):
        if key == "--config":
            files.append(Path(config_path(text, key)))
            keys = {k: v for k, v in keys.items() if k not in read_leaves(files[-1])}
            continue
        try:  # OmegaConf, as for config files: 1e-3 is a number
            keys[key.removeprefix("--")] = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload,index]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{command}: {key} {text!r} is not valid YAML: {' '.join(str(error).split())}") from error
    return files, keys


def read_leaves(file: Path) -> dict[str, Any]:
    """Return the dotted keys of a config file with their values."""
    return leaves(read_yaml(file, f"--config {file}"))


def leaves(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of nested sections with their values."""
    values: dict[str, Any] = {}
    for name, child in content.items():
        values |= leaves(child, f"{prefix}{name}.") if isinstance(child, Mapping) else {f"{prefix}{name}": child}
    return values


def to_args(keys: Mapping[str, Any]) -> list[str]:
    """Return keys and values as command-line arguments.

    >>> to_args({"model.optim.lr": 0.1, "trainer.fast": True})
    ['--model.optim.lr', '0.1', '--trainer.fast', 'true']
    """
    plain = {k: json.dumps(v) if isinstance(v, bool) or v is None else str(v) for k, v in keys.items()}
    return [word for key, text in plain.items() for word in (f"--{key}", text)]
