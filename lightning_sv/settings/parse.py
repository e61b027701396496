"""Parser of config files and keys, based on jsonargparse: its messages, as `ConfigError`."""

import math
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.paths import EXPANSIONS, config_path
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, Plain, class_name, entries_of
from lightning_sv.settings.words import options_of, underscored, values_of
from lightning_sv.settings.yaml_file import (
    CALLBACKS,
    SECTIONS,
    leaves,
    parse_yaml,
    read_leaves,
    read_yaml,
    without_empty,
)

#: largest seed that NumPy accepts
MAX_SEED = 2**32 - 1
#: keys of a single start of a run: ours and LightningCLI's
_START = ("run_dir", "ckpt_path", "allow_lr_jump", "json", "weights_only")
#: what jsonargparse and OmegaConf raise for a wrong value, such as a list for a section
_WRONG = (
    ArgumentError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
#: names of keys in other programs -> ours
_USUAL_NAMES = {
    **dict.fromkeys(("batch_size", "train_batch_size"), "data.global_batch"),
    **dict.fromkeys(
        ("block_size", "context_length", "max_seq_len", "sequence_length"), "data.seq_len"
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), "model.backbone.d_model"),
    **dict.fromkeys(("steps", "max_iters", "num_steps"), "trainer.max_steps"),
    **dict.fromkeys(("gpus", "num_gpus"), "trainer.devices"),
    "seed": "seed_everything",
}

#: keys of `trainer` whose value may be a list of classes
_LISTS = ("callbacks", "plugins", "logger")


class Parser(ArgumentParser):
    """A parser that raises ConfigError, and suggests the key closest to an unknown one.

    `-` in an option's name counts as `_`. Keys cannot be abbreviated, because the meaning would
    change with new keys.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False, **kwargs})

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Check that every config file is valid YAML, parse, and expand paths."""
        words = _with_config_paths(underscored(args))
        keys = list(_given_keys(words))
        try:
            config = super().parse_args(words, **kwargs)
        except ConfigError:
            raise
        except _WRONG as error:
            raise ConfigError(f"{error}{self._hint(keys, words)}") from error
        self._check_sections(config)
        self._check_values(config)
        _expand_paths(config)
        return config

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Build the classes; raise ConfigError if a class rejects its arguments."""
        try:
            return super().instantiate(*args, **kwargs)
        except ConfigError:
            raise
        except (ArgumentError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def _load_config_parser_mode(
        self, content: str, path: Any = "", *rest: Any, **more: Any
    ) -> Namespace:
        """Load a config file without empty sections, which would reset those of earlier files."""
        given = parse_yaml(content, f"--config {path}")
        kept = without_empty(given)
        if not kept or kept != given:
            content = yaml.safe_dump(kept)
        return super()._load_config_parser_mode(content, path, *rest, **more)

    def known_keys(self) -> list[str]:
        """Return the keys and sections of the parser."""
        return sorted({action.dest for action in self._actions} - {"help", "config"})

    def _hint(self, keys: Iterable[str], words: Sequence[str]) -> str:
        """Return a suggestion for the first unknown key, or for words without a config file."""
        unknown = [key for key in keys if not self._is_known(key)]
        if "model_class" in unknown:  # recorded by a subclass of PretrainCLI
            return ". The config is that of a script with its own model class: use that script."
        for key in unknown:
            near = closest_key(key, self.known_keys())
            if near is not None:
                return f". Did you mean {near!r}?"
        reads_a_run = "model.backbone" in self.known_keys()
        if reads_a_run and not values_of(words, "config"):
            return ". Start from a complete config, e.g. --config tiny-unified."
        return ""

    def _is_known(self, key: str) -> bool:
        """Return True for a key of the parser, or one inside its value, e.g. of a class."""
        known = self.known_keys()
        sections = {name.rpartition(".")[0] for name in known}
        inside_values = tuple(f"{name}." for name in set(known) - sections)
        return key in known or key.startswith(inside_values)

    def _check_sections(self, config: Any) -> None:
        """Reject a value for a section, which jsonargparse accepts."""
        groups = self._action_groups
        classes = {group.dest for group in groups if getattr(group, "group_class", None)}
        for section in sorted(SECTIONS | classes):
            value = config.get(section)
            is_section = isinstance(value, dict | Namespace | None)
            expect(is_section, section, value, "keys and values.")

    def _check_values(self, config: Any) -> None:
        """Reject values that jsonargparse accepts: null, and numbers that no key takes."""
        for action in self._actions:
            if action.dest in config:
                _check_value(action, config[action.dest])
        seed = config.get("seed_everything")
        is_seed = not isinstance(seed, int) or 0 <= seed <= MAX_SEED
        expect(is_seed, "seed_everything", seed, f"an integer from 0 to {MAX_SEED}.")


def _check_value(action: Action, value: Any) -> None:
    if value is None and not _is_nullable(action):
        raise ConfigError(f"{action.dest} is null; expected a value.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{action.dest} is {value}; expected a finite number.")


def _expand_paths(config: Any) -> None:
    for key, expand in EXPANSIONS.items():
        value = config.get(key)
        if isinstance(value, str):
            config[key] = expand(value, key)


def _is_nullable(action: Action) -> bool:
    hint = getattr(action, "_typehint", None)
    if hint in (None, Any) or action.default is None:
        return True
    return type(None) in get_args(hint)


def closest_key(key: str, known: Collection[str]) -> str | None:
    """Return the known key that is meant by an unknown one; None if none is close.

    >>> closest_key("model.lr", ["data.seq_len", "model.optim.lr"])
    'model.optim.lr'
    """
    leaf = key.rpartition(".")[2]
    usual = _USUAL_NAMES.get(leaf)
    if usual in known:
        return usual
    leaf_keys = {name.rpartition(".")[2]: name for name in known}
    if leaf in leaf_keys:
        return leaf_keys[leaf]
    near = get_close_matches(key, known, n=1, cutoff=0.7)
    near_leaves = get_close_matches(leaf, leaf_keys, n=1, cutoff=0.7)
    near += [leaf_keys[name] for name in near_leaves]
    return near[0] if near else None


def _with_config_paths(words: Iterable[str]) -> list[str]:
    """Return words with the paths of config files, which may be names of presets."""
    resolved: list[str] = []
    for option in options_of(words):
        if option.name == "config":
            resolved.append(f"--config={config_path(option.text, '--config')}")
        else:
            resolved += option.words
    return resolved


def _given_keys(words: Iterable[str]) -> Iterator[str]:
    """Yield the keys that words and their config files set, all of which must be valid YAML."""
    for option in options_of(words):
        if option.name == "config":
            yield from read_leaves(option.text)
        elif option.name in SECTIONS:
            yield from leaves(_section(f"--{option.name}", option.text), f"{option.name}.")
        elif option.name:
            yield option.name.removesuffix("+")


def _section(name: str, value: str) -> dict[str, Any]:
    """Return the keys of a section that is given in one line, or as a file."""
    if value.lstrip().startswith("{"):
        return parse_yaml(value, name)
    return read_yaml(value, f"{name} {value}")


def ignore_keys(
    parser: ArgumentParser, sections: Iterable[str] = (), keys: Iterable[str] = ()
) -> None:
    """Accept keys of a run's config that the command does not use, with any value."""
    known = {action.dest for action in parser._actions}
    kinds: dict[str, Any] = dict.fromkeys((*CALLBACKS, *sections), dict)
    kinds |= dict.fromkeys((*_START, *keys), Plain)
    for name, kind in kinds.items():
        if name not in known:
            parser.add_argument(f"--{name}", type=kind, help=SUPPRESS)


