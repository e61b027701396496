"""Requested training runs: command, directory and state.

The name of the directory has a hash of the resolved config, so that a different spelling of the
same settings is the same run. ``command.json`` records everything else that determines the result.
A second call therefore trains only missing runs, from their last checkpoints.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning_sv.atomic import file_sha256, partial_of, read_json, regular, write_atomically
from lightning_sv.errors import ConfigError
from lightning_sv.runs.difference import check_same
from lightning_sv.runs.directory import COMMAND, LOCK, LOG, PROGRESS, is_complete
from lightning_sv.runs.trust import modules_of_words

#: default program of a run
LAUNCHER = (sys.executable, "-m", "lightning_sv", "fit")


def program() -> str:
    """Return the command for `lightning-sv` in messages.

    It is the path of the program if the shell would not find its name, as under make.
    """
    started = Path(sys.argv[0])
    is_hidden = started.name == "lightning-sv" and shutil.which(started.name) is None
    return str(started) if is_hidden else "lightning-sv"


@dataclass(frozen=True)
class Job:
    """A requested training run.

    Attributes:
        arguments: arguments of the launcher except the run directory
        run_dir: directory of the run; its name identifies the config
        context: corpus and versions, which also determine the result; runs with a different context
            are rejected
        configs: config file -> hash of its content when the run was planned
    """

    title: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    run_dir: Path
    context: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Identifier of the run."""
        return self.run_dir.name

    @property
    def command(self) -> list[str]:
        """Full command line, which resumes from a checkpoint if there is one."""
        return [*self.launcher, *self.arguments, *self.here]

    @property
    def here(self) -> list[str]:
        """Arguments that depend on the directory."""
        return ["--run_dir", str(self.run_dir), "--ckpt_path", "last"]

    @property
    def log(self) -> Path:
        """File of stdout and stderr of the run."""
        return self.run_dir / LOG

    @property
    def progress(self) -> Path:
        """File of the steps of the run, see `runs.progress`."""
        return self.run_dir / PROGRESS

    def record(self) -> dict[str, Any]:
        """Return the command without its directory, and what else determines the result.

        These are the hashes of the modules that it names, and the context.
        """
        files = {}
        for name in sorted(modules_of_words(self.arguments)):
            source = _source(name)
            if source is not None:
                files[name] = file_sha256(source)
        return {
            "command": [*map(_without_path, self.launcher), *self.arguments],
            "files": files,
            "context": dict(self.context),
        }

    def prepare(self) -> None:
        """Write the record of this command into the directory.

        Raises:
            ConfigError: the directory has other content, or a config file is not that of the plan
        """
        self._check_configs()
        self.state()
        regular(self.log)
        write_atomically(self.run_dir / COMMAND, json.dumps(self.record(), indent=2) + "\n")

    def state(self) -> Literal["new", "resume", "complete"]:
        """Return the state of the directory; 'resume' is an unfinished run of this command.

        Raises:
            ConfigError: the directory has other content
        """
        if self._is_unused():
            return "new"
        self._check_record()
        return "complete" if is_complete(self.run_dir) else "resume"

    def _check_configs(self) -> None:
        """Check the config files: the directory is named by the settings that the plan read."""
        for path, planned in self.configs.items():
            file = Path(path)
            if not file.is_file() or file_sha256(file) != planned:
                expected = "its content when the run was planned. Give the command again."
                raise ConfigError(f"{path} is edited or removed; expected {expected}")

    def _check_record(self) -> None:
        """Check that the directory has a record with the files and the context of this run."""
        path = self.run_dir / COMMAND
        hint = f"Remove {self.run_dir}, or choose a different output directory."
        if not path.is_file():
            raise ConfigError(f"{self.run_dir} is not empty and has no {COMMAND}. {hint}")
        saved = read_json(path, f"remove {self.run_dir}.")
        current = self.record()
        for part in ("context", "files"):
            check_same(part, saved.get(part) or {}, current[part], str(path), hint)

    def _is_unused(self) -> bool:
        """Return True for a directory that is absent, or that a kill left before the record."""
        if not self.run_dir.exists():
            return True
        left_by_kill = {LOCK, partial_of(self.run_dir / COMMAND).name}
        return {file.name for file in self.run_dir.iterdir()} <= left_by_kill


def _without_path(part: str) -> str:
    """Return "python" for the interpreter, whose path does not affect the result."""
    return "python" if part == sys.executable else part


def _source(module: str) -> Path | None:
    """Return the file of a module, or None."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    if found is None or not found.has_location:
        return None
    return Path(str(found.origin))
