"""`python -m tests.faults.slow_writes fit ...`: the command, whose second checkpoint is never
written to its end.

The disk is slow, and nothing else: bytes reach the file a few at a time, as they do anyway.
"""

import os
import time
from typing import Any

import torch

from lightning_sv.__main__ import cli

#: bytes of the second checkpoint that are written fast
FAST = int(os.environ.get("SLOW_AFTER", "0"))
#: who kills this process; without it nothing is left to wait for
TEST = os.getppid()


class SlowWriter:
    made = 0

    def __init__(self, file: Any):
        self.file = file
        self.flush = file.flush
        SlowWriter.made += 1
        self.written = 0

    def write(self, data: Any) -> int:
        n = self.file.write(data)
        self.written += n
        if SlowWriter.made > 1 and self.written > FAST:
            self.file.flush()
            while os.getppid() == TEST:
                time.sleep(1)
            os._exit(1)
        return n


if __name__ == "__main__":
    save = torch.save
    torch.save = lambda checkpoint, file: save(checkpoint, SlowWriter(file))
    cli()
