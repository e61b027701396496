"""As many parts as a corpus needs, encoded until its limit is reached."""

import math

from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.work import encode_parts

#: bytes of text per token before any part is encoded; English with GPT-2's tokens has 4.5
_BYTES_PER_TOKEN = 3.0


def encode_enough(job: Job, workers: int, *, shown: bool) -> int:
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`.

    Returns:
        their number
    """
    n_encoded = 0
    while n_encoded < len(job.parts):
        n_encoded = _sufficient_parts(job, n_encoded)
        _encode(job, n_encoded, workers, shown=shown)
        # not of all parts, because another process may have published and removed them
        has_more = n_encoded < len(job.parts)
        if has_more and Selection.of_first(job, n_encoded).is_limited:
            break
    return n_encoded


def _sufficient_parts(job: Job, n_encoded: int) -> int:
    """Return a number of first parts, above `n_encoded`, that should reach the corpus's limit."""
    config = job.config
    needed_bytes = math.inf
    if config.limit is not None:
        needed_bytes = config.limit
    if config.max_tokens is not None:
        bytes_for_tokens = _bytes_per_token(job.parts[:n_encoded]) * config.max_tokens
        needed_bytes = min(needed_bytes, bytes_for_tokens)
    return max(n_encoded + 1, job.first_parts(needed_bytes))


def _bytes_per_token(encoded: list[Part]) -> float:
    if not encoded:
        return _BYTES_PER_TOKEN
    summaries = [part.summary() for part in encoded]
    n_bytes = sum(summary["bytes"] for summary in summaries)
    n_tokens = sum(summary["tokens"] for summary in summaries)
    return n_bytes / max(1, n_tokens)


def _encode(job: Job, count: int, workers: int, *, shown: bool) -> None:
    parts = job.parts[:count]
    total_bytes = sum(part.n_bytes for part in parts)
    complete_bytes = sum(part.n_bytes for part in parts if part.is_complete())
    with phase("encoding", total_bytes, shown=shown) as advance:
        advance(complete_bytes)
        encode_parts(job, count, workers, advance)
