"""Settings of one corpus preparation."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_sv.errors import expect

_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}

# 75 MB of the 160 MB of 'stdlib': about 30 M training tokens of a 1,024 BPE.
_STDLIB_BYTES = 75_000_000
#: sources whose text is Python
PYTHON_SOURCES = ("stdlib", "installed")
#: name of a corpus's own layer of a run's config
LAYER = "corpus.yaml"
#: Vocabularies are padded to a multiple of this, as GPT-2's 50,257 to 50,304, because odd matrix
#: widths are slow.
PADDED_TO = 64


@dataclass(frozen=True)
class CorpusConfig:
    """Text, tokenizer and split of one prepared corpus.

    Args:
        dir: folder of the prepared corpus, written by `prepare` and read by training; for training
            also its address in an object store, such as s3://bucket/corpus, which is downloaded
            once per node
        source: source of the text: 'stdlib' (Python sources of the standard library and of 14
            locked packages), 'installed' (of the standard library and all installed packages except
            this one), 'files:PATH[,PATH...]' (files or folders of .txt .md .py .jsonl .ndjson
            .parquet; all but .parquet also as .gz .zst .bz2 .xz), or 'hf:NAME' (.parquet files
            of the Hugging Face hub)
        tokenizer: 'bpe:N' (a byte-level BPE of N tokens trained on the corpus), 'gpt2' (50,257
            tokens, downloaded from the Hugging Face hub), or a path to a tokenizer.json or to the
            folder of one
        eot: name of the end-of-text token of a tokenizer.json; null for eos_token of the
            tokenizer_config.json next to it, or else a common name
        val_fraction: fraction of the documents held out, selected by a hash of their text,
            independent of their order; for few documents, the end of each (see `sources.split`)
        max_bytes: maximum number of UTF-8 bytes of text; null for all (for 'stdlib': 75 MB)
        max_tokens: maximum number of tokens of both splits; null for all
        text_field: name of the text column in .jsonl, .parquet and Hugging Face data
        hf_subset: configuration name of the Hugging Face dataset
        hf_split: split of the Hugging Face dataset
        licence: licence of the text, stored in the manifest; 'stdlib' and 'installed' set their own
        chunk_bytes: size of a shard: bytes, or a number with KB, MB or GB (powers of 1,024)
    """

    dir: str = "data/stdlib"
    source: str = "stdlib"
    tokenizer: str = "bpe:1024"
    eot: str | None = None
    val_fraction: float = 0.01
    max_bytes: int | None = None
    max_tokens: int | None = None
    text_field: str = "text"
    hf_subset: str | None = None
    hf_split: str = "train"
    licence: str | None = None
    chunk_bytes: str = "64MB"

    def __post_init__(self) -> None:
        names_text = self.kind in ("files", "hf") and bool(self.location.strip())
        expected = "'stdlib', 'installed', 'files:PATH[,PATH...]' or 'hf:NAME'."
        expect(names_text or self.source in PYTHON_SOURCES, "source", repr(self.source), expected)
        reason = "because training and validation need documents"
        expected = f"a number between 0 and 1, both excluded, {reason}."
        expect(0.0 < self.val_fraction < 1.0, "val_fraction", self.val_fraction, expected)
        for key in ("max_bytes", "max_tokens"):
            limit = getattr(self, key)
            expect(limit is None or limit >= 1, key, limit, "at least 1, or null.")
        _ = self.chunk_size  # check the value early

    @property
    def kind(self) -> str:
        """Kind of `source`: its first word."""
        return self.source.partition(":")[0]

    @property
    def location(self) -> str:
        """Part of `source` after its kind: paths, or the name of a dataset."""
        return self.source.partition(":")[2]

    @property
    def limit(self) -> float:
        """`max_bytes`, or the default of the source; infinite for all text."""
        if self.max_bytes is not None:
            return self.max_bytes
        if self.source == "stdlib":
            return _STDLIB_BYTES
        return math.inf

    @property
    def chunk_size(self) -> int:
        """`chunk_bytes` as an integer."""
        # offsets inside a shard are 32-bit in litdata's format
        return byte_size("chunk_bytes", self.chunk_bytes)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content; corpora with equal settings are equal."""
        settings = asdict(self) | {"chunk_bytes": self.chunk_size}
        del settings["dir"]
        return settings

    def changed(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that differ from stored ones."""
        settings = self.settings()
        return {key: now for key, now in settings.items() if stored.get(key) != now}


def byte_size(key: str, text: str) -> int:
    """Return a size of at most 2 GB as a number.

    The text is a number of bytes, or a number with KB, MB or GB (powers of 1,024).
    """
    size = 0
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]B)?\s*", str(text), re.IGNORECASE)
    if match:
        unit = (match[2] or "").upper()
        size = int(match[1]) * _UNITS[unit]
    expect(0 < size <= 2 << 30, key, repr(text), "a size from 1 byte to 2 GB, for example '64MB'.")
    return size
