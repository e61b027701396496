"""Files of a run directory: their names, which only this module spells, and their content.

config.yaml  summary.json  tokenizer.json  events.out.tfevents.*  run.png
checkpoints/last.ckpt  nonfinite.jsonl (after a step that was not finite)  .lock
checkpoints/last-step-<n>.ckpt (a folder to which last.ckpt links, if checkpoints are sharded)
train.log  command.json  progress.json (if `compare` or `paper` started the run)
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sv.atomic import read_json, reading, regular
from lightning_sv.errors import ConfigError

#: the resolved config, which repeats the run
CONFIG = "config.yaml"
#: final numbers of a run; exists only if the run is complete
SUMMARY = "summary.json"
PICTURE = "run.png"
#: the checkpoint a run resumes from
LAST = Path("checkpoints") / "last.ckpt"
#: steps whose loss or gradient was not finite, one per line
NONFINITE = "nonfinite.jsonl"
#: stdout and stderr of a run started by a different command
LOG = "train.log"
#: the command of such a run
COMMAND = "command.json"
#: its steps, while it is running
PROGRESS = "progress.json"
LOCK = ".lock"
_EVENTS = "*tfevents*"
#: key of summary.json -> type of its value, which may be None
SUMMARY_TYPES: dict[str, type] = {
    "label": str,
    "meaning": str,
    "model": str,
    "corpus_hash": str,
    "tokenizer_sha256": str,
    "torch": str,
    "commit": str,
    "date": str,
    "machine": str,
    "built_by": str,
    "own_optimizer": str,
    "seed": int,
    "steps": int,
    "tokens": int,
    "parameters": int,
    "activated_parameters": int,
    "lr": float,
    "val_loss": float,
    "val_perplexity": float,
    "val_bits_per_byte": float,
    "seconds": float,
    "epochs": float,
    "legs": list,
    "origin": dict,
}
_NOUNS = {
    str: "text",
    int: "a whole number from 0",
    float: "a number",
    list: "a list",
    dict: "keys and values",
}


def is_complete(run_dir: Path) -> bool:
    """Return True if the run took its last step."""
    return (run_dir / SUMMARY).is_file()


def is_diverged(run_dir: Path) -> bool:
    """Return True if the run stopped at a loss or gradient that was not finite.

    Resuming it would repeat that.
    """
    return (run_dir / NONFINITE).is_file() and not is_complete(run_dir)


def is_begun(run_dir: Path) -> bool:
    """Return True if the run wrote its config."""
    return (run_dir / CONFIG).is_file()


def event_files(run_dir: Path) -> list[Path]:
    """Return TensorBoard's files, one per start of the run, if they are regular files."""
    return [regular(file) for file in sorted(run_dir.glob(_EVENTS))]


def segment_suffix(run_dir: Path) -> str:
    """Return the end of the name of the next event file, with its number."""
    numbers = [segment_number(file) for file in event_files(run_dir)]
    return f".segment-{max(numbers, default=0) + 1}"


def segment_number(event_file: Path) -> int:
    """Return the number of an event file, 0 if it has none.

    >>> segment_number(Path("events.out.tfevents.1764366557.host.12.0.segment-3"))
    3
    """
    number = event_file.name.rpartition(".segment-")[2]
    return int(number) if number.isdecimal() else 0


def runs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the complete and the incomplete runs directly in a folder, each sorted."""
    complete = {file.parent for file in folder.glob(f"*/{SUMMARY}")}
    begun = {file.parent for file in folder.glob(f"*/{CONFIG}")}
    return sorted(complete), sorted(begun - complete)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory of a checkpoint, or None.

    A name such as `{epoch}-{val/loss:.2f}` makes ModelCheckpoint write into a folder below
    `checkpoints`. The path may be relative to a folder inside the run.
    """
    for folder in without_dots(checkpoint).parents:
        run_dir = folder.parent
        if folder == run_dir / LAST.parent and is_begun(run_dir):
            return run_dir
    return None


def without_dots(path: str | Path) -> Path:
    """Return an absolute path, with its links, because checkpoints may be on a different disk."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the final numbers of a run, empty if it is incomplete.

    Raises:
        ConfigError: they are damaged
    """
    path = run_dir / SUMMARY
    if not path.is_file():
        return {}
    hint = "rename it and resume the run with --ckpt_path last, which writes it again."
    summary = read_json(path, hint)
    for key, kind in SUMMARY_TYPES.items():
        value = summary.get(key)
        if value is None:
            continue
        if not _is_of_type(value, kind):
            expected = f"{_NOUNS[kind]}. Train the run again."
            raise ConfigError(f"{path}: {key} is {value!r:.80}; expected {expected}")
    return printable(summary)


def _is_of_type(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 63
    return type(value) is kind


def read_stop(run_dir: Path) -> dict[str, Any]:
    """Return the last step of a run that was not finite, see `NONFINITE`."""
    path = run_dir / NONFINITE
    with reading(path):
        content = path.read_bytes()
    try:
        event: dict[str, Any] = json.loads(content.splitlines()[-1])
        return event | {"step": int(event["step"])}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        hint = "train the run again in a new directory."
        raise ConfigError(f"{path} has no step; {hint}") from error


def read_config(run_dir: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the config of a run as nested dictionaries, empty if the file does not exist."""
    # imported here, so that a model needs no omegaconf
    from lightning_sv.settings.yaml_file import read_yaml

    path = run_dir / name
    if not path.is_file():
        return {}
    content = printable(read_yaml(path, str(path)))
    config = {str(key): value for key, value in content.items()}
    for section in ("model", "data", "trainer"):
        value = config.get(section)
        if not isinstance(value, dict | None):
            raise ConfigError(f"{path}: {section} is {value!r:.80}; expected keys and values.")
    return config


def config_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a config, or None."""
    for name in key.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(name)
    return config


def printable(value: Any) -> Any:
    """Replace control characters in nested texts, which would control the terminal."""
    if isinstance(value, str):
        return "".join(map(_printable_char, value))
    if isinstance(value, dict):
        keys = map(printable, value)
        children = map(printable, value.values())
        return dict(zip(keys, children, strict=True))
    if isinstance(value, list):
        return list(map(printable, value))
    return value


def _printable_char(char: str) -> str:
    if char.isprintable() or char in "\n\t":
        return char
    return "\N{REPLACEMENT CHARACTER}"
