"""Fraction of the text that a tokenizer drops, measured by decoding its output."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_sv.corpus.sources.document import Document
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.errors import ConfigError

#: maximum fraction of the text that a tokenizer may drop
MOST_LOST = 0.05
_SAMPLE = 1_000_000


def lost_share(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> float:
    """Return the fraction of a text's bytes that decoding does not restore.

    White space, case and compatibility forms do not count, because many tokenizers normalize them.
    """
    decoded = tokenizer.decode([i for i in ids if i != tokenizer.unknown])
    if decoded == text:
        return 0.0
    before, after = _characters(text), _characters(decoded)
    return _n_bytes(before - after) / max(1, _n_bytes(before))


def check_sample(tokenizer: Tokenizer, documents: Iterable[Document], where: str) -> None:
    """Check on the first million characters that a tokenizer, named `where` in errors, preserves the text."""
    read, lost = 0, 0.0
    for document in documents:
        text = document.text[: _SAMPLE - read]
        lost += len(text) * lost_share(tokenizer, text, tokenizer.encode(text))
        read += len(text)
        if read >= _SAMPLE:
            break
    check_share(lost / read, where)


def check_share(lost: float, where: str) -> None:
    """Check that a tokenizer drops at most `MOST_LOST` of the text."""
    if lost > MOST_LOST:
        raise ConfigError(
            f"tokenizer={where} drops {lost:.0%} of this text; expected at most {MOST_LOST:.0%}. Use one that "
            "knows its characters, for example bpe:4096."
        )


def _characters(text: str) -> Counter[str]:
    return Counter("".join(unicodedata.normalize("NFKD", text).casefold().split()))


def _n_bytes(characters: Counter[str]) -> int:
    return sum(len(character.encode()) * number for character, number in characters.items())
