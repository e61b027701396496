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
#: public packages, one page per package
API = [
    "scale", "nn", "optim", "interop", "curvature", "theory", "corpus", "statistics", "plots",
    "callbacks", "lit.module", "lit.data", "runs.events",
]  # fmt: skip
#: files in addition to the theme's
ASSETS = ["site.css", "iframe-worker.js"]
#: pages with wider tables hide their table of contents
WIDE = 9
#: pages in the search index; sources, reports and logs are not
SEARCHED = ("README", "docs/", "data/", "api/", "CONTRIBUTING", "SECURITY")
COPIED = {".png", ".svg", ".csv", ".ipynb"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)")
FENCE = re.compile(r"```.*?```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository that can be reached from FIRST."""
    ours = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    todo = [ROOT / name for name in FIRST if name != "docs"] + sorted((ROOT / "docs").glob("*.md"))
    seen = set(todo)
    while todo:
        path = todo.pop()
        ours.append(_file(path, config))
        for target in _linked(path):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    for name in API:
        ours.append(
            File.generated(
                config,
                f"api/{name}.md",
                content=f"# lightning_sv.{name}\n\n::: lightning_sv.{name}\n",
            )
        )
    for name in ASSETS:
        ours.append(
            File.generated(config, f"assets/{name}", abs_src_path=str(ROOT / "docs" / name))
        )
    return ours


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links; hide contents next to wide tables; keep sources out of the search."""
    if any(line.startswith("|") and line.count("|") - 1 > WIDE for line in markdown.splitlines()):
        page.meta["hide"] = ["toc"]
    if not page.file.src_uri.startswith(SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(("docs/quickstart", "docs/faq", "docs/commands")):
        page.meta["search"] = {"boost": 4}
    folder = (ROOT / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        made = _uri(target) if target.exists() and target.is_relative_to(ROOT) else ""
        return Path(os.path.relpath(ROOT / made, folder)).as_posix() if made else match[0]

    # as many code blocks as gaps between them: only the text around them has links
    text, code = FENCE.split(markdown), [*FENCE.findall(markdown), ""]
    return "".join(LINK.sub(lead, words) + block for words, block in zip(text, code, strict=True))


def _uri(path: Path) -> str:
    """Where the site has a file or folder of the repository."""
    uri = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{uri}/README.md" if (path / "README.md").exists() else f"{uri}/index.md"
    return uri if path.suffix in COPIED | {".md"} else f"{uri}.md"


def _file(path: Path, config: MkDocsConfig) -> File:
    if path.suffix in COPIED | {".md"}:
        return File.generated(config, _uri(path), abs_src_path=str(path))
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        rows = [
            f"- [{child.name}]({child.name})" if child.is_file() else f"- {child.name}/"
            for child in _children(path)
        ]
        return File.generated(config, _uri(path), content=f"# {name}\n\n" + "\n".join(rows) + "\n")
    language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(path.suffix, "sh")
    return File.generated(
        config, _uri(path), content=f"# {name}\n\n```{language}\n{path.read_text()}```\n"
    )


def _children(folder: Path) -> list[Path]:
    return [
        path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "__pycache__"))
    ]


def _linked(path: Path) -> Iterator[Path]:
    """What a page links to in the repository; of a folder its files."""
    if path.is_dir():
        yield from (child for child in _children(path) if child.is_file())
    elif path.suffix == ".md":
        for link in LINK.findall(FENCE.sub("", path.read_text())):
            target = (path.parent / link).resolve()
            if target.exists() and target.is_relative_to(ROOT):
                readme = target / "README.md"
                yield readme if readme.exists() else target
