"""What a run keeps of the code that made it."""

import subprocess
from pathlib import Path

import pytest

from lightning_sv.runs.provenance import commit_of


def git(*words: str, at: Path) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *author, *words], cwd=at, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "results").mkdir(parents=True)
    (root / "code.py").touch()
    (root / "results" / "run.csv").touch()
    git("init", "-q", at=root)
    git("add", ".", at=root)
    git("commit", "-q", "-m", "first", at=root)
    return root


def test_commit_of_a_checkout_names_head_and_changed_code(checkout: Path) -> None:
    head = git("rev-parse", "HEAD", at=checkout)
    assert commit_of(checkout) == head

    (checkout / "results" / "run.csv").write_text("a recording is not code")
    assert commit_of(checkout) == head

    (checkout / "code.py").write_text("pass")
    changed = commit_of(checkout)
    assert changed.startswith(head) and changed != head


def test_commit_of_a_checkout_of_another_owner_is_not_called_missing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = checkout / "venv" / "site-packages"
    environment.mkdir(parents=True)
    no_checkout = commit_of(environment)

    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = commit_of(checkout)
    assert refused.startswith("version") and refused != no_checkout
    assert commit_of(environment) == no_checkout
