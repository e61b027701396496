"""The built site and a report in headless Chromium: `make test-pages`.

Nothing scrolls sideways at 1,400 and 400 pixels, in light and in dark, and at 1,400 pixels no line
of code is cut. No script reports an error, and nothing is loaded from elsewhere. The search finds a
how-to page first. Screenshots go to build/screenshots.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SITE = Path("build/site").resolve()
REPORT = Path("build/report/report.html").resolve()
PICTURES = Path("build/screenshots")
PAGES = (
    "index",
    "docs/quickstart",
    "docs/own-model",
    "docs/strategies",
    "docs/results",
    "docs/architecture",
    "docs/theory",
    "docs/faq",
    "results/cpu-100/index",
    "api/scale",
)
WIDTHS = (1400, 400)
#: of the search for these words, the first page
FOUND = {
    "learning rate": "docs/quickstart",
    "wandb": "docs/faq",
    "several gpus": "docs/distributed",
}
#: elements that stick out of the page, unless an element around them scrolls
OVERFLOW = """() => {
  const wide = document.documentElement.clientWidth + 1;
  const scrolls = e => { for (; e && e !== document.body; e = e.parentElement)
    if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(e).overflowX)) return true;
    return false; };
  return [...document.querySelectorAll('main *, article *, body > *')]
    .filter(e => e.getBoundingClientRect().right > wide)
    .filter(e => e.getBoundingClientRect().width && !scrolls(e))
    .slice(0, 3).map(e => e.tagName + ' ' + (e.textContent || '').trim().slice(0, 60));
}"""

#: blocks of code with a line that is wider than the block
CUT = """() => [...document.querySelectorAll('pre > code')]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 60))"""


def check(condition: bool, sentence: str) -> None:
    """Print the sentence; leave with exit code 1 if it is false."""
    print("ok  " if condition else "FAIL", sentence, flush=True)
    if not condition:
        sys.exit(1)


def check_site(page: Page) -> None:
    """Visit every page at both widths; search."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for name in PAGES:
            page.goto(
                f"file://{SITE}/{name}.html"
            )  # until the page is loaded; on a busy machine it may never be idle
            page.evaluate("() => document.fonts.ready.then(() => null)")
            wide = page.evaluate(OVERFLOW)
            check(not wide, f"{name} fits {width} pixels {wide or ''}")
            page.screenshot(
                path=str(PICTURES / f"{name.replace('/', '-')}-{width}.png"), full_page=True
            )
    page.set_viewport_size({"width": 1400, "height": 900})
    for path in sorted((SITE / "docs").glob("*.html")):
        page.goto(f"file://{path}")
        cut = page.evaluate(CUT)
        check(not cut, f"no code of docs/{path.stem} is cut {cut or ''}")
    for words, start in FOUND.items():
        page.goto(f"file://{SITE}/index.html")
        page.locator("input.md-search__input").press_sequentially(words, delay=100)
        first = page.locator(".md-search-result__link").first
        first.wait_for(timeout=60000)
        page.wait_for_timeout(1000)
        href = (
            page.locator(".md-search-result__link").first.get_attribute("href") or ""
        ).partition("#")[0]
        check(start in href, f"the search for {words!r} leads to {href.rpartition('site/')[2]}")


def check_report(page: Page) -> None:
    """Check the width of a report."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"file://{REPORT}")
        wide = page.evaluate(OVERFLOW)
        check(not wide, f"the report fits {width} pixels {wide or ''}")
        page.screenshot(path=str(PICTURES / f"report-{width}.png"), full_page=True)


def main() -> None:
    """Run all checks, or print that no browser exists."""
    browser_path = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if not browser_path:
        print("skipped: no Chromium; install one, or set CHROMIUM to its path")
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
        ]
        browser = playwright.chromium.launch(executable_path=browser_path, args=arguments)
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            page.on(
                "console",
                lambda message: problems.append(message.text) if message.type == "error" else None,
            )
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request",
                lambda request: (
                    problems.append(request.url) if request.url.startswith("http") else None
                ),
            )
            check_site(page)
            if REPORT.exists():
                check_report(page)
        browser.close()
    check(not problems, f"no script reports an error, and nothing is fetched {problems[:3] or ''}")


if __name__ == "__main__":
    main()
