"""A corpus that exists, compared with the settings, tokenizer and text of a preparation."""

import json
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import FILENAME, Manifest
from lightning_sv.corpus.sources.files import changed_file
from lightning_sv.corpus.tokenizer import open_tokenizer, tokenizer_file
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import ConfigError


def existing_corpus(config: CorpusConfig, target: Path) -> Manifest | None:
    """Return the corpus in `target`; None if there is none.

    Raises:
        ConfigError: the folder has other content, or a corpus of other settings, tokenizer or text
    """
    if not target.exists():
        return None
    is_empty = not any(target.iterdir())
    if is_empty:
        return None
    if not (target / FILENAME).is_file():
        found = f"{config.dir}, which contains no prepared corpus"
        expected = "a new folder. Choose a different one, or delete it."
        raise ConfigError(f"dir is {found}; expected {expected}")

    manifest = Manifest.load(target)
    _check_settings(config, manifest)
    check_corpus(manifest, target, checksums=False)
    _check_files(config, manifest)
    return manifest


def _check_settings(config: CorpusConfig, manifest: Manifest) -> None:
    settings = []
    for key, now in config.changed(manifest.settings).items():
        then = json.dumps(manifest.settings.get(key))
        settings.append(f"{key}={then}, expected {json.dumps(now)}")
    if settings:
        raise _different(config, f"with other settings ({'; '.join(settings)})")


def _check_files(config: CorpusConfig, manifest: Manifest) -> None:
    """Check the file of the config's tokenizer, if it has one, its end token, and the text."""
    file = tokenizer_file(config.tokenizer)
    if file is not None and file.is_file():
        tokenizer = open_tokenizer(config.tokenizer, config.eot)
        if (tokenizer.sha256, tokenizer.eot) != (manifest.tokenizer_sha256, manifest.eot):
            found = f"whose tokenizer {file}, or its end-of-text token, has changed since"
            raise _different(config, found)
    changed = changed_file(manifest)
    if changed is not None:
        raise _different(config, f"whose text has changed since ({changed})")


def _different(config: CorpusConfig, found: str) -> ConfigError:
    again = "delete it to prepare it again, or choose a different dir."
    return ConfigError(f"dir={config.dir} has a corpus {found}; {again}")
