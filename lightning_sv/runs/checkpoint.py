"""Checkpoints, read safely: nothing that they name is executed."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from lightning_sv.atomic import check_readable, reading
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, UnreadableError
from lightning_sv.nn import Backbone, BackboneConfig, meta_backbone
from lightning_sv.own_code import modules_named
from lightning_sv.runs.directory import LAST, run_of
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded, unusable
from lightning_sv.runs.trust import check_trusted
from lightning_sv.scale import ScaleOptions, ScaleStrategy

#: key of a checkpoint for the description of the backbone by `PretrainModule`
CHECKPOINT_KEY = "lightning_sv"
#: key of a checkpoint for the states of the random number generators
RNG_KEY = "rng_states"
#: name of the backbone in `PretrainModule`
_PREFIX = "backbone."
#: version of the format, increased with every incompatible change
FORMAT = 2
#: errors of building a model from values that no model has
_NO_MODEL = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError)


def check_checkpoint(path: str, *, checksums: bool = True, tensors: bool = False) -> dict[str, Any]:
    """Read a checkpoint on the CPU, without executing anything that it names.

    Args:
        path: a file, or the folder of a sharded checkpoint
        checksums: if True, check the checksums of all content, which takes seconds per gigabyte;
            torch does not
        tensors: if True, read the tensors of a folder; those of a file are always mapped

    Raises:
        ConfigError: the file is missing or damaged, has a different format, or was not written by
            `PretrainModule`
    """
    checkpoint: Any
    if is_sharded(path):
        checkpoint = read_sharded(path, tensors=tensors, checksums=checksums)
    else:
        checkpoint = _read_file(path, checksums=checksums)
    if not isinstance(checkpoint, dict):
        checkpoint = {}
    _check_entries(path, checkpoint)
    return checkpoint


def _read_file(path: str, *, checksums: bool) -> Any:
    """Return the content of a checkpoint of one file, with mapped tensors."""
    if not Path(path).is_file():
        found = "is not a file" if Path(path).exists() else "does not exist"
        expected = f"a file such as RUN/{LAST}."
        raise ConfigError(f"the checkpoint is {path}, which {found}; expected {expected}")
    check_readable(Path(path))
    if checksums:
        check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(
            unusable(path, f"is not a readable checkpoint ({type(error).__name__})")
        ) from error


def _check_entries(path: str, entries: Mapping[str, Any]) -> None:
    """Check that a checkpoint has weights and a description of this format."""
    for key in (CHECKPOINT_KEY, "state_dict"):
        if not isinstance(entries.get(key), dict):
            expected = "a checkpoint of lightning_sv."
            raise ConfigError(f"{path} has no valid {key!r} entry; expected {expected}")
    description = entries[CHECKPOINT_KEY]
    try:
        json.dumps(description)  # plain values; a tensor could pass for a setting
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(unusable(path, f"does not describe its model ({error})")) from error

    written = description.get("format")
    if type(written) is not int or written != FORMAT:
        hint = "Use the version of lightning_sv that wrote it."
        raise ConfigError(f"{path} is of format {written!r:.80}; expected {FORMAT}. {hint}")


def check_archive(path: str | Path) -> None:
    """Check that every entry of a file written by `torch.save` matches its checksum."""
    try:
        with reading(path), ZipFile(path) as archive:
            compressions = {entry.compress_type for entry in archive.infolist()}
            if compressions - {ZIP_STORED}:
                raise ConfigError("it is compressed")
            altered = archive.testzip()
            if altered:
                raise ConfigError(f"{altered!r} was altered")
    except UnreadableError:
        raise
    except Exception as error:  # zipfile raises various errors
        raise ConfigError(unusable(path, f"is not a readable checkpoint ({error})")) from error


class LoadedCheckpoint(NamedTuple):
    """Description and content of a checkpoint.

    Attributes:
        weights: name in the backbone -> weight of the described shape
    """

    config: BackboneConfig
    strategy: ScaleStrategy
    options: ScaleOptions
    weights: dict[str, Tensor]
    checkpoint: dict[str, Any]


def load_backbone(path: str | Path, allow: Collection[str] = ()) -> Backbone:
    """Rebuild the backbone of a checkpoint, on the CPU, without its optimizer.

    Args:
        path: run directory, or file of a checkpoint
        allow: modules that the checkpoint's strategy may import, such as `my_module` for
            'my_module:MyScale'

    Raises:
        ConfigError: as `read_model`
    """
    return _built(read_model(path, allow))


def _built(loaded: LoadedCheckpoint) -> Backbone:
    model = Backbone(loaded.config, loaded.strategy, loaded.options)
    model.load_state_dict(loaded.weights)
    return model


def load_trained(path: Path, allow: Collection[str] = ()) -> tuple[Backbone, Tokenizer]:
    """Rebuild the backbone of a run on the CPU, and read its tokenizer.

    For the arguments see `load_backbone`.

    Raises:
        ConfigError: as `read_model`; or tokenizer and checkpoint belong to different runs
    """
    run_dir = run_of(path) or path
    loaded = read_model(path, allow)
    model = _built(loaded)
    tokenizer = Tokenizer.load(run_dir)
    sha256 = loaded.checkpoint[CHECKPOINT_KEY].get("tokenizer_sha256")
    if sha256 not in (None, tokenizer.sha256):
        found = f"{run_dir}: tokenizer_sha256 is {tokenizer.sha256}"
        expected = f"{sha256}, as in its checkpoint. They belong to different runs."
        raise ConfigError(f"{found}; expected {expected}")
    size = tokenizer.vocab_size
    most = model.config.vocab_size
    if size > most:
        found = f"{run_dir}: the tokenizer's size is {size}"
        raise ConfigError(f"{found}; expected at most {most}. They belong to different runs.")
    return model, tokenizer


def read_model(path: str | Path, allow: Collection[str] = ()) -> LoadedCheckpoint:
    """Read the description and the weights of a checkpoint; for the arguments see `load_backbone`.

    Raises:
        ConfigError: as `check_checkpoint`; the strategy names a module that is not allowed; or the
            weights do not fit the described model
    """
    file = str(path)
    is_run = Path(path).is_dir() and not is_sharded(path)
    if is_run:
        file = str(Path(path) / LAST)
    checkpoint = check_checkpoint(file, tensors=True)
    saved = checkpoint[CHECKPOINT_KEY]
    named = modules_named(f"{saved.get('scale')} {saved.get('scale_options')}")
    check_trusted(file, named, allow)
    own_class = saved.get("built_by")
    if own_class is not None:
        hint = f"Use {own_class}.load_from_checkpoint."
        expected = f"one of PretrainModule. {hint}"
        raise ConfigError(f"{file}: the model is that of {own_class}; expected {expected}")

    try:
        config = BackboneConfig(**saved["backbone"])
        strategy = ScaleStrategy.parse(saved["scale"])
        options = ScaleOptions(**saved["scale_options"])
        weights = _weights(checkpoint["state_dict"])
        meta_backbone(config, strategy, options).load_state_dict(weights, assign=True)
    except _NO_MODEL as error:
        reason = " ".join(str(error).split())
        found = f"does not describe its weights ({reason:.300})"
        raise ConfigError(unusable(file, found)) from error
    return LoadedCheckpoint(config, strategy, options, weights, checkpoint)


def _weights(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the weights by their names in the backbone."""
    weights = {}
    for name, value in state.items():
        if str(name).startswith(_PREFIX):
            weights[name.removeprefix(_PREFIX)] = value
    return weights
