"""Parser of config files and keys, based on jsonargparse, with errors of one sentence."""

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_sv.errors import ConfigError
from lightning_sv.settings.paths import PATHS, WITH_PATHS, config_path, expand_path, expand_variables
from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.sections import SECTIONS
from lightning_sv.settings.yaml_file import parse_yaml, read_yaml, without_empty

#: name of a key in other programs -> our key
ELSEWHERE = {
    "learning_rate": "model.optim.lr",
    "max_lr": "model.optim.lr",
    "batch_size": "data.global_batch",
    "micro_batch_size": "data.micro_batch",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "hidden_size": "model.backbone.d_model",
    "n_embd": "model.backbone.d_model",
    "num_hidden_layers": "model.backbone.n_layer",
    "num_attention_heads": "model.backbone.n_head",
    "num_key_value_heads": "model.backbone.n_kv_head",
    "max_iters": "trainer.max_steps",
    "steps": "trainer.max_steps",
    "seed": "seed_everything",
    "strategy": "model.scale",
    "optimizer": "model.optim.name",
    "lr_scheduler": "model.schedule.name",
}
#: name of a type -> its values
_WORDS = {
    "NoneType": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "list": "a list",
    "dict": "keys and values",
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
            if name in ("--config", "-c"):
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
        except ValueError as error:  # from OmegaConf, for an interpolation
            raise error if isinstance(error, ConfigError) else ConfigError(str(error).splitlines()[0]) from error
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
            raise ConfigError(f"{sentence(' '.join(str(error).split()).removesuffix('.'), self)}.") from error

    def _load_config_parser_mode(self, content: str, path: Any = "", *rest: Any, **more: Any) -> Namespace:
        """Load the text of a config file without empty sections, which would reset those of earlier files."""
        given = parse_yaml(content, f"--config {path}")
        kept = without_empty(given)
        text = content if kept and kept == given else yaml.safe_dump(kept)
        return super()._load_config_parser_mode(text, path, *rest, **more)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ConfigError with the cause in one line."""
        text = " ".join(str(ex or message).split()).removesuffix(".")
        if missing := text.partition("arguments are required: ")[2]:
            raise ConfigError(_missing_keys(missing.split(", "))) from ex
        raise ConfigError(f"{sentence(text, self)}.{self._hint(text)}") from ex

    def _hint(self, text: str) -> str:
        unknown = re.search(r"(?:[Kk]ey|[Oo]ption) [\"'](?P<key>[\w.]+)[\"']|--(?P<flag>[\w.]+)", text)
        if not unknown:
            return ""
        key = unknown["key"] or unknown["flag"]
        known = sorted(_keys(self))
        if key in known:
            return ""
        if ours := ELSEWHERE.get(key.rpartition(".")[2]):
            return f" Did you mean {ours!r}?"
        near = get_close_matches(key, known, n=1, cutoff=0.7)
        if not near:
            leaves = {name.rpartition(".")[2]: name for name in known}
            near = [leaves[m] for m in get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.7)]
        return f" Did you mean {near[0]!r}?" if near else ""


def sentence(text: str, parser: ArgumentParser | None = None) -> str:
    r"""Return jsonargparse's error about a value, which has pages for several types, as one sentence without full stop.

    Args:
        text: the error in one line
        parser: parser with the type of the key

    >>> sentence("Parser key \"trainer.logger\": Does not validate against any of the Union subtypes Errors: "
    ...          "- Problem with given class_path 'a.B': no such module - Expected a <class 'bool'> Given value: x")
    'trainer.logger: a.B cannot be created: no such module'
    """
    key, value = re.search(r'^Parser key "([\w.]+)"', text), re.search(r"(?:Got|Given) value: (.*)", text)
    name = key[1] if key else "a value"
    if lacks := re.search(r"class_path '([\w.]+)': .*?Requirement '([^']+)' not met", text):
        return f"{lacks[1]} needs {lacks[2]}, which is not installed; run .venv/bin/python -m pip install '{lacks[2]}'"
    if value is None:
        return text
    if wrong := re.search(
        r"Problem with given class_path '([\w.]+)': (.*?)\.? (?:- Expected a|Given value type)", text
    ):
        return f"{name}: {wrong[1]} cannot be created: {wrong[2]}"
    if "dot import path" in text:
        return f"{name} is {value[1]}; expected the import path of a class, e.g. my_module.MyClass"
    if own := re.search(r"Errors: - (?!Expected a |Not a valid |Does not)(.+?)\.? - (?:Expected a |Not a )", text):
        return f"{name}: {own[1]}" if key else own[1]  # raised by the class itself
    hints = [getattr(action, "_typehint", None) for action in parser._actions if action.dest == name] if parser else []
    return f"{name} is {value[1]}; expected {_expected(hints[0]) if hints else 'a different type'}"


def _expected(hint: Any) -> str:
    """Return a phrase for the values of a type.

    >>> _expected(float | None), _expected(Literal["none", "block"])
    ('a finite number or null', 'one of: none block')
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    listed = dict.fromkeys(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
    names = [getattr(get_origin(kind) or kind, "__name__", "") for kind in kinds if get_origin(kind) is not Literal]
    words = [_WORDS.get(name, f"a {name}") for name in names]
    return " or ".join(dict.fromkeys([f"one of: {' '.join(listed)}"] * bool(listed) + words))


def _missing_keys(missing: list[str]) -> str:
    """Return an error for required keys that are not set, with the files that set them."""
    keys = [key.rstrip(".") for key in missing]
    files = ["data/stdlib"] * any(key.startswith("data.") for key in keys)
    files += ["model/tiny"] * any(key.startswith("model.") for key in keys)
    words = " ".join(f"--config conf/{file}.yaml" for file in (["base"] if "data/stdlib" in files else []) + files)
    where = f"give their files, e.g. {words}" if words else "give them"
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not set; {where}."


def _check_values(parser: ArgumentParser, config: Any) -> None:
    """Reject values that jsonargparse accepts: a single value for a section, null, and numbers that are not finite."""
    for group in parser._action_groups:
        section = getattr(group, "dest", None) if getattr(group, "group_class", None) else None
        value = config.get(section) if section else None
        if value is not None and not isinstance(value, dict | Namespace):
            raise ConfigError(f"{section} is {value!r}; expected keys and values.")
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        nullable = hint in (None, Any) or type(None) in get_args(hint) or action.default is None
        if action.dest not in config:
            continue
        value = config[action.dest]
        if not nullable and value is None:
            raise ConfigError(f"{action.dest} is null; expected a value, by default {action.default!r}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{action.dest} is {value}; expected a finite number.")


def _keys(parser: ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions} - {"help", "config"}
