"""The model card of an exported run: README.md of its folder."""

from collections.abc import Mapping, Sequence

from lightning_sv.interop.fold import Folding

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [lightning_sv, scale-vectors]
---

# {name}

A language model from a study of the scale vectors of RMSNorm, trained with lightning_sv. It continues text like that it
was trained on; it follows no instructions, and nothing was done against what it may make up.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{{load}})
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=40)[0]))
```

A text begins and ends with `{end}`, as in training.

| | |
| --- | --- |
| class | `{{kind}}` |
{rows}

{folding}
"""


def card(name: str, end: str, facts: Mapping[str, object], foldings: Sequence[Folding]) -> str:
    """Return the text for `folder.export`, which fills in {kind} and {load}.

    Args:
        name: of the model
        end: the end-of-text token
        facts: row of the table -> what it says; None is left out
        foldings: what becomes of each scale vector
    """
    rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in facts.items() if value is not None)
    return _CARD.format(name=name, end=end, rows=rows, folding=_folding(foldings))


def _shown(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ").replace("{", "(").replace("}", ")")


def _folding(foldings: Sequence[Folding]) -> str:
    stays = {row.vector.rpartition(".")[0].rpartition(".")[2]: row.why for row in foldings if row.into is None}
    if not foldings:
        return "It has no scale vectors."
    if not stays:
        return "All of its scale vectors are part of the matrices or of the plain norms beside them."
    reasons = "\n".join(f"- `{site}`: {why}." for site, why in stays.items())
    return f"Its scale vectors are part of the matrices, but for those of:\n\n{reasons}"
