"""Write a small English corpus, data/english-text.jsonl, from four packages of Debian.

    python data/english.py          # needs apt-get and dpkg-deb, no root
    lightning-sv prepare --config conf/data/english.yaml

The packages are dict-gcide (a dictionary), anarchism (an FAQ), dict-foldoc (a dictionary of
computing) and jargon-text (the Jargon File). A document is an entry of a dictionary, a page of
the FAQ, or the Jargon File. Any other text works the same way: write one JSON object per line,
with the text under the key "text".
"""

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = ("dict-gcide", "anarchism", "dict-foldoc", "jargon-text")
OUTPUT = Path(__file__).parent / "english-text.jsonl"

#: Digits of the numbers in the index of a dictd dictionary.
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def main() -> None:
    """Download the packages, and write their documents."""
    with tempfile.TemporaryDirectory() as folder:
        share = unpack_packages(Path(folder)) / "usr" / "share"
        documents = [
            *dictionary_entries(share / "dictd" / "gcide"),
            *web_pages(share / "doc" / "anarchism" / "html"),
            *dictionary_entries(share / "dictd" / "foldoc"),
            gzip.decompress((share / "doc" / "jargon-text" / "jargon.txt.gz").read_bytes()).decode(
                "utf-8", "replace"
            ),
        ]

    with OUTPUT.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")

    megabytes = OUTPUT.stat().st_size / 1e6
    print(f"{OUTPUT}: {len(documents):,} documents, {megabytes:.0f} MB")


def unpack_packages(folder: Path) -> Path:
    """Download the packages and unpack them without installing; return their folder."""
    # apt-get gives up root for its downloads, so the folder must be writable for its own user.
    folder.chmod(0o777)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)

    unpacked = folder / "unpacked"
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, unpacked], check=True)
    return unpacked


def dictionary_entries(path: Path) -> Iterator[str]:
    """Yield the entries of a dictd dictionary in their order, each once.

    NAME.index has a line per headword: word, offset and length of its entry in NAME.dict.dz.
    Several headwords may have the same entry.
    """
    content = gzip.decompress(path.with_suffix(".dict.dz").read_bytes())

    places = set()
    for line in path.with_suffix(".index").read_text("utf-8", "replace").splitlines():
        headword, offset, length = line.split("\t")[:3]
        if not headword.startswith("00-database"):
            places.add((decode_number(offset), decode_number(length)))

    for offset, length in sorted(places):
        entry = content[offset : offset + length].decode("utf-8", "replace").strip()
        if entry:
            yield entry


def decode_number(digits: str) -> int:
    """Return a number of a dictd index: digits of base64, the most significant first."""
    number = 0
    for digit in digits:
        number = number * 64 + _BASE64.index(digit)
    return number


class _Text(HTMLParser):
    """The text of a page, without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.in_body = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.in_body = True
        if tag in ("p", "h1", "h2", "h3", "li", "br", "blockquote"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.in_body:
            self.parts.append(data)


def web_pages(folder: Path) -> Iterator[str]:
    """Yield the text of each page of a folder, in the order of names, in single spaces."""
    for path in sorted(folder.glob("*.html")):
        parser = _Text()
        parser.feed(path.read_text("utf-8", "replace"))
        lines = [" ".join(line.split()) for line in "".join(parser.parts).splitlines()]
        yield "\n".join(line for line in lines if line)


if __name__ == "__main__":
    main()
