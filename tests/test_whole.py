"""Files and folders that are there whole, or not at all."""

from pathlib import Path

import pytest

from lightning_sv.whole import partial_of, whole


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_not_whole_is_not_there(folder: bool, tmp_path: Path) -> None:
    """An error leaves what was there before, and nothing beside it or above; so does a process that was killed."""

    def write(path: Path, text: str) -> None:
        if folder:
            path.mkdir()
        (path / "inside" if folder else path).write_text(text)

    final = tmp_path / "new" / "thing"
    write_to = final / "inside" if folder else final
    with pytest.raises(OSError, match="full"), whole(final) as partial:
        write(partial, "first")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    final.parent.mkdir()
    write(partial_of(final), "of a process that was killed")
    with whole(final) as partial:
        assert not partial.exists()
        write(partial, "first")
        assert not final.exists()
    assert write_to.read_text() == "first" and list(final.parent.iterdir()) == [final]
    with pytest.raises(OSError, match="full"), whole(final) as partial:
        write(partial, "second")
        raise OSError("full")
    assert write_to.read_text() == "first" and list(final.parent.iterdir()) == [final]
    if folder:
        with pytest.raises(OSError, match="not empty"), whole(final) as partial:
            write(partial, "second")
        assert write_to.read_text() == "first"
