"""Export to a folder for transformers: weights, config, tokenizer, model card.

A wrong export would show only in the quality of texts. So the folder appears only if it loads, and
if the loaded model has our logits:

    fold and convert -> write to a temporary folder -> load it by transformers
                     -> compare the logits of two random texts -> rename the folder
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, RunError, expect
from lightning_sv.interop.hf.configs import ways_to_load
from lightning_sv.interop.hf.convert import to_hugging_face
from lightning_sv.interop.hf.tokenizer import fast_tokenizer
from lightning_sv.nn import Backbone
from lightning_sv.roles.fake import transformers

#: largest relative difference of the logits attributed to rounding in float32
TOLERANCE = 1e-4


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
        kind: class that loads it
        own_code: True if its code is next to the weights
        difference: norm of the difference of the logits, relative to ours
    """

    kind: str
    own_code: bool
    difference: float


def check_unused(folder: Path) -> None:
    """Check that a folder is new or empty, and not the current directory.

    That one cannot be replaced.
    """
    is_other = folder.resolve() != Path.cwd()
    expect(is_other, str(folder), "the current directory", "a folder inside it.")
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    expect(is_empty, str(folder), "not empty", "a new or an empty folder.")


def export(
    model: Backbone,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    context: int,
    card: Callable[..., str],
    masked: bool = False,
) -> Exported:
    """Write a folder for transformers atomically, after comparing its logits with the model's.

    Args:
        model: backbone in float32
        tokenizer: tokenizer of its corpus
        folder: new or empty folder
        context: sequence length of the training
        card: function of `kind` and `load` that returns README.md, as `model_card`
        masked: as in `fast_tokenizer`

    Raises:
        ConfigError: the folder is not empty, or the model or its tokenizer cannot be exported
        RunError: the weights cannot be written
    """
    final = Path(folder)
    check_unused(final)
    theirs = _converted(model, tokenizer.eot, context)
    theirs_tokenizer = fast_tokenizer(tokenizer, context, masked)
    kind = type(theirs)
    ways = ways_to_load(model.config)
    load = ", trust_remote_code=True" if kind.is_remote_code() else ""
    for key, value in ways.items():
        load += f', {key}="{value}"'
    text = card(kind=kind.__name__, load=load)

    with atomic_path(final) as partial:
        _save(theirs, partial, final)
        theirs_tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(text, encoding="utf-8")
        difference = checked_difference(model, kind.from_pretrained(partial, **ways), context)
    return Exported(kind.__name__, kind.is_remote_code(), difference)


def _converted(model: Backbone, eot: int, context: int) -> Any:
    try:  # fold in float64, round once
        theirs = to_hugging_face(model.double(), eot, context).float()
    finally:
        model.float()
    theirs.generation_config = transformers().GenerationConfig(
        bos_token_id=eot, eos_token_id=eot, pad_token_id=eot
    )
    return theirs


def _save(theirs: Any, partial: Path, final: Path) -> None:
    try:
        theirs.save_pretrained(partial)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # of a full disk, for instance
            raise
        raise RunError(f"{final} cannot be written ({error}).") from error


@torch.no_grad()
def checked_difference(model: Backbone, theirs: Any, context: int) -> float:
    """Return ||theirs - ours|| / ||ours|| of the logits of two random texts.

    Raises:
        ConfigError: it is more than `TOLERANCE`
    """
    like = model.embed.weight
    generator = torch.Generator().manual_seed(0)
    sizes = (2, min(context, 64))
    tokens = torch.randint(0, model.config.vocab_size, sizes, generator=generator, device="cpu").to(
        like.device
    )
    ours = model(tokens)  # (2, context, vocab_size)
    logits = theirs.eval()(tokens).logits.to(like.dtype)
    difference = float((logits - ours).norm() / ours.norm())
    if not difference <= TOLERANCE:
        kind = type(theirs).__name__
        what = f"the logits of {kind} differ from the backbone's by {difference:.2g} of their norm"
        hint = "Please report this with the model's sizes and strategy."
        raise ConfigError(f"{what}; expected at most {TOLERANCE:g}. {hint}")
    return difference
