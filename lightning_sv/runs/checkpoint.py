"""Checkpoints, read safely: nothing that they name is executed."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from lightning_sv.atomic import reading
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, UnreadableError, expect
from lightning_sv.nn import Backbone, BackboneConfig, meta_backbone
from lightning_sv.own_code import modules_named
from lightning_sv.runs.directory import LAST, config_value, read_config, read_summary, run_of
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded
from lightning_sv.runs.trust import check_trusted
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.scale.strategy import own_words

#: key of a checkpoint for the description of the backbone by `PretrainModule`
CHECKPOINT_KEY = "lightning_sv"
#: key of a checkpoint for the states of the random number generators
RNG_KEY = "rng_states"
#: name of the backbone in `PretrainModule`
_PREFIX = "backbone."
#: version of the format, increased with every incompatible change
FORMAT = 2


def check_checkpoint(path: str, *, checksums: bool = True, tensors: bool = False) -> dict[str, Any]:
    """Read a checkpoint on the CPU, without executing anything that it names.

    Args:
        path: a file, or the folder of a sharded checkpoint
        checksums: if True, check the checksums of all content, which takes seconds per gigabyte; torch does not
        tensors: if True, read the tensors of a folder; those of a file are always mapped

    Raises:
        ConfigError: the file is missing or damaged, has a different format, or was not written by `PretrainModule`
    """
    if is_sharded(path):
        checkpoint: Any = read_sharded(path, tensors=tensors, checksums=checksums)
    elif not Path(path).is_file():
        found = "is not a file" if Path(path).exists() else "does not exist"
        raise ConfigError(f"the checkpoint is {path}, which {found}; expected a file such as RUN/{LAST}.")
    else:
        with reading(path), Path(path).open("rb") as file:
            file.read(1)  # torch reports a file that it cannot open as damaged
        if checksums:
            check_archive(path)
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            why = f"{path} is not a readable checkpoint ({type(error).__name__}); use a different one."
            raise ConfigError(why) from error
    entries: dict[str, Any] = checkpoint if isinstance(checkpoint, dict) else {}
    for key in (CHECKPOINT_KEY, "state_dict"):
        if not isinstance(entries.get(key), dict):
            raise ConfigError(f"{path} has no valid {key!r} entry; expected a checkpoint of lightning_sv.")
    try:
        json.dumps(entries[CHECKPOINT_KEY])  # plain values; a tensor could pass for a setting
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} does not describe its model ({error}); use a different checkpoint.") from error
    written = entries[CHECKPOINT_KEY].get("format")
    current = type(written) is int and written == FORMAT
    expect(current, path, f"of format {written!r:.80}", f"{FORMAT}. Use the version of lightning_sv that wrote it.")
    return entries


def check_archive(path: str | Path) -> None:
    """Check that every entry of a file written by `torch.save` matches its checksum."""
    try:
        with reading(path), ZipFile(path) as archive:
            if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
                raise ConfigError("it is compressed")
            if altered := archive.testzip():
                raise ConfigError(f"{altered!r} was altered")
    except UnreadableError:
        raise
    except Exception as error:  # zipfile raises various errors
        raise ConfigError(f"{path} is not a readable checkpoint ({error}); use a different one.") from error


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
        allow: modules that the checkpoint's strategy may import, such as `my_module` for 'my_module:MyScale'

    Raises:
        ConfigError: as `read_model`
    """
    return _built(read_model(path, allow))


def _built(loaded: LoadedCheckpoint) -> Backbone:
    model = Backbone(loaded.config, loaded.strategy, loaded.options)
    model.load_state_dict(loaded.weights)
    return model


def load_trained(path: Path, allow: Collection[str] = ()) -> tuple[Backbone, Tokenizer]:
    """Rebuild the backbone of a run on the CPU and read its tokenizer; for the arguments see `load_backbone`.

    Raises:
        ConfigError: as `read_model`; or tokenizer and checkpoint belong to different runs
    """
    run_dir = run_of(path) or path
    loaded = read_model(path, allow)
    model, tokenizer = _built(loaded), Tokenizer.load(run_dir)
    _check_run(loaded, tokenizer, run_dir)
    size, most = tokenizer.vocab_size, model.config.vocab_size
    expect(size <= most, f"{run_dir}: the tokenizer's size", size, f"at most {most}. They belong to different runs.")
    return model, tokenizer