def add_run(parser: ArgumentParser, model: type, trainer: Callable[..., Any]) -> None:
    """Add the sections `model`, `data` and `trainer`; the last is not instantiated."""
    parser.add_class_arguments(
        trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True
    )
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_class_arguments(model, "model", skip={"lr"})  # model.optim.lr
    parser.add_class_arguments(DataConfig, "data")


def config_files(words: Iterable[str]) -> list[Path]:
    """Return the config files on a command line of `fit` or of `parse_run`."""
    return [Path(config_path(text, "--config")) for text in values_of(words, "config")]


def dropped_entries(files: Iterable[Path], trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each list in a config file that a later list of the same key replaces.

    Args:
        files: config files in the order of the command line
        trainer: parsed section `trainer`, to which they lead
    """
    used = {key: _class_names(trainer[key]) for key in _LISTS}
    for file in files:
        section = read_yaml(file, f"--config {file}").get("trainer", {})
        for key in _LISTS:
            listed = _class_names(section.get(key)) + _class_names(section.get(f"{key}+"))
            dropped = [name for name in listed if name not in used[key]]
            if dropped and used[key]:  # without any, a later null was asked for
                yield (
                    f"{', '.join(dropped)} in trainer.{key} of {file} is dropped, because a later "
                    f"list replaces it; write {key}+ in the later file to keep both"
                )


def _class_names(value: Any) -> list[str]:
    """Return the names of the classes in the value of a key."""
    names = [class_name(entry) for entry in entries_of(value)]
    return [name for name in names if name]  # a switch, such as `logger: false`, names none
