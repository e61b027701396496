"""Paths of the user, expanded once by the parsers of the command line."""

import os
import re
from pathlib import Path

from lightning_sv.errors import ConfigError, did_you_mean, expect, unknown

#: keys of a run's config that are paths
PATHS = ("run_dir", "ckpt_path", "model.init_from", "data.corpus.dir", "trainer.default_root_dir")
#: paths that a run reads
INPUTS = ("model.init_from", "data.corpus.dir")
#: folders of conf/ whose files have names of their own, so that --config takes them by name
PRESETS = ("experiment", "model", "data", "optim", "schedule", "trainer", "probes", "scale", ".")
#: keys whose values are text, also those that look like numbers
TEXTS = (*PATHS, "data.corpus.source", "data.corpus.tokenizer")


def expand_path(text: str, key: str) -> str:
    """Return a path of the user with `~` expanded; `key` is its name in errors.

    A variable, which shells expand and YAML does not, would be the name of a folder.
    """
    is_path = bool(text.strip()) and "\0" not in text
    expect(is_path, key, repr(text), "a path.")
    hint = "In a config write ${oc.env:NAME}."
    expect(not re.search(r"\$[A-Za-z_]", text), key, text, f"a path without variables. {hint}")
    return os.path.expanduser(text)  # noqa: PTH111 (pathlib fails if HOME is not set)


def config_path(text: str, key: str) -> str:
    """Return the path of a config file; a name without a folder may be a preset, see `presets`."""
    path = expand_path(text, key)
    is_name = re.fullmatch(r"[\w.+-]+", text) and not text.endswith((".yaml", ".yml"))
    if not is_name or Path(path).exists():
        return path
    known = presets()
    if text not in known:
        hint = f"`lightning-sv presets` lists them.{did_you_mean(text, known)}"
        raise ConfigError(f"{key} is {text}; expected a file, or the name of a preset. {hint}")
    return str(known[text])


def presets() -> dict[str, Path]:
    """Return the config files that --config takes by name, first those of the working directory."""
    found: dict[str, Path] = {}
    for kind in PRESETS:
        for path in _config_files(kind):
            found.setdefault(path.stem, path)
    return found


def _config_files(kind: str) -> list[Path]:
    """Return the files of conf/KIND, first those of the working directory."""
    files: list[Path] = []
    for root in _config_folders():
        files += sorted((root / kind).glob("*.yaml"))
    return files


def _config_folders() -> list[Path]:
    """Return conf/ of the working directory and of the package."""
    return [Path("conf"), Path(__file__).parents[1] / "conf"]


def find_config(kind: str, name: str, *, own_first: bool = True) -> Path:
    """Return conf/KIND/NAME.yaml of the working directory, or else of the package.

    With `own_first=False` the package comes first.

    Raises:
        ConfigError: neither has the file
    """
    roots = _config_folders()
    if not own_first:
        roots.reverse()
    for root in roots:
        path = root / kind / f"{name}.yaml"
        if path.is_file():
            return path
    raise ConfigError(unknown(kind, name, config_names(kind)))


def config_names(kind: str) -> list[str]:
    """Return the names of the files in conf/KIND."""
    return sorted({path.stem for path in _config_files(kind)})
