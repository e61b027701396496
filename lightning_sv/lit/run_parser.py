"""Parser of `fit` and `validate`: LightningCLI's, with our errors and a short help."""

import shutil
import sys
from argparse import SUPPRESS, Action
from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from textwrap import shorten
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lightning_sv.settings.parser import Parser
from lightning_sv.settings.yaml_file import SECTIONS

#: sections whose keys are all main options
_MAIN_SECTIONS = ("", "model", "model.optim", "model.schedule", "data")
#: sections of which some keys are main options
_MAIN_KEYS = {
    "model.backbone": ("name", "d_model", "n_layer", "n_head", "n_kv_head", "d_ff", "vocab_size", "init_std", "qk_norm",
                       "post_norm", "n_expert", "n_expert_active"),
    "data.corpus": ("dir", "source", "tokenizer"),
    "trainer": ("max_steps", "accelerator", "devices", "num_nodes", "precision", "strategy", "gradient_clip_val",
                "callbacks", "logger", "fast_dev_run"),
    "scalars": ("every_n_steps",), "branch_norms": ("every_n_steps",), "experts": ("every_n_steps",),
    "checkpoint": ("every_n_steps", "keep", "best"), "samples": ("tokens", "prompt"),
}  # fmt: skip
_USAGE = """usage: {prog} --config FILE [--config FILE ...] [--KEY VALUE ...]

FILE is YAML with any of these keys, or a name in conf/experiment, e.g. tiny-unified. Later values win."""
_FOOT = """
These are the main options; {prog} --help_all lists all {count}, with types and units.
{prog} --trainer.callbacks.help CLASS lists those of one of Lightning's callbacks; the same works for loggers."""

# the default of Timer's interval is an enum, which a config could not hold
yaml.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value), yaml.SafeDumper)


class RunParser(Parser, LightningArgumentParser):
    """LightningCLI's parser: `--help` lists the main options, `--help_all` all of them."""

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Parse, or print all options."""
        if "--help_all" in args:
            self._print_message(super().format_help(), sys.stdout)
            self.exit()
        return super().parse_args(args, **kwargs)

    def format_help(self) -> str:
        """Return the help of the main options, a line each; all options of one class."""
        if all(action.dest != "run_dir" for action in self._actions):
            return str(super().format_help())
        lines = [_USAGE.format(prog=self.prog)]
        for section, options in groupby(self._main_options(), lambda each: each[0]):
            lines += ["", f"{section}:", *(_line(action) for _, action in options)]
        count = sum(bool(action.option_strings) for action in self._actions)
        return "\n".join([*lines, _FOOT.format(prog=self.prog, count=count), ""])

    def _main_options(self) -> list[tuple[str, Action]]:
        found = []
        for action in self._actions:
            section, _, key = action.dest.rpartition(".")
            known = section in _MAIN_SECTIONS or key in _MAIN_KEYS.get(section, ())
            if known and action.help != SUPPRESS and _option(action) and action.dest not in SECTIONS:
                found.append((section.partition(".")[0] or "run", action))
        order = list(dict.fromkeys(("run", "model", "data", "trainer", *(section for section, _ in found))))
        return sorted(found, key=lambda each: order.index(each[0]))


def _option(action: Action) -> str:
    return next((option for option in action.option_strings if option.startswith("--")), "")  # a link's target has none


def _line(action: Action) -> str:
    text = " ".join((action.help or "").split("; ")[0].split())
    default = "" if action.default in (None, SUPPRESS) else f" [{action.default}]"
    width = shutil.get_terminal_size().columns - 38 - len(default)
    return f"  {_option(action):34}  {shorten(text, max(width, 20), placeholder=' ...')}{default}"
