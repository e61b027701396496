"""An argument parser whose errors are one sentence with the nearest right name."""

import re
from difflib import get_close_matches
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class Parser(LightningArgumentParser):
    """Raises ValueError where argparse would print its usage and exit.

    Misspelled keys, from YAML or the command line, are answered with the nearest right one.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ValueError with the cause in one line."""
        text = re.sub(r"\s+", " ", str(ex or message)).strip().removesuffix(".")
        raise ValueError(f"{text}.{self._hint(text)}") from ex

    def _hint(self, text: str) -> str:
        unknown = re.search(r"[Kk]ey [\"'](?P<key>[\w.]+)[\"']|(?:--)(?P<flag>[\w.]+)", text)
        if not unknown:
            return ""
        key = unknown["key"] or unknown["flag"]
        known = [action.dest for action in self._actions if action.dest not in ("help", "config")]
        if key in known:
            return ""
        near = get_close_matches(key, known, n=1, cutoff=0.7)
        if not near:
            leaves = {name.rpartition(".")[2]: name for name in known}
            near = [leaves[m] for m in get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.7)]
        return f" Did you mean {near[0]!r}?" if near else ""
