"""Writer of sharded checkpoints that records a checksum per file."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_sv.atomic import file_sha256, sync
from lightning_sv.runs.sharded_checkpoint import CHECKSUMS, INDEX, META


@dataclass(frozen=True)
class ChecksummedResult(WriteResult):
    """DCP's description of a written tensor, with the sha256 of its file."""

    sha256: str


class ChecksummedWriter(FileSystemWriter):
    """Write a sharded checkpoint, and after every rank has finished, its checksums.

    Each rank hashes its own file right after writing it, while it is in the page cache.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this rank; the results go to the first rank."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        digests = {name: file_sha256(Path(self.path) / name) for name in names}
        checked = Future[list[WriteResult]]()
        checked.set_result([_with_checksum(result, digests) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the checksums, on the first rank."""
        super().finish(metadata, results)
        folder = Path(self.path)
        digests = {name: file_sha256(folder / name) for name in (META, INDEX)}
        for of_rank in results:
            for result in of_rank:
                assert isinstance(result, ChecksummedResult)
                digests[result.storage_data.relative_path] = result.sha256
        with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
            json.dump(digests, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)


def _with_checksum(result: WriteResult, digests: dict[str, str]) -> ChecksummedResult:
    digest = digests[result.storage_data.relative_path]
    return ChecksummedResult(result.index, result.size_in_bytes, result.storage_data, digest)
