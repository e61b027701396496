"""Multithreaded encoding, in order, with a bounded amount of text in memory."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lightning_sv.corpus.sources.document import Document
from lightning_sv.corpus.tokenizer import Tokenizer

# Text per task: large enough to hide the overhead, small enough to balance the load.
_BATCH_BYTES = 1 << 19
_BATCHES_PER_WORKER = 4


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its ids and the end-of-text token, in the given order, read a few batches ahead.

    Uses threads, by default one per core: both libraries release the GIL, and nothing has to be copied or pickled.
    """
    # These threads keep all cores busy, including reading; the library's own threads would compete, and
    # would warn in every process forked later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    eot = np.array([tokenizer.eot], dtype=tokenizer.dtype)
    workers = workers or os.cpu_count() or 1
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(documents):
                texts = [document.text for document in batch]
                pending.append((batch, pool.submit(tokenizer.encode_batch, texts)))
                while len(pending) > _BATCHES_PER_WORKER * workers:
                    yield from _collect(pending, eot)
            while pending:
                yield from _collect(pending, eot)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # on an error or Ctrl-C, leave at once


def _collect(
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]], eot: np.ndarray
) -> Iterator[tuple[Document, np.ndarray]]:
    batch, future = pending.popleft()
    for document, ids in zip(batch, future.result(), strict=True):
        yield document, np.concatenate((ids, eot))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    n_bytes = 0
    for document in documents:
        batch.append(document)
        n_bytes += document.n_bytes
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch
