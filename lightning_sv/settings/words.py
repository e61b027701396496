"""A parser of plain words, for commands that are not LightningCLI's. Without Lightning, so that they start quickly."""

from argparse import ArgumentParser
from typing import Any, NoReturn


class Words(ArgumentParser):
    """argparse whose errors are one sentence, and whose options are written out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError where argparse would print its usage and exit."""
        raise ValueError(f"{self.prog.split()[-1]}: {message}; see {self.prog} --help.")
