"""The site's files, for MkDocs: the pages of the repository, and the files they link to.

A link means the same in an editor, on a page of the repository and on the site: pages keep their
paths; pictures and tables are copied; a linked source becomes a page of code, a linked folder a
list of its files.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: start pages; linked files follow
FIRST = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md", "docs"]
#: public packages and modules, one page each; mkdocs.yml has them in its navigation
API = [
    "scale", "nn", "optim", "interop", "curvature", "theory", "corpus", "callbacks", "lit.module",
    "lit.data", "runs.events",
]  # fmt: skip
#: files in addition to the theme's
ASSETS = ["site.css", "iframe-worker.js"]
#: pages with wider tables hide their table of contents
WIDE = 9
#: pages in the search index; sources, reports and logs are not
SEARCHED = ("README", "docs/", "data/", "api/", "CONTRIBUTING", "SECURITY")
#: pages that the search puts first
FOUND_FIRST = ("docs/quickstart", "docs/faq", "docs/commands")
#: copied as they are; any other file becomes a page of code
COPIED = {".png", ".svg", ".csv", ".ipynb", ".md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository that can be reached from FIRST."""
    ours = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    for path in _reachable():
        ours.append(_file(path, config))
    for name in API:
        page = f"# lightning_sv.{name}\n\n::: lightning_sv.{name}\n"
        ours.append(File.generated(config, f"api/{name}.md", content=page))
    for name in ASSETS:
        asset = str(ROOT / "docs" / name)
        ours.append(File.generated(config, f"assets/{name}", abs_src_path=asset))
    return ours


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links; hide contents next to wide tables; keep sources out of the search.

    Reports of results/ name more pictures than the repository keeps; the others are left out.
    """
    if _columns(markdown) > WIDE:
        page.meta["hide"] = ["toc"]
    uri = page.file.src_uri
    if not uri.startswith(SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif uri.startswith(FOUND_FIRST):
        page.meta["search"] = {"boost": 4}

    folder = (ROOT / uri).parent

    def on_the_site(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not _is_ours(target):
            return link[0]
        return Path(os.path.relpath(ROOT / _uri(target), folder)).as_posix()

    def if_kept(picture: re.Match[str]) -> str:
        return picture[0] if (folder / picture[1]).exists() else ""

    # Code blocks have no links. The text around them is one longer than they are.
    texts = FENCE.split(markdown)
    blocks = [*FENCE.findall(markdown), ""]
    parts = []
    for text, block in zip(texts, blocks, strict=True):
        parts.append(LINK.sub(on_the_site, PICTURE.sub(if_kept, text)))
        parts.append(block)
    return "".join(parts)


def _reachable() -> Iterator[Path]:
    """Yield the start pages and everything that they and their links link to, each once."""
    pages = [ROOT / name for name in FIRST if name != "docs"]
    pending = pages + sorted((ROOT / "docs").glob("*.md"))
    seen = set(pending)
    while pending:
        path = pending.pop()
        yield path
        new = [target for target in dict.fromkeys(_linked(path)) if target not in seen]
        seen.update(new)
        pending += new


def _columns(markdown: str) -> int:
    """Return the number of columns of the widest table."""
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    return max((row.count("|") - 1 for row in rows), default=0)


def _is_ours(target: Path) -> bool:
    return target.exists() and target.is_relative_to(ROOT)


def _uri(path: Path) -> str:
    """Return where the site has a file or folder of the repository."""
    uri = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        has_readme = (path / "README.md").exists()
        return f"{uri}/README.md" if has_readme else f"{uri}/index.md"
    if path.suffix in COPIED:
        return uri
    return f"{uri}.md"


def _file(path: Path, config: MkDocsConfig) -> File:
    """Return a file of the site: a copy, a list of a folder's files, or a page of code."""
    if path.suffix in COPIED:
        return File.generated(config, _uri(path), abs_src_path=str(path))
    content = _folder_rows(path) if path.is_dir() else _code_block(path)
    name = path.relative_to(ROOT).as_posix()
    return File.generated(config, _uri(path), content=f"# {name}\n\n{content}\n")


def _folder_rows(folder: Path) -> str:
    rows = []
    for child in _children(folder):
        rows.append(f"- {child.name}/" if child.is_dir() else f"- [{child.name}]({child.name})")
    return "\n".join(rows)


def _code_block(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "sh")
    return f"```{language}\n{path.read_text()}```"


def _children(folder: Path) -> list[Path]:
    """Return what stands in a folder, without hidden files and caches."""
    every = sorted(folder.iterdir())
    return [path for path in every if not path.name.startswith((".", "__pycache__"))]


def _linked(path: Path) -> Iterator[Path]:
    """Yield what a page links to in the repository; of a folder its files."""
    if path.is_dir():
        yield from filter(Path.is_file, _children(path))
    if path.suffix != ".md":
        return
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        target = (path.parent / link).resolve()
        if not _is_ours(target):
            continue
        readme = target / "README.md"
        yield readme if readme.exists() else target
