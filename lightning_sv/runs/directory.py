"""Files of a run directory: their names, which only this module spells, and their content.

config.yaml  summary.json  parameters.csv  tokenizer.json  events.out.tfevents.*  run.png
checkpoints/last.ckpt  nonfinite.jsonl (after a step that was not finite)  .lock
checkpoints/step-<n>.ckpt (if they are kept)
train.log  command.json (if `compare` or `paper` started the run)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sv.atomic import read_json, reading, regular
from lightning_sv.errors import ConfigError, UnreadableError, expect

#: the resolved config, which repeats the run
CONFIG = "config.yaml"
#: final numbers of a run; exists only if the run is complete
SUMMARY = "summary.json"
#: name, shape, role, optimizer, peak lr and weight decay of every parameter
PARAMETERS = "parameters.csv"
PICTURE = "run.png"
#: the checkpoint a run resumes from
LAST = Path("checkpoints") / "last.ckpt"
#: steps whose loss or gradient was not finite, one per line
NONFINITE = "nonfinite.jsonl"
#: stdout and stderr of a run started by a different command
LOG = "train.log"
#: the command of such a run
COMMAND = "command.json"
LOCK = ".lock"
_EVENTS = "*tfevents*"
#: key of summary.json -> type of its value, which may be None
SUMMARY_TYPES: dict[str, type] = {
    **dict.fromkeys(("label", "meaning", "model", "corpus_hash", "tokenizer_sha256", "torch"), str),
    **dict.fromkeys(("commit", "date", "machine", "built_by", "own_optimizer"), str),
    **dict.fromkeys(("seed", "steps", "skipped_steps", "tokens", "parameters", "activated_parameters"), int),
    **dict.fromkeys(("lr", "val_loss", "val_perplexity", "val_bits_per_byte", "seconds", "epochs"), float),
    "legs": list,
    "origin": dict,
}
_NOUNS = {str: "text", int: "a whole number from 0", float: "a number", list: "a list", dict: "keys and values"}


def is_complete(run_dir: Path) -> bool:
    """Return True if the run took its last step."""
    return (run_dir / SUMMARY).is_file()


def is_diverged(run_dir: Path) -> bool:
    """Return True if the run stopped at a loss or gradient that was not finite; resuming it would repeat that."""
    if is_complete(run_dir) or not (run_dir / NONFINITE).is_file():
        return False
    return bool(config_value(read_config(run_dir), "model.nonfinite") != "skip")  # else it was interrupted later


def is_begun(run_dir: Path) -> bool:
    """Return True if the run wrote its config."""
    return (run_dir / CONFIG).is_file()


def event_files(run_dir: Path) -> list[Path]:
    """Return TensorBoard's files, one per start of the run, if they are regular files."""
    return [regular(file) for file in sorted(run_dir.glob(_EVENTS))]


def segment_suffix(run_dir: Path) -> str:
    """Return the end of the name of the next event file, with its number: clocks of machines may differ."""
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
    found = sorted({file.parent for name in (CONFIG, SUMMARY) for file in folder.glob(f"*/{name}")})
    return [run for run in found if is_complete(run)], [run for run in found if not is_complete(run)]


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory of a checkpoint, or None.

    A name such as `{epoch}-{val/loss:.2f}` makes ModelCheckpoint write into a folder below `checkpoints`.
    """
    for folder in checkpoint.parents:
        if folder.name == LAST.parent.name and is_begun(folder.parent):
            return folder.parent
    return None


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the final numbers of a run, empty if it is incomplete; raise ConfigError if they are damaged."""
    path = run_dir / SUMMARY
    if not path.is_file():
        return {}
    summary = read_json(path, "rename it and resume the run with --ckpt_path last, which writes it again.")
    for key, kind in SUMMARY_TYPES.items():
        value: Any = summary.get(key)
        if kind is float and type(value) is int:
            continue
        if value is not None and (type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63)):
            raise ConfigError(f"{path}: {key} is {value!r:.80}; expected {_NOUNS[kind]}. Train the run again.")
    return printable(summary)


def read_stop(run_dir: Path) -> dict[str, Any]:
    """Return the last step of a run that was not finite, see `NONFINITE`."""
    path = run_dir / NONFINITE
    try:
        with reading(path):
            text = path.read_text()
        event: dict[str, Any] = json.loads(text.splitlines()[-1])
        return event | {"step": int(event["step"])}
    except UnreadableError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} has no step; train the run again in a new directory.") from error


def read_config(run_dir: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the config of a run as nested dictionaries, empty if the file does not exist."""
    from lightning_sv.settings.yaml_file import read_yaml  # imported here, so that a model needs no omegaconf

    path = run_dir / name
    if not path.is_file():
        return {}
    found = {str(key): value for key, value in printable(read_yaml(path, str(path))).items()}
    for section in ("model", "data", "trainer"):
        value = found.get(section)
        expect(isinstance(value, dict | None), f"{path}: {section}", f"{value!r:.80}", "keys and values.")
    return found


def config_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a config, or None."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def printable(value: Any) -> Any:
    """Replace control characters in nested texts, which would control the terminal."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in value)
    if isinstance(value, dict):
        return {printable(key): printable(child) for key, child in value.items()}
    return [printable(child) for child in value] if isinstance(value, list) else value