def _check_run(loaded: LoadedCheckpoint, tokenizer: Tokenizer, run_dir: Path) -> None:
    """Check that tokenizer, text and config of a run directory belong to its checkpoint."""
    saved, config = loaded.checkpoint[CHECKPOINT_KEY], read_config(run_dir)
    scale = config_value(config, "model.scale")
    for key, then, now in (
        ("tokenizer_sha256", saved.get("tokenizer_sha256"), tokenizer.sha256),
        ("corpus_hash", saved.get("corpus_hash"), read_summary(run_dir).get("corpus_hash")),
        ("data.seq_len", config_value(saved, "data.seq_len"), config_value(config, "data.seq_len")),
        ("model.scale", own_words(saved["scale"]), own_words(scale) if isinstance(scale, str) else None),
    ):
        then, now = ("+".join(sorted(x)) if isinstance(x, frozenset) else x for x in (then, now))
        wanted = f"{then!r}, as in its checkpoint. They belong to different runs."
        expect(None in (then, now) or then == now, f"{run_dir}: {key}", repr(now), wanted)


def read_model(path: str | Path, allow: Collection[str] = ()) -> LoadedCheckpoint:
    """Read the description and the weights of a checkpoint; for the arguments see `load_backbone`.

    Raises:
        ConfigError: as `check_checkpoint`; the strategy names a module that is not allowed; or the weights do not fit
            the described model
    """
    path = str(Path(path) / LAST if Path(path).is_dir() and not is_sharded(path) else path)
    checkpoint = check_checkpoint(path, tensors=True)
    saved, weights = checkpoint[CHECKPOINT_KEY], _weights(checkpoint["state_dict"], path)
    check_trusted(path, modules_named(f"{saved.get('scale')} {saved.get('scale_options')}"), allow)
    own = saved.get("built_by")
    wanted = f"one of PretrainModule. Use {own}.load_from_checkpoint."
    expect(own is None, f"{path}: the model", f"that of {own}", wanted)
    try:
        config = BackboneConfig(**saved["backbone"])
        # Every block has weights; building far more blocks would take hours.
        if config.n_layer > len(weights):
            raise ConfigError(f"{config.n_layer} blocks, {len(weights)} weights")
        description = config, ScaleStrategy.parse(saved["scale"]), ScaleOptions(**saved["scale_options"])
        expected = {name: list(value.shape) for name, value in meta_backbone(*description).state_dict().items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{path} does not describe a valid model ({error!r}); use a different checkpoint.") from error
    actual = {name: list(value.shape) for name, value in weights.items()}
    for name in {**expected, **actual}:
        here, there = (shapes.get(name, "absent") for shapes in (actual, expected))
        wanted = f"{there} for the described model. Use a different checkpoint."
        expect(here == there, f"{path}: the weight {name!r}", here, wanted)
    return LoadedCheckpoint(*description, weights, checkpoint)


def _weights(state: dict[Any, Any], path: str) -> dict[str, Tensor]:
    """Return the weights by their names in the backbone; reject unusual tensors, and sizes beyond the file's."""
    names = (name for name in state if isinstance(name, str) and name.startswith(_PREFIX))
    weights = {name.removeprefix(_PREFIX): state[name] for name in names}
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
            raise ConfigError(f"{path}: the weight {name!r} is not a dense real tensor; use a different checkpoint.")
    # Strides of 0 can claim any size.
    size = sum(value.numel() * value.element_size() for value in weights.values())
    if Path(path).is_file() and size > Path(path).stat().st_size:
        raise ConfigError(f"{path}: its weights claim more bytes than the file has; use a different checkpoint.")
    return weights
