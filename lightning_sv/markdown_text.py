"""Texts of unknown origin in Markdown."""

import re
from html import escape


def markdown_text(text: str) -> str:
    r"""Escape a text for Markdown, on one line.

    >>> markdown_text("a|b\n<b> *c*")
    'a\\|b &lt;b&gt; \\*c\\*'
    """
    plain = " ".join(escape(text, quote=False).split())
    return re.sub(r"([\\|*_\[\]`#~])", r"\\\1", plain)


def markdown_code(text: str) -> str:
    """Return a text as a code span of Markdown, whose fence is longer than any of the text.

    >>> markdown_code("<|end|>"), markdown_code("a`b")
    ('`<|end|>`', '`` a`b ``')
    """
    line = " ".join(text.split())
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}"
