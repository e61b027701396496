"""A fit whose rank FAILS raises in its second step, while the other sleeps as in a collective of
NCCL.

Under NCCL a process group is left together: `destroy_process_group` waits for the others, here for
ever.
"""

import os
import time
from typing import Any

from torch import distributed

from lightning_sv.__main__ import cli
from lightning_sv.lit.module import PretrainModule


def sleep_or_fail(self: PretrainModule, batch: Any, batch_idx: int) -> None:
    if self.global_step == 1:
        print(f"rank {self.global_rank} is process {os.getpid()}.", flush=True)
        distributed.barrier()
        if self.global_rank == int(os.environ["FAILS"]):
            raise RuntimeError("a rank fails")
        time.sleep(600)


if __name__ == "__main__":
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        distributed.destroy_process_group = lambda *args: time.sleep(600)
        PretrainModule.on_train_batch_start = sleep_or_fail
    cli()
