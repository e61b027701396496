"""`python -m lightning_sv.ladder PLAN`: train a ladder on one GPU, in parts, with little more than torch."""

import sys
from collections.abc import Sequence

from lightning_sv.ladder.command import run_ladder


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; 0: done or this part is, 1: a run failed, 2: wrong input."""
    try:
        return run_ladder(list(sys.argv[1:] if args is None else args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
