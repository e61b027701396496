"""The tokenizer of a corpus, as one of transformers.

In training, a text follows the end-of-text token of the text before it. So a prompt starts with
that token, too, and the result is compared with our tokenizer on a sample of difficult text.
"""

from typing import Any

import tokenizers
from tokenizers import processors

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import expect
from lightning_sv.roles.fake import transformers

#: text on which byte-level tokenizers differ
SAMPLE = "def f(x):\n\treturn  x + 12345  # it's naïve, 你好 🙂\n\n\n"


def fast_tokenizer(tokenizer: Tokenizer, context: int, masked: bool = False) -> Any:
    """Return a PreTrainedTokenizerFast with the same ids.

    Texts start with the end-of-text token, as in training. With `masked` they do not, because no
    token of a document attended to the end of the document before it.
    """
    converted = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    end = converted.id_to_token(tokenizer.eot)
    text = ["$A"] if masked else [end, "$A"]
    converted.post_processor = processors.TemplateProcessing(
        single=text, pair=[*text, end, "$B"], special_tokens=[(end, tokenizer.eot)]
    )
    if hasattr(converted.model, "dropout"):
        converted.model.dropout = None  # as in `Tokenizer`
    converted.no_truncation()
    converted.no_padding()
    # The folder stores the name of the class; transformers 5 has a different one, which version 4
    # cannot load.
    kind: Any = type("PreTrainedTokenizerFast", (transformers().PreTrainedTokenizerFast,), {})
    theirs = kind(
        tokenizer_object=converted,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
    )
    expected = tokenizer.encode(SAMPLE)
    if not masked:
        expected = [tokenizer.eot, *expected]
    actual = theirs(SAMPLE)["input_ids"]
    what = f"the tokenizer's text {SAMPLE!r} in transformers"
    expect(actual == expected, what, actual, f"{expected}.")
    return theirs
