"""As many parts as a corpus needs, encoded until its limit is reached."""

import math

from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Content
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.work import encode_parts


def encode_enough(job: Job, workers: int, *, shown: bool) -> int:
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`.

    Returns:
        their number
    """
    n_encoded = 0
    while n_encoded < len(job.parts):
        n_encoded = _sufficient_parts(job, n_encoded)
        encode_first(job, n_encoded, workers, shown=shown)
        # not of all parts, because another process may have published and removed them
        has_more = n_encoded < len(job.parts)
        if has_more and Selection.of_first(job, n_encoded).is_limited:
            break
    return n_encoded


def _sufficient_parts(job: Job, n_encoded: int) -> int:
    """Return a number of first parts, above `n_encoded`, that should reach the corpus's limit.

    It is one more until a part shows how many tokens its files have.
    """
    config = job.config
    if config.limit is None and config.max_tokens is None:
        return len(job.parts)
    content = Content.of_parts(job.parts[:n_encoded])
    if not content.tokens:
        return n_encoded + 1
    needed_bytes = math.inf
    if config.limit is not None:
        needed_bytes = content.source_bytes_per_byte * config.limit
    if config.max_tokens is not None:
        bytes_for_tokens = content.source_bytes_per_token * config.max_tokens
        needed_bytes = min(needed_bytes, bytes_for_tokens)
    return max(n_encoded + 1, job.first_parts(needed_bytes))


def encode_first(job: Job, count: int, workers: int, *, shown: bool) -> None:
    """Encode the first `count` parts of a job, with a progress bar."""
    parts = job.parts[:count]
    total_bytes = sum(part.n_bytes for part in parts)
    complete_bytes = sum(part.n_bytes for part in parts if part.is_complete())
    with phase("encoding", total_bytes, shown=shown) as advance:
        advance(complete_bytes)
        encode_parts(job, count, workers, advance)
