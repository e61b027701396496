"""Size of a corpus before it is encoded, and how much of it a run needs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from rich.filesize import decimal

from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Content

#: text that is encoded for an estimate of the time
SAMPLE_BYTES = 4_000_000
#: share of tokens above those that a run needs, because hashes select the validation documents
_MARGIN = 0.01


def sufficient_tokens(sequences: int, seq_len: int, val_fraction: float) -> int:
    """Return a `max_tokens` with which a run reads no sequence twice.

    It is sequences x (seq_len + 1) / (1 - val_fraction) and 1%, rounded up to three digits.

    Args:
        sequences: training sequences that the run reads
        seq_len: predicted tokens per sequence
        val_fraction: fraction of the documents held out
    """
    exact = sequences * (seq_len + 1) / (1 - val_fraction) * (1 + _MARGIN)
    unit = 10 ** max(0, len(str(int(exact))) - 3)
    return -(-int(exact) // unit) * unit


@dataclass(frozen=True)
class Estimate:
    """Estimated preparation of all text of a source.

    Attributes:
        tokens: tokens of both splits, duplicates between parts included
        source_bytes_per_token: bytes of the slices per token
        itemsize: bytes per token on the disk
        hours: hours until all parts are encoded
    """

    tokens: int
    source_bytes_per_token: float
    itemsize: int
    hours: float

    @classmethod
    def of_job(cls, job: Job, workers: int) -> "Estimate":
        """Extrapolate the first part, which is complete, to all text of a source."""
        first = Content.of_parts(job.parts[:1])
        total_bytes: float = sum(part.n_bytes for part in job.parts)
        if job.config.limit is not None:
            total_bytes = min(total_bytes, first.source_bytes_per_byte * job.config.limit)
        tokens = round(total_bytes / first.source_bytes_per_token)
        hours = tokens * _seconds_per_token(job) / workers / 3600
        return cls(tokens, first.source_bytes_per_token, job.tokenizer.dtype.itemsize, hours)

    def describe(self, tokens: int) -> str:
        """Return disk and time of a corpus of `tokens` tokens in a phrase."""
        n_bytes = tokens * self.itemsize
        parts_and_shards = 2 * n_bytes
        time = duration(self.hours * tokens / self.tokens)
        return f"{decimal(parts_and_shards)} of disk, {decimal(n_bytes)} at its end, {time}"


def duration(hours: float) -> str:
    """Return a duration in its usual unit.

    >>> duration(0.001), duration(0.5), duration(30), duration(240)
    ('1 minute', '30 minutes', '30.0 hours', '10.0 days')
    """
    if hours >= 100:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = math.ceil(hours * 60)
    return "1 minute" if minutes <= 1 else f"{minutes} minutes"


def _seconds_per_token(job: Job) -> float:
    """Return the time in which the first documents are encoded."""
    began = monotonic()
    encoded = job.tokenizer.encode_batch(list(_first_texts(job)))
    seconds = monotonic() - began
    return seconds / sum(len(ids) + 1 for ids in encoded)


def _first_texts(job: Job) -> Iterator[str]:
    n_bytes = 0
    for document in job.source.read():
        yield document.text
        n_bytes += document.n_bytes
        if n_bytes >= SAMPLE_BYTES:
            return


def describe_need(job: Job, needed: int, workers: int) -> Iterator[str]:
    """Yield sentences about a source, and about the part of it that a run needs.

    There are none if the first part has no text.

    Args:
        job: the preparation, with its first part complete
        needed: `max_tokens` that suffices for the run
        workers: processes that encode
    """
    if not Content.of_parts(job.parts[:1]).tokens:
        return
    estimate = Estimate.of_job(job, workers)
    total = estimate.tokens
    yield f"{job.config.source}: about {total:,} tokens; {estimate.describe(total)}"
    if needed > total:
        yield f"the run reads it {needed / total:.1f} times: {needed:,} tokens"
        return
    count = job.first_parts(estimate.source_bytes_per_token * needed)
    parts = f"{count:,} of {len(job.parts):,} parts"
    yield f"the run needs {needed:,} tokens, {parts}; {estimate.describe(needed)}"
    limit = job.config.max_tokens
    if limit is None or limit > needed:
        yield f"--data.corpus.max_tokens {needed} prepares only these; parts that exist are kept"
    elif limit < needed:
        yield f"max_tokens is {limit:,}, which the run reads {needed / limit:.1f} times"
