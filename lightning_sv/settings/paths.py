"""Paths of the user, expanded once by the parsers of the command line."""

import errno
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
#: keys that may contain paths; the corpus expands `~` in them
WITH_PATHS = ("data.corpus.source", "data.corpus.tokenizer")


def expand_path(text: str, key: str) -> str:
    """Return a path of the user with `~` and `$NAME` expanded; `key` is its name in errors."""
    expect(bool(text.strip()), key, repr(text), "a path.")
    path = expand_variables(os.path.expanduser(text), key)  # noqa: PTH111 (pathlib fails if HOME is not set)
    problem = _problem(path)
    if problem is not None:
        raise ConfigError(f"{key} is {text!r:.100}; expected a usable path ({problem}).")
    return path


def _problem(path: str) -> str | None:
    """Return why no file can have this path; None if one can."""
    try:
        os.stat(path)  # noqa: PTH116
    except ValueError as error:
        return str(error)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return error.strerror
    return None


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


def expand_variables(text: str, key: str) -> str:
    """Expand `$NAME` and `${NAME}`, unless a file has this name literally."""
    if _exists(text):
        return text
    path = os.path.expandvars(text)
    names = re.findall(r"\$\{?([A-Za-z_]\w*)", text)
    unset = [name for name in names if name not in os.environ]
    if unset and not _exists(path):
        raise ConfigError(f"{key} is {text}; expected a path, but ${unset[0]} is not set. Set it.")
    return path


def _exists(path: str) -> bool:
    return os.path.lexists(path.removeprefix("files:"))


#: key whose value is or contains a path -> what expands it
EXPANSIONS = dict.fromkeys(PATHS, expand_path) | dict.fromkeys(WITH_PATHS, expand_variables)


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
