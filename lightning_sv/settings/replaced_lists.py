"""Lists of config files that a later file replaces."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_sv.settings.trainer import class_name, entries_of
from lightning_sv.settings.yaml_file import read_yaml

#: keys of `trainer` whose value may be a list of classes
_LISTS = ("callbacks", "plugins", "logger")


def dropped_entries(files: Iterable[Path], trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each list in a config file that a later list of the same key replaces.

    Args:
        files: config files in the order of the command line
        trainer: parsed section `trainer`, to which they lead
    """
    for file in files:
        section = read_yaml(file, f"--config {file}").get("trainer", {})
        for key in _LISTS:
            used = _class_names(trainer[key])
            if not used:  # a later null was asked for
                continue
            listed = _class_names(section.get(key)) + _class_names(section.get(f"{key}+"))
            dropped = [name for name in listed if name not in used]
            if dropped:
                yield (
                    f"{', '.join(dropped)} in trainer.{key} of {file} is dropped, because a later "
                    f"list replaces it; write {key}+ in the later file to keep both"
                )


def _class_names(value: Any) -> list[str]:
    """Return the names of the classes in the value of a key."""
    names = [class_name(entry) for entry in entries_of(value)]
    return [name for name in names if name]  # a switch, such as `logger: false`, names none
