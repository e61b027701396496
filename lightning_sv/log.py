"""Messages of the command line: one handler of the logger `lightning_sv`, on the first device alone."""

import logging
import sys
from typing import Any

_PACKAGE = logging.getLogger("lightning_sv")
_PREFIX = {logging.WARNING: "warning: ", logging.ERROR: "error: "}
#: options of every command -> the level
LEVELS = {"--quiet": logging.WARNING, "--verbose": logging.DEBUG}


class _Stderr(logging.Handler):
    """Write to stderr as it is at the moment: a progress bar or a test may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        print(f"{_PREFIX.get(record.levelno, '')}{record.getMessage()}", file=sys.stderr, flush=True)


def _on_first_device(record: logging.LogRecord) -> bool:
    """Whether a message is this process's to give: of a launch of several the first gives it, and errors all do."""
    ranks: Any = sys.modules.get("lightning.fabric.utilities.rank_zero")  # no command waits for Lightning's import
    rank = getattr(getattr(ranks, "rank_zero_only", None), "rank", 0)
    return record.levelno >= logging.ERROR or not rank


def start_logging(level: int = logging.INFO) -> None:
    """Show messages of this package from `level` on."""
    handler = _Stderr()
    handler.addFilter(_on_first_device)
    _PACKAGE.handlers, _PACKAGE.propagate = [handler], False
    _PACKAGE.setLevel(level)


def quiet_libraries() -> None:
    """Show messages of Lightning and litdata from WARNING on, with `--verbose` from INFO; after their import."""
    for name in ("lightning.pytorch", "lightning.fabric", "litdata"):
        logging.getLogger(name).setLevel(logging.INFO if _PACKAGE.level == logging.DEBUG else logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # a profiler's report is one


def is_quiet() -> bool:
    """Whether the user asked for results alone, without progress."""
    return _PACKAGE.level > logging.INFO
