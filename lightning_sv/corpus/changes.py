"""Changes of the text that a corpus was prepared from."""

from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.sources.state import differences, file_states
from lightning_sv.corpus.sources.table import source_state

#: phrases in one sentence
_NAMED = 3


def changed_text(manifest: Manifest, *, ask_hub: bool = False) -> list[str]:
    """Return a phrase per file, package or dataset that differs from what was prepared.

    Nothing differs if an earlier version prepared the corpus, or if none of its text exists here any more.

    Args:
        manifest: of the prepared corpus
        ask_hub: if True, ask the Hugging Face hub for a dataset's revision
    """
    if manifest.sources is None:
        return []
    try:
        now = source_state(CorpusConfig(**manifest.settings), ask_hub=ask_hub)
    except (TypeError, ValueError, OSError):  # some of it is gone, or the hub does not answer
        now = file_states(path for path in map(Path, manifest.sources) if path.is_file())
    return differences(manifest.sources, now) if now else []


def listed(phrases: list[str]) -> str:
    """Return the first phrases as one, with the number of the others."""
    more = f", and {len(phrases) - _NAMED:,} more" if len(phrases) > _NAMED else ""
    return ", ".join(phrases[:_NAMED]) + more
