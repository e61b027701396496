"""Parsers of config files and keys, based on jsonargparse: errors of one sentence, and the arguments of `fit`."""

import math
import re
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace
from omegaconf.errors import InterpolationKeyError

from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.paths import PATHS, WITH_PATHS, config_path, expand_path, expand_variables
from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, Plain, class_name, entries_of
from lightning_sv.settings.yaml_file import CALLBACKS, SECTIONS, parse_yaml, read_yaml, without_empty

#: name of a type -> its values
_VALUES = {
    "NoneType": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "list": "a list",
    "dict": "keys and values",
    "": "keys and values",  # a section has no type
}
#: start of a line of jsonargparse about a type that a value does not have; other lines are by the class of the value
_ABOUT_TYPES = re.compile(
    r"Parser key|Does not validate|Subtypes:|Errors:|Expected an? |Not a valid |Subclass types expect|"
    r"a (class path|dict) |Unable to load|Import path|Given value|$"
)
#: option of a config file
_CONFIG = ("--config", "-c")
#: keys of `trainer` whose value may be a list of classes
_LISTS = ("callbacks", "plugins", "logger")
#: largest seed that NumPy accepts
MAX_SEED = 2**32 - 1
#: keys of a single start of a run: ours and LightningCLI's
_START = ("run_dir", "ckpt_path", "allow_lr_jump", "json", "weights_only")


#: names of keys in other programs -> ours
_USUAL_NAMES = {
    **dict.fromkeys(("batch_size", "train_batch_size"), "data.global_batch"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_len", "sequence_length"), "data.seq_len"),
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), "model.backbone.d_model"),
    **dict.fromkeys(("steps", "max_iters", "num_steps"), "trainer.max_steps"),
    **dict.fromkeys(("gpus", "num_gpus"), "trainer.devices"),
    "seed": "seed_everything",
}


