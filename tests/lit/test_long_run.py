"""A long run holds no more memory, files or disk at its end than after the first few steps."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.conftest import argv

EVERY = 25


class Watch(L.Callback):
    """Prints the process's resident bytes and open files, and the checkpoints' bytes, now and
    then."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step % EVERY == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
            files = min(self._open_files() for _ in range(10))  # a thread may hold one for a moment
            disk = sum(
                file.stat().st_size for file in Path(trainer.log_dir, "checkpoints").glob("*")
            )
            print("watch", trainer.global_step, resident, files, disk, flush=True)

    @staticmethod
    def _open_files() -> int:
        time.sleep(0.005)
        return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "steps",
    [pytest.param(300, marks=pytest.mark.long), pytest.param(2000, marks=pytest.mark.faults)],
)
def test_fit_long_run_memory_files_and_disk_do_not_grow(
    steps: int, run_args: list[str], tmp_path: Path
) -> None:
    words = argv(
        f"--trainer.max_steps {steps} --trainer.callbacks {__name__}.Watch"
        " --checkpoint.every_n_steps 50 --data.validations 20 --data.num_workers 0"
        f" --run_dir {tmp_path / 'run'}"
    )
    command = [sys.executable, "-m", "lightning_sv", "fit", *run_args, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [
        [int(word) for word in line.split()[1:]]
        for line in done.stdout.splitlines()
        if line.startswith("watch")
    ]
    assert [row[0] for row in rows] == list(range(EVERY, steps + 1, EVERY))
    # after some epochs, validations and checkpoints
    warm = [row for row in rows if row[0] >= steps // 3]
    assert warm[-1][1] < 1.02 * warm[0][1], "memory"
    assert {row[2] for row in warm} == {warm[0][2]}, "open files"
    assert max(row[3] for row in warm) <= 1.01 * warm[0][3], "disk"
    assert [file.name for file in (tmp_path / "run/checkpoints").iterdir()] == ["last.ckpt"]
