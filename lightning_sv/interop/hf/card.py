"""Model card of an exported folder, its README.md."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_sv.interop.fold import Folding
from lightning_sv.markdown_text import markdown_code, markdown_text

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [lightning_sv, scale-vectors]
---

# {name}

A language model from a study of the scale vectors of RMSNorm, trained with lightning_sv. It
continues text that is similar to its training data. It does not follow instructions, and its output
can be false.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{load})
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{load})
prompt = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))
```

{texts}

| | |
| --- | --- |
| class | `{kind}` |
{rows}

{folding}
"""


def model_card(
    name: str,
    end: str,
    facts: Mapping[str, object],
    foldings: Sequence[Folding],
    masked: bool = False,
    *,
    kind: str,
    load: str,
) -> str:
    """Return the text of README.md.

    `kind` is the class of the model, `load` the code of further arguments that load it. Texts are
    escaped, because they come from the run. Facts that are None are omitted.
    """
    end_token = markdown_code(end)
    texts = f"A text begins and ends with {end_token}, as in training."
    if masked:
        attended = "the model attends to one text only, as in training."
        texts = f"A text ends with {end_token}, and {attended}"
    return _CARD.format(
        name=markdown_text(name),
        kind=kind,
        load=load,
        texts=texts,
        rows="\n".join(_rows(facts)),
        folding=_folding(foldings),
    )


def _rows(facts: Mapping[str, object]) -> Iterator[str]:
    for key, value in facts.items():
        if value is not None:
            yield f"| {key} | {_cell(value)} |"


def _cell(value: object) -> str:
    """Return a fact as a cell of a table; it may come from a run of unknown origin."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    return markdown_text(str(value))


def _folding(foldings: Sequence[Folding]) -> str:
    if not foldings:
        return "It has no scale vectors."
    stays: dict[str, str] = {}
    for row in foldings:
        if row.into is None:
            site = row.vector.rpartition(".")[0]
            stays[site.rpartition(".")[2]] = row.why
    if not stays:
        parts = "the matrices or of the plain norms next to them"
        return f"All of its scale vectors are part of {parts}."
    reasons = "\n".join(f"- `{name}`: {why}." for name, why in stays.items())
    return f"Its scale vectors are part of the matrices, except those of:\n\n{reasons}"