class Parser(ArgumentParser):
    """A parser that raises ConfigError instead of exiting, and suggests the closest key for an unknown one.

    `-` in an option's name counts as `_`. Keys cannot be abbreviated, because the meaning would change with new keys.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Check that every config file is valid YAML, parse, and expand paths."""
        words = underscored(args)
        for i, flag in enumerate(words):
            name, inline, text = flag.partition("=")
            if not inline and i + 1 < len(words):
                text = words[i + 1]
            if name in _CONFIG:
                path = config_path(text, name)
                read_yaml(path, f"--config {path}")
                words[i : i + 2 - bool(inline)] = [f"{name}={path}"] if inline else [name, path]
            elif name.startswith("--") and name[2:] in SECTIONS:
                _ = parse_yaml(text, name) if text.lstrip().startswith("{") else read_yaml(text, f"{name} {text}")
        try:
            config = super().parse_args(words, **kwargs)
        except (OverflowError, TypeError, RecursionError, AttributeError, KeyError) as error:
            # 10**400 for a float, or a list for a section
            self.error(f"a value cannot be read ({error!r})", None)
        except ConfigError:
            raise
        except InterpolationKeyError as error:
            problem = str(error).splitlines()[0]
            expected = f"the key of a setting.{_variable_hint(problem)}"
            raise ConfigError(f"{error.full_key or 'a value'}: {problem}; expected {expected}") from error
        except ValueError as error:  # from OmegaConf, for other interpolations
            raise ConfigError(str(error).splitlines()[0]) from error
        _check_values(self, config)
        for key in (*PATHS, *WITH_PATHS):
            if isinstance(value := config.get(key), str):
                config[key] = expand_path(value, key) if key in PATHS else expand_variables(value, key)
        return config

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Build the classes; raise ConfigError if a class rejects its arguments."""
        try:
            return super().instantiate(*args, **kwargs)
        except ConfigError:
            raise
        except ValueError as error:
            self.error(str(error), error)

    def _load_config_parser_mode(self, content: str, path: Any = "", *rest: Any, **more: Any) -> Namespace:
        """Load the text of a config file without empty sections, which would reset those of earlier files."""
        given = parse_yaml(content, f"--config {path}")
        kept = without_empty(given)
        text = content if kept and kept == given else yaml.safe_dump(kept)
        return super()._load_config_parser_mode(text, path, *rest, **more)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ConfigError with the cause in one sentence."""
        text = str(ex or message)
        if missing := text.partition("arguments are required: ")[2]:
            verb = "are" if "," in missing else "is"
            hint = " Start from a complete config, e.g. --config tiny-unified." * ("model." in missing)
            raise ConfigError(f"{missing} {verb} not set; expected a value.{hint}") from ex
        if unknown := text.partition("unrecognized arguments: ")[2]:
            raise ConfigError(f"{unknown} is unknown; expected --KEY VALUE.{self._suggestion(text)}") from ex
        sentence = self._sentence(text)
        raise ConfigError(f"{sentence}{'.' * (sentence[-1] != '?')}{self._suggestion(text)}") from ex

    def _sentence(self, text: str) -> str:
        """Return the message of the value's class, or else `KEY is VALUE; expected EXPECTED`, without a full stop."""
        lines = [line.strip(" -") for line in text.splitlines()]
        key, value = re.match(r'Parser key "([\w.]+)"', text), re.search(r"(?:Got|Given) value:(.*)", text)
        name = key[1] if key else ""
        own = [line for line in lines if not _ABOUT_TYPES.match(line)]
        created = re.match(r"Problem with given class_path '([\w.]+)':", own[0]) if own else None
        if created:
            reason = " ".join(own[1:2]).rstrip(".")
            return f"{name}: {created[1]} cannot be created: {reason}{_class_hint(created[1])}".removeprefix(": ")
        if own:
            return f"{name}: {own[0].rstrip('.')}".removeprefix(": ")
        hints = [getattr(action, "_typehint", None) for action in self._actions if action.dest == name]
        expected = _expected(hints[0]) if hints else "a different type"
        given = value[1].strip() or repr("") if value else "invalid"
        return f"{name or 'a value'} is {given}; expected {expected}{_class_hint(given)}"

    def _suggestion(self, text: str) -> str:
        """Return a question with the known key that is closest to the unknown one in `text`, if there is one."""
        unknown = re.search(r"(?:[Kk]ey|[Oo]ption) [\"'](?P<key>[\w.]+)[\"']|--(?P<flag>[\w.]+)", text)
        key = (unknown["key"] or unknown["flag"]) if unknown else ""
        known = sorted(_keys(self))
        if key in known or not key:
            return ""
        leaves = {name.rpartition(".")[2]: name for name in known}
        leaf = key.rpartition(".")[2]
        usual = _USUAL_NAMES.get(leaf)
        near = [usual] if usual in known else [leaves[leaf]] if leaf in leaves else []
        near = near or get_close_matches(key, known, n=1, cutoff=0.7)
        near = near or [leaves[match] for match in get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
        return f" Did you mean {near[0]!r}?" if near else ""


def _class_hint(path: str) -> str:
    """Return what is wrong with the path of a class whose package is a usual mistake, without a full stop."""
    package, _, rest = path.partition(".")
    if package == "pytorch_lightning":
        return f". Its classes are those of the package lightning: lightning.pytorch.{rest}"
    if re.fullmatch(r"[\w.]+\.\w+", path) and package and find_spec(package) is None:
        return f". Add the folder of {package} to PYTHONPATH"
    return ""


def _variable_hint(problem: str) -> str:
    """Return how to name a variable of the environment, for OmegaConf's message about an unknown `${NAME}`."""
    name = re.search(r"'([A-Z_][A-Z0-9_]*)'", problem)
    return f" For the variable of the environment write ${name[1]} or ${{oc.env:{name[1]}}}." if name else ""


def ignore_keys(parser: ArgumentParser, sections: Iterable[str] = (), keys: Iterable[str] = ()) -> None:
    """Accept keys of a run's config that the command does not use, without checking their values."""
    known = {action.dest for action in parser._actions}
    for kind, names in ((dict, (*CALLBACKS, *sections)), (Plain, (*_START, *keys))):
        for name in (name for name in names if name not in known):
            parser.add_argument(f"--{name}", type=kind, help=SUPPRESS)


def _expected(hint: Any) -> str:
    """Return a phrase for the values of a type.

    >>> _expected(float | None), _expected(Literal["none", "block"])
    ('a finite number or null', 'one of: none block')
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    listed = dict.fromkeys(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
    names = [getattr(get_origin(kind) or kind, "__name__", "") for kind in kinds if get_origin(kind) is not Literal]
    words = [_VALUES.get(name, f"the import path of a {name}") for name in names]
    return " or ".join(dict.fromkeys([f"one of: {' '.join(listed)}"] * bool(listed) + words))


def _check_values(parser: ArgumentParser, config: Any) -> None:
    """Reject values that jsonargparse accepts: a value for a section, null, numbers out of range."""
    classes = {group.dest for group in parser._action_groups if getattr(group, "group_class", None)}
    for section in sorted(SECTIONS | classes):
        value = config.get(section)
        expect(isinstance(value, dict | Namespace | None), section, value, "keys and values.")
    seed = config.get("seed_everything")
    fits = not isinstance(seed, int) or 0 <= seed <= MAX_SEED
    expect(fits, "seed_everything", seed, f"an integer from 0 to {MAX_SEED}.")
    for action in (action for action in parser._actions if action.dest in config):
        hint, value = getattr(action, "_typehint", None), config[action.dest]
        nullable = hint in (None, Any) or type(None) in get_args(hint) or action.default is None
        expect(nullable or value is not None, action.dest, "null", f"a value, by default {action.default!r}.")
        expect(not isinstance(value, float) or math.isfinite(value), action.dest, value, "a finite number.")


def _keys(parser: ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions} - {"help", "config"}


def add_run(parser: ArgumentParser, model: type, trainer: Callable[..., Any]) -> None:
    """Add the sections `model`, `data` and `trainer`; the last is not instantiated."""
    parser.add_class_arguments(trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_class_arguments(model, "model", skip={"lr"})  # model.optim.lr
    parser.add_class_arguments(DataConfig, "data")


def config_files(words: Iterable[str]) -> list[Path]:
    """Return the config files on a command line of `fit` or of `parse_run`."""
    words = list(words)
    files = list[Path]()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, inline, text = word.partition("=")
        if name in _CONFIG:
            files.append(Path(config_path(text if inline else following, name)))
    return files


def dropped_entries(files: Iterable[Path], trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each list in a config file that a later list of the same key replaces.

    Args:
        files: config files in the order of the command line
        trainer: parsed section `trainer`, to which they lead
    """
    for file, key in product(files, _LISTS):
        used = {class_name(entry) for entry in entries_of(trainer[key])} - {""}
        section = read_yaml(file, f"--config {file}").get("trainer", {})
        names = [class_name(entry) for name in (key, f"{key}+") for entry in entries_of(section.get(name))]
        dropped = [name for name in names if name not in used]
        if used and dropped:
            yield (
                f"{', '.join(dropped)} in trainer.{key} of {file} is dropped, because a later list replaces it; "
                f"write {key}+ in the later file to keep both"
            )
