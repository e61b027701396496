"""Parser of `fit` and `validate`: LightningCLI's, with a short help."""

import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lightning_sv.errors import expect
from lightning_sv.settings.parse import Parser

_USAGE = "{program} {{fit,validate}} --config FILE [--config FILE ...] [--KEY VALUE ...]"
_MORE_HELP = "`fit --help` explains the most used keys, `fit --help_all` all of them."
_FIT_HELP = """\
usage: {prog} --model NAME [--data NAME|FILE|FOLDER] [--scale STRATEGY] [--KEY VALUE ...]
       {prog} --config FILE [--config FILE ...] [--KEY VALUE ...]

Train a model. `lightning-sv presets` lists the names.

  --model NAME              e.g. tiny or mini
  --data NAME|FILE|FOLDER   a corpus, or your own text, which is prepared first; default stdlib
  --scale STRATEGY          strategy of the scale vectors, e.g. llama, unified or hg+dp+or
  --optim NAME              adamw (default), muon or sgd
  --schedule NAME           schedule of the learning rate: cos (default) or wsd
  --trainer NAME            cpu (default), gpu, ddp or fsdp
  --probes NAME             further measurements, e.g. copying
  --config FILE             YAML file, or a name, e.g. tiny-unified

Later files and keys override earlier ones.

{keys}
  --dry_run                 check keys, values and model without a corpus, and exit
  --print_config            print the config and exit

{prog} --help_all lists all keys, with types, units and defaults.
"""
#: of a script with its own model class, which takes no names
_SCRIPT_HELP = """usage: {prog} --config FILE [--config FILE ...] [--KEY VALUE ...]

FILE is a YAML file, or a name that `lightning-sv presets` lists, e.g. tiny-unified. Later files and
keys override earlier ones.

  --model.scale STRATEGY    e.g. llama, unified or hg+dp+or
{keys}
  --print_config            print the config and exit

{prog} --help_all lists all keys, with types, units and defaults.
"""
_KEYS = """\
  --run_dir DIR             directory of the run; runs/MODEL/STRATEGY-seedSEED by default
  --ckpt_path FILE          checkpoint to resume from; `last` for that of --run_dir
  --seed_everything N       seed of the initialization and of the order of the data
  --model.optim.lr X        peak learning rate
  --data.corpus.dir DIR     corpus, written by `lightning-sv prepare`
  --trainer.max_steps N     optimizer steps; by default they follow from --model.tokens_per_param
  --trainer.callbacks+=CLASS, --trainer.logger CLASS
                            class of Lightning, or your own; --trainer.callbacks.help CLASS
                            lists its options
  --json                    print the results as JSON"""
_VALIDATE_HELP = """usage: {prog} RUN [--KEY VALUE ...]
       {prog} --config FILE --ckpt_path FILE [--KEY VALUE ...]

Print the validation loss of a checkpoint, over the whole validation split.

  RUN                       run directory; stands for --config RUN/config.yaml
                            --ckpt_path RUN/checkpoints/last.ckpt
  --config FILE             config.yaml of the run
  --ckpt_path FILE          checkpoint
  --data.corpus.dir DIR     different corpus with the same tokenizer
  --json                    print the results as JSON
  --dry_run                 check keys, values and model without a corpus, and exit

{prog} --help_all lists all keys, with types, units and defaults.
"""
#: program and command -> its help; others are scripts with their own model class
_HELP = {"lightning-sv fit": _FIT_HELP, "lightning-sv validate": _VALIDATE_HELP}


def _represent_enum(dumper: Any, value: Enum) -> Any:
    return dumper.represent_data(value.value)


# the default of Timer's interval is an enum, which a config could not hold
yaml.add_multi_representer(Enum, _represent_enum, yaml.SafeDumper)


def command_of(program: str, words: Sequence[str]) -> str:
    """Return the command, the first word of a script's arguments; print the usage for `--help`.

    Raises:
        ConfigError: the first word is no command
        SystemExit: after the usage, with code 0
    """
    first = words[0] if words else ""
    usage = _USAGE.format(program=program)
    if first in ("-h", "--help"):
        print(f"usage: {usage}\n\n{_MORE_HELP}")
        sys.exit(0)
    known = "fit", "validate"
    expected = f"{' or '.join(known)}. Usage: {usage}"
    expect(first in known, "the command", first or "missing", expected)
    return first


class RunParser(Parser, LightningArgumentParser):
    """LightningCLI's parser: `--help` is short, `--help_all` lists all keys."""

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Parse, or print all keys."""
        if "--help_all" in args:
            self._print_message(super().format_help(), sys.stdout)
            self.exit()
        # --print_config ends the parsing, so it comes last.
        words = sorted(args, key=_prints_config)
        return super().parse_args(words, **kwargs)

    def format_help(self) -> str:
        """Return the most used keys of a run, or all options of a class."""
        is_run = any(action.dest == "run_dir" for action in self._actions)
        if not is_run:
            return str(super().format_help())
        text = _HELP.get(self.prog, _SCRIPT_HELP)
        return text.format(prog=self.prog, keys=_KEYS)

    @property
    def model_options(self) -> str:
        """Options that give a model, for an error."""
        if self.prog in _HELP:
            return super().model_options
        return "--config FILE, e.g. --config tiny-unified"


def _prints_config(word: str) -> bool:
    return word.partition("=")[0] == "--print_config"
