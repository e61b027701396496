"""Atomic writes of files and folders."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from lightning_sv.atomic import atomic_path, check_writable, partial_of, replace, write_atomically


@pytest.mark.parametrize("folder", [False, True])
def test_atomic_path_after_an_error_keeps_the_old_content(folder: bool, tmp_path: Path) -> None:
    def write(path: Path, text: str) -> None:
        if folder:
            path.mkdir()
        (path / "inside" if folder else path).write_text(text)

    final = tmp_path / "new" / "thing"
    write_to = final / "inside" if folder else final
    with pytest.raises(OSError, match="full"), atomic_path(final) as partial:
        write(partial, "first")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    final.parent.mkdir()
    write(partial_of(final), "of a process that was killed")
    with atomic_path(final) as partial:
        assert not partial.exists()
        write(partial, "first")
        assert not final.exists()
    assert write_to.read_text() == "first" and list(final.parent.iterdir()) == [final]
    with pytest.raises(OSError, match="full"), atomic_path(final) as partial:
        write(partial, "second")
        raise OSError("full")
    assert write_to.read_text() == "first" and list(final.parent.iterdir()) == [final]
    if folder:
        with pytest.raises(OSError, match="not empty"), atomic_path(final) as partial:
            write(partial, "second")
        assert write_to.read_text() == "first"


def test_atomic_path_replaces_a_link_that_a_killed_process_left(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    final = tmp_path / "final"
    folder.mkdir()
    partial_of(final).symlink_to(folder)
    write_atomically(final, "new")
    assert final.read_text() == "new" and sorted(tmp_path.iterdir()) == [final, folder]


def test_check_writable_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest existing folder decides. A broken link is refused."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    check_writable(tmp_path)
    check_writable(tmp_path / "new/deep")
    for name in ("file", "file/deep", "link", "link/deep"):
        with pytest.raises(NotADirectoryError, match=name.partition("/")[0]):
            check_writable(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    monkeypatch.setattr("os.access", lambda *given: False)
    with pytest.raises(PermissionError, match=tmp_path.name):
        check_writable(tmp_path / "new/deep")


def test_atomic_path_of_a_folder_applies_the_umask(tmp_path: Path) -> None:
    """Some libraries create files for their owner only."""
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "folder") as partial:
            (partial / "inside").mkdir(parents=True)
            (partial / "inside" / "weights").touch(mode=0o600)
            (partial / "config").touch()
    finally:
        os.umask(before)
    files = (tmp_path / "folder" / "config", tmp_path / "folder" / "inside" / "weights")
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640, 0o640]


def test_atomic_folder_without_modes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mounted bucket, or with CIFS."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    with atomic_path(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "file").write_text("x")
    assert (tmp_path / "folder/file").read_text() == "x"


def test_replace_a_kill_while_an_old_folder_is_deleted_leaves_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-6.ckpt"
    for folder in (path, partial_of(path)):
        folder.mkdir()
        (folder / folder.name).touch()
    delete = shutil.rmtree

    def killed(folder: Path, **settings: bool) -> None:
        delete(folder, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        replace(partial_of(path), path)
    assert (path / partial_of(path).name).exists()
