"""Messages of the command line: a handler of the logger `lightning_sv`, on device 0 only."""

import logging
import sys
from collections.abc import Iterable
from typing import Any

_PACKAGE = logging.getLogger("lightning_sv")
_PREFIX = {logging.WARNING: "warning: ", logging.ERROR: "error: "}
#: option of every command -> level
LEVELS = {"--quiet": logging.WARNING, "--verbose": logging.DEBUG}


class _Stderr(logging.Handler):
    """Write to the current `sys.stderr`, which a progress bar or a test may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        print(
            f"{_PREFIX.get(record.levelno, '')}{record.getMessage()}", file=sys.stderr, flush=True
        )


def _on_first_device(record: logging.LogRecord) -> bool:
    """Return True on the first of several processes, and for errors on all of them."""
    # do not import Lightning for this
    ranks: Any = sys.modules.get("lightning.fabric.utilities.rank_zero")
    rank = getattr(getattr(ranks, "rank_zero_only", None), "rank", 0)
    return record.levelno >= logging.ERROR or not rank


def level_of(words: Iterable[str]) -> int:
    """Return the level that the first switch of a command line sets, INFO without one."""
    for word in words:
        if word in LEVELS:
            return LEVELS[word]
    return logging.INFO


def without_levels(words: Iterable[str]) -> list[str]:
    """Return the words of a command line without the switches of the level."""
    return [word for word in words if word not in LEVELS]


def start_logging(level: int = logging.INFO) -> None:
    """Show messages of this package of at least `level`."""
    handler = _Stderr()
    handler.addFilter(_on_first_device)
    _PACKAGE.handlers = [handler]
    _PACKAGE.propagate = False
    _PACKAGE.setLevel(level)


def quiet_libraries() -> None:
    """Show warnings of Lightning and litdata, with `--verbose` also INFO; call it after import."""
    for name in ("lightning.pytorch", "lightning.fabric", "litdata"):
        logging.getLogger(name).setLevel(
            logging.INFO if _PACKAGE.level == logging.DEBUG else logging.WARNING
        )
    # profilers report at INFO
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    # On several devices it warns about drop_last, but a run chooses its sequences itself.
    logging.getLogger("litdata.streaming.dataset").setLevel(logging.ERROR)


def is_quiet() -> bool:
    """Return True if `--quiet` is given."""
    return _PACKAGE.level > logging.INFO
