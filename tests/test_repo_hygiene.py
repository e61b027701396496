"""What those who clone the repository find: workflows, hooks, citation, changelog and the site's contents."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sv import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def jobs(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text())["jobs"].values())


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflow_commands_are_make_targets(path: Path) -> None:
    commands = [step["run"] for job in jobs(path) for step in job["steps"] if "run" in step]
    assert commands and all("timeout-minutes" in job for job in jobs(path))
    for command in commands:
        words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "2.13.0", command))
        assert words[0] == "make", command
        env = {"PATH": os.environ["PATH"]}
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr


def test_workflows_test_the_oldest_and_the_newest_supported_versions() -> None:
    (job,) = jobs(ROOT / ".github/workflows/test.yml")
    tried, project = job["strategy"]["matrix"], (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'"torch>=([\d.]+),<2\.(\d+)"', project), re.search(r'requires-python = ">=([\d.]+)"', project)
    default = re.search(r"^TORCH \?= torch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert oldest[0] and oldest[1] and default
    assert (
        tried["torch"] == [f"{oldest[0][1]}.0", default[1], f"2.{int(oldest[0][2]) - 1}.0"]
        and tried["python"][0] == oldest[1][1]
    )
    assert {path.stem for path in WORKFLOWS} == {"check", "test", "faults"}


def test_citation_has_this_version_and_the_paper() -> None:
    citation, front = read("CITATION.cff"), (ROOT / "README.md").read_text()
    paper = citation["preferred-citation"]
    assert citation["version"] == __version__
    assert paper["url"] in front and paper["title"] in " ".join(front.split())
    assert re.search("".join(f".*{author['family-names']}" for author in paper["authors"]), front.replace("\n", " "))


def test_site_navigation_has_every_page() -> None:
    def leaves(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]

    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")  # the keys before have a tag of MkDocs
    shown = leaves(yaml.safe_load(nav))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert not (pages - set(shown)), "give them a line in mkdocs.yml"
    assert len(shown) == len(set(shown))
    assert all((ROOT / page).exists() for page in shown if not page.startswith("api/"))
