"""A directory is claimed as it was chosen: what another run has made of it meanwhile stays."""

from pathlib import Path

import pytest

from lightning_sv.lit.run_dir import LAST, choose, claim


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_finished_since_is_not_trained_over(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_SV_RUN_DIR", raising=False)
    run = tmp_path / "run"
    assert choose("x", str(run), None, again=again) == run
    monkeypatch.delenv("LIGHTNING_SV_RUN_DIR")
    run.mkdir()
    (run / "config.yaml").touch()
    (run / LAST).parent.mkdir()
    (run / LAST).touch()
    with pytest.raises(ValueError, match="already holds a run; choose another"):
        claim(run, None, again=again)
    claim(run, str(run / LAST)).release()
    (run / LAST).unlink()
    if again:  # begun, and ended before its first checkpoint
        claim(run, None, again=True).release()
    else:
        with pytest.raises(ValueError, match="already holds a run"):
            claim(run, None)
