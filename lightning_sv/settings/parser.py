"""An argument parser whose errors are one sentence with the nearest right name."""

import math
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_sv.errors import ConfigError
from lightning_sv.settings.paths import PATHS, WITH_PATHS, config_path, expand_path, expand_variables
from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.sections import SECTIONS
from lightning_sv.settings.yaml_file import parse_yaml, read_yaml, without_empty

#: what other programs call a key -> ours
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


#: a type -> what a value of it is
_WORDS = {
    "NoneType": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
}


class Parser(ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit; `-` in an option's name counts as `_`.

    Misspelled keys, from YAML or the command line, are answered with the nearest right one. A key is given whole: what
    an abbreviation stands for changes with the keys there are.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse, after checking that every config file is readable YAML; expand the paths."""
        words = sys.argv[1:] if args is None else args
        if isinstance(words, list):
            args = words = underscored(words)
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
            config = super().parse_args(args, *rest, **kwargs)
        except (OverflowError, TypeError, RecursionError, AttributeError, KeyError) as error:
            # jsonargparse meets 10**400 for a float, or a list for a section
            self.error(f"a value cannot be read ({error!r})", None)
        except ValueError as error:  # from OmegaConf, about an interpolation
            raise error if isinstance(error, ConfigError) else ConfigError(str(error).splitlines()[0]) from error
        _check_values(self, config)
        _expand_paths(self, config)
        return config

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Build the classes; raise ConfigError if a class refuses its arguments."""
        try:
            return super().instantiate(*args, **kwargs)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(fits_no_type(str(error))) from error

    def _load_config_parser_mode(self, content: str, path: Any = "", *rest: Any, **more: Any) -> Namespace:
        """Load the text of a config file; empty sections do not reset those of earlier files."""
        given = parse_yaml(content, f"--config {path}")
        kept = without_empty(given)
        text = content if kept and kept == given else yaml.safe_dump(kept)
        return super()._load_config_parser_mode(text, path, *rest, **more)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ValueError with the cause in one line."""
        text = re.sub(r"\s+", " ", str(ex or message)).strip().removesuffix(".")
        if missing := text.partition("arguments are required: ")[2]:
            raise ConfigError(_what_to_give(missing.split(", "))) from ex
        text = fits_no_type(text).removesuffix(".")
        raise ConfigError(f"{text}.{self._hint(text)}") from ex

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


def fits_no_type(text: str) -> str:
    r"""What jsonargparse says, in pages, of a value that is of none of several types, as one sentence; else `text`.

    >>> fits_no_type("Parser key \"model.optim.lr\": Does not validate against any of the Union subtypes Subtypes: "
    ...              "[...] Errors: - Expected a <class 'float'> - Expected a <class 'NoneType'> Given value: nan")
    'model.optim.lr is nan; it must be a finite number or null.'
    >>> fits_no_type("Parser key \"model.compile\": Expected a typing.Literal['none', 'block']. Got value: full")
    'model.compile is full; it must be one of: none block.'
    """
    text = " ".join(text.split())
    if single := re.fullmatch(
        r'Parser key "([\w.]+)": (Expected a [^.]+(?:\.Literal\[[^]]+\])?)\. Got value: (.*)', text
    ):
        return f"{single[1]} is {single[3]}; it must be {_kinds(single[2])}."
    if "of the Union subtypes" not in text:
        return text
    key = re.search(r'^Parser key "([\w.]+)"', text)
    name, value = key[1] if key else "a value", text.rpartition("Given value: ")[2]
    if lacks := re.search(r"class_path '([\w.]+)': .*?Requirement '([^']+)' not met", text):
        return f"{lacks[1]} needs {lacks[2]}, which is not installed; run .venv/bin/python -m pip install '{lacks[2]}'."
    if wrong := re.search(r"Problem with given class_path '([\w.]+)': (.*?) (?:- Expected a|Given value type)", text):
        return f"{name}: {wrong[1]} cannot be made: {wrong[2]}."
    if "dot import path" in text:
        return f"{name} is {value}, which names no class; give its import path, e.g. my_module.MyClass."
    if said := re.search(
        r"Errors: - (?!Expected a |Not a valid |Does not)(.+?)\.? - (?:Expected a |Not a valid )", text
    ):
        return f"{name}: {said[1]}." if key else f"{said[1]}."  # by the class itself
    return f"{name} is {value}; it must be {_kinds(text) or 'of another type'}."


def _kinds(text: str) -> str:
    """What jsonargparse expected, in words."""
    kinds = re.findall(r"Expected a <class '(\w+)'>", text)
    listed = re.findall(r"[\w-]+", " ".join(re.findall(r"Expected a typing\.Literal\[([^]]+)\]", text)))
    if listed:
        return f"one of: {' '.join(listed)}{' or null' if 'NoneType' in kinds else ''}"
    return " or ".join(dict.fromkeys(_WORDS.get(kind, f"a {kind}") for kind in kinds))


def _what_to_give(missing: list[str]) -> str:
    """Where the keys are that a run must have."""
    keys = [key.removeprefix("fit.").removeprefix("validate.").rstrip(".") for key in missing]
    files = ["data/stdlib"] * any(key.startswith("data.") for key in keys)
    files += ["model/tiny"] * any(key.startswith("model.") for key in keys)
    words = " ".join(f"--config conf/{file}.yaml" for file in (["base"] if "data/stdlib" in files else []) + files)
    where = f"give their files, e.g. {words}" if words else "give them"
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not set; {where}."


def _check_values(parser: ArgumentParser, config: Any) -> None:
    """Raise ValueError where jsonargparse lets pass a single value for a section of keys, or null for a value."""
    for group in parser._action_groups:
        section = getattr(group, "dest", None) if getattr(group, "group_class", None) else None
        value = config.get(section) if section else None
        if value is not None and not isinstance(value, dict | Namespace):
            raise ConfigError(f"{section} is {value!r}; it must hold keys and values.")
    for action in parser._actions:
        if isinstance(action.choices, dict) and (name := config.get(action.dest)) in action.choices:
            _check_values(action.choices[name], config[name])
        hint = getattr(action, "_typehint", None)
        nullable = hint in (None, Any) or type(None) in get_args(hint) or action.default is None
        if action.dest not in config:
            continue
        value = config[action.dest]
        if not nullable and value is None:
            raise ConfigError(f"{action.dest} is null; it needs a value, or leave it out for {action.default!r}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{action.dest} is {value}; expected a finite number.")


def _expand_paths(parser: ArgumentParser, config: Any) -> None:
    """Write out `~` and `$NAME` in the keys that are paths; the parser of a subcommand does those of its own."""
    for action in parser._actions:
        for keys, expanded in ((PATHS, expand_path), (WITH_PATHS, expand_variables)):
            if action.dest in keys and isinstance(value := config.get(action.dest), str):
                config[action.dest] = expanded(value, action.dest)


def _keys(parser: ArgumentParser) -> set[str]:
    """Every key of a parser and its subcommands."""
    keys = set()
    for action in parser._actions:
        if isinstance(action.choices, dict):  # subcommand -> its parser
            for child in action.choices.values():
                keys |= _keys(child)
        elif action.dest not in ("help", "config"):
            keys.add(action.dest)
    return keys
