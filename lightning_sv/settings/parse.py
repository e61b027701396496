"""Parser of config files and keys, based on jsonargparse: its messages, as `ConfigError`.

The steps from a command line to settings, in their order:

words of the command line     `--model.optim.lr 0.1 --config FILE`
given_values                  key -> value of words and files, before types are known
jsonargparse                  types, defaults, interpolation
checks                        what jsonargparse accepts by mistake: null, infinite numbers, and
                              a value for a section
"""

import math
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from omegaconf import OmegaConf

from lightning_sv.errors import NUMBERS, ConfigError, did_you_mean, expect, expect_number
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.overrides import given_values, option_value, with_config_paths
from lightning_sv.settings.paths import PATHS, expand_path
from lightning_sv.settings.sections import CALLBACKS, SECTIONS, without_empty
from lightning_sv.settings.trainer import TRAINER_ARGUMENTS, TRAINER_DEFAULTS, Plain
from lightning_sv.settings.trainer_classes import check_imports, check_strategy_class
from lightning_sv.settings.words import underscored
from lightning_sv.settings.yaml_file import parse_yaml

#: largest seed that NumPy accepts
MAX_SEED = 2**32 - 1
#: keys of a single start of a run: ours and LightningCLI's
_START = ("run_dir", "ckpt_path", "weights_only")
#: what jsonargparse and OmegaConf raise for a wrong value, such as a list for a section
_WRONG = (
    ArgumentError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


class Parser(ArgumentParser):
    """A parser that raises ConfigError, and suggests the key closest to an unknown one.

    `-` in an option's name counts as `_`. Keys cannot be abbreviated, because the meaning would
    change with new keys.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False, **kwargs})

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Parse, check what jsonargparse accepts by mistake, and expand paths."""
        words = with_config_paths(underscored(args))
        given = given_values(words)  # refuses invalid YAML by the name of its file
        try:
            config = super().parse_args(words, **kwargs)
        except ConfigError:
            raise
        except _WRONG as error:
            self._refuse_plainly(given)
            raise ConfigError(f"{error}.{self._hint(given)}") from error
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
            # quotes the text 1e5, which yaml.safe_dump does not, and which is read as a number
            content = OmegaConf.to_yaml(OmegaConf.create(kept))
        return super()._load_config_parser_mode(content, path, *rest, **more)

    def known_keys(self) -> list[str]:
        """Return the keys and sections of the parser, without its options for help."""
        keys = {action.dest for action in self._actions}
        helps = {key for key in keys if key.rpartition(".")[2] == "help"}
        return sorted(keys - helps - {"config"})

    @property
    def model_options(self) -> str:
        """Options that give a model, for an error."""
        return "--model NAME, e.g. --model tiny, or --config FILE"

    def _refuse_plainly(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError if the cause is a common one, in place of jsonargparse's message.

        Its messages are many lines that name Python's types.
        """
        self._check_model(given)
        check_strategy_class(given)
        check_imports(given, self.prog)
        for action in self._actions:
            value = given.get(action.dest)
            if value is None:
                continue
            if isinstance(value, str) and "${" in value:  # its value is not known yet
                continue
            self._check_type(action.dest, value, _type_of(action))

    def _check_model(self, keys: Iterable[str]) -> None:
        """Raise ConfigError if the parser reads a model, and no key sets one."""
        if "model.backbone" not in self.known_keys():
            return
        for key in keys:
            if key.startswith("model.backbone."):
                return
        expected = f"{self.model_options}. `lightning-sv presets` lists the names."
        raise ConfigError(f"no model is given; expected {expected}{self._hint(keys)}")

    def _check_type(self, key: str, value: Any, kind: Any) -> None:
        """Raise ConfigError if a value is not the number or the word that its key expects."""
        if key == "seed_everything":
            _check_seed(self._read(key, value))
        if get_origin(kind) is Literal:
            words = list(map(str, get_args(kind)))
            expect(str(value) in words, key, value, f"one of {' '.join(words)}.")
        if kind in NUMBERS:
            expect_number(key, self._read(key, value), kind)

    def _read(self, key: str, value: Any) -> Any:
        """Return the value of a key, which is text if it is a word of the command line."""
        if isinstance(value, str):
            return option_value(key, value, self.prog)
        return value

    def _hint(self, keys: Iterable[str]) -> str:
        """Return a suggestion for the first unknown key that has one; empty if there is none."""
        unknown = self._unknown(keys)
        if "model_class" in unknown:  # recorded by a subclass of PretrainCLI
            return " The config is that of a script with its own model class: use that script."
        suggestions = map(self._suggestion, unknown)
        return next(filter(None, suggestions), "")

    def _suggestion(self, key: str) -> str:
        """Suggest a key with the same last name, or else any that is close; empty if none is."""
        known = self.known_keys()
        last_name = key.rpartition(".")[2]
        if last_name == "seed":
            return did_you_mean("seed_everything", known)
        same_last_name = [name for name in known if name.endswith(f".{last_name}")]
        if len(same_last_name) == 1:
            key = same_last_name[0]
        return did_you_mean(key, same_last_name) or did_you_mean(key, known)

    def _unknown(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not of the parser, nor in a value."""
        known = set(self.known_keys())
        sections = {name.rpartition(".")[0] for name in known}
        inside_values = tuple(f"{name}." for name in known - sections)
        unknown = []
        for key in keys:
            if key not in known and not key.startswith(inside_values):
                unknown.append(key)
        return unknown

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
        if seed is not None:  # a command without a seed
            _check_seed(seed)


def _check_value(action: Action, value: Any) -> None:
    if value is None and not _is_nullable(action):
        raise ConfigError(f"{action.dest} is null; expected a value.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{action.dest} is {value}; expected a finite number.")


def _check_seed(seed: Any) -> None:
    """Refuse what LightningCLI takes besides a seed: true is always 0 there, and false is none."""
    is_seed = type(seed) is int and 0 <= seed <= MAX_SEED
    expect(is_seed, "seed_everything", seed, f"an integer from 0 to {MAX_SEED}.")


def _expand_paths(config: Any) -> None:
    for key in PATHS:
        value = config.get(key)
        if isinstance(value, str):
            config[key] = expand_path(value, key)


def _is_nullable(action: Action) -> bool:
    kind = _type_of(action)
    is_untyped = kind in (None, Any)
    takes_null = type(None) in get_args(kind)
    return is_untyped or takes_null or action.default is None


def _type_of(action: Action) -> Any:
    """Return the annotation of a key; None for an option of argparse."""
    return getattr(action, "_typehint", None)


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
    if "json" not in known:
        parser.add_argument("--json", type=Plain, nargs="?", const=True, help=SUPPRESS)


def set_help(parser: ArgumentParser, texts: Mapping[str, str]) -> None:
    """Replace the help of keys."""
    for action in parser._actions:
        if action.dest in texts:
            action.help = texts[action.dest]


def add_run(parser: ArgumentParser, model: type, trainer: Callable[..., Any]) -> None:
    """Add the sections `model`, `data` and `trainer`; the last is not instantiated."""
    parser.add_class_arguments(
        trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True
    )
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.groups["trainer"].title = "Arguments of Lightning's Trainer"
    set_help(parser, {f"trainer.{key}": each.help for key, each in TRAINER_ARGUMENTS.items()})
    parser.add_class_arguments(model, "model", skip={"lr"})  # model.optim.lr
    parser.add_class_arguments(DataConfig, "data")
