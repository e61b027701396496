"""Export to a folder for transformers and compatible engines: weights, config, tokenizer, model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import processors

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, RunError, expect
from lightning_sv.interop.fold import Folding
from lightning_sv.interop.hf.convert import to_hugging_face, ways_to_load
from lightning_sv.markdown_text import markdown_code, markdown_text
from lightning_sv.nn import Backbone
from lightning_sv.roles.fake import transformers

#: largest relative difference of the logits attributed to rounding in float32
TOLERANCE = 1e-4
#: text on which byte-level tokenizers differ
SAMPLE = "def f(x):\n\treturn  x + 12345  # it's naïve, 你好 🙂\n\n\n"
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [lightning_sv, scale-vectors]
---

# {name}

A language model from a study of the scale vectors of RMSNorm, trained with lightning_sv. It continues text that is
similar to its training data. It does not follow instructions, and its output can be false.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{{load}})
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{{load}})
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=40)[0]))
```

{texts}

| | |
| --- | --- |
| class | `{{kind}}` |
{rows}

{folding}
"""


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
    """Check that a folder is new or empty, and not the current directory, which cannot be replaced."""
    expect(folder.resolve() != Path.cwd(), str(folder), "the current directory", "a folder inside it.")
    unused = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    expect(unused, str(folder), "not empty", "a new or an empty folder.")


def export(
    model: Backbone, tokenizer: Tokenizer, folder: str | Path, *, context: int, card: str, masked: bool = False
) -> Exported:
    """Write a folder for transformers atomically, after comparing its logits with the model's.

    The model is in float32. `context` is the sequence length of the training. `card` is the text of README.md, with
    {kind} for the class and {load} for the argument that loads its code. For `masked` see `fast_tokenizer`.

    Raises:
        ConfigError: the folder is not empty, or the model or its tokenizer cannot be exported
        RunError: the weights cannot be written
    """
    final = Path(folder)
    check_unused(final)
    try:  # fold in float64, round once
        theirs = to_hugging_face(model.double(), tokenizer.eot, context).float()
    finally:
        model.float()
    theirs_tokenizer = fast_tokenizer(tokenizer, context, masked)
    settings = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}
    theirs.generation_config = transformers().GenerationConfig(**settings)
    own_code = type(theirs).is_remote_code()
    experts = ways_to_load(model.config)
    load = ", trust_remote_code=True" if own_code else ""
    load += "".join(f', {key}="{value}"' for key, value in experts.items())
    with atomic_path(final) as partial:
        try:
            theirs.save_pretrained(partial)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":  # of a full disk, for instance
                raise
            raise RunError(f"{final} cannot be written ({error}).") from error
        theirs_tokenizer.save_pretrained(partial)
        text = card.replace("{kind}", type(theirs).__name__).replace("{load}", load)
        (partial / "README.md").write_text(text, encoding="utf-8")
        difference = checked_difference(model, type(theirs).from_pretrained(partial, **experts), context)
    return Exported(type(theirs).__name__, own_code, difference)


def fast_tokenizer(tokenizer: Tokenizer, context: int, masked: bool = False) -> Any:
    """Return a PreTrainedTokenizerFast with the same ids; texts start with the end-of-text token, as in training.

    With `masked` they do not, because no token of a document attended to the end of the document before it.
    """
    converted = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    end = converted.id_to_token(tokenizer.eot)
    ends = [(end, tokenizer.eot)]
    start = "" if masked else f"{end} "
    pieces = processors.TemplateProcessing(single=f"{start}$A", pair=f"{start}$A {end} $B", special_tokens=ends)
    converted.post_processor = pieces
    converted.no_truncation()
    converted.no_padding()
    # The folder stores the name of the class; transformers 5 has a different one, which version 4 cannot load.
    kind: Any = type("PreTrainedTokenizerFast", (transformers().PreTrainedTokenizerFast,), {})
    theirs = kind(
        tokenizer_object=converted, bos_token=end, eos_token=end, pad_token=end, model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    expected, actual = [tokenizer.eot] * (not masked) + tokenizer.encode(SAMPLE), theirs(SAMPLE)["input_ids"]
    expect(actual == expected, f"the tokenizer's text {SAMPLE!r} in transformers", actual, f"{expected}.")
    return theirs


@torch.no_grad()
def checked_difference(model: Backbone, theirs: Any, context: int) -> float:
    """Return ||theirs - ours|| / ||ours|| of the logits of two random texts; refuse more than `TOLERANCE`."""
    generator, sizes = torch.Generator().manual_seed(0), (2, min(context, 64))
    like = model.embed.weight
    tokens = torch.randint(0, model.config.vocab_size, sizes, generator=generator, device="cpu").to(like.device)
    ours, logits = model(tokens), theirs.eval()(tokens).logits.to(like.dtype)
    difference = float((logits - ours).norm() / ours.norm())
    if not difference <= TOLERANCE:
        what = f"the logits of {type(theirs).__name__} differ from the backbone's by {difference:.2g} of their norm"
        hint = "Please report this with the model's sizes and strategy."
        raise ConfigError(f"{what}; expected at most {TOLERANCE:g}. {hint}")
    return difference


def model_card(
    name: str, end: str, facts: Mapping[str, object], foldings: Sequence[Folding], masked: bool = False
) -> str:
    """Return the text of README.md for `export`, which fills in {kind} and {load}.

    Texts are escaped, because they come from the run. Facts that are None are omitted.
    """
    end_token = _without_fields(markdown_code(end))
    texts = f"A text begins and ends with {end_token}, as in training."
    if masked:
        texts = f"A text ends with {end_token}, and the model attends to one text only, as in training."
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items() if value is not None)
    heading = _without_fields(markdown_text(name))
    return _CARD.format(name=heading, texts=texts, rows=rows, folding=_folding(foldings))


def _cell(value: object) -> str:
    """Return a fact, which may come from a run of unknown origin, as a cell of a table."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    return _without_fields(markdown_text(str(value)))


def _without_fields(text: str) -> str:
    """Replace the braces of a text, because `export` fills in {kind} and {load}."""
    return text.replace("{", "(").replace("}", ")")


def _folding(foldings: Sequence[Folding]) -> str:
    stays = {row.vector.rpartition(".")[0].rpartition(".")[2]: row.why for row in foldings if row.into is None}
    if not foldings:
        return "It has no scale vectors."
    if not stays:
        return "All of its scale vectors are part of the matrices or of the plain norms next to them."
    reasons = "\n".join(f"- `{site}`: {why}." for site, why in stays.items())
    return f"Its scale vectors are part of the matrices, except those of:\n\n{reasons}"
