"""The wheel, used from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.long
def test_wheel_in_an_empty_folder_trains(corpus: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    for name in ("lightning_sv", "conf"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    address = "https://example.org/lightning_sv"
    subprocess.run(pip, cwd=source, check=True, env=os.environ | {"REPOSITORY_URL": address})
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "lightning_sv/py.typed").is_file()
    (metadata,) = site.glob("*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)#]+)", metadata.read_text(encoding="utf-8"))
    assert f"{address}/blob/HEAD/docs/results.md" in links and all(
        link.startswith("https:") for link in links
    )
    empty.mkdir()
    shutil.copy(ROOT / "examples/lightning_trainer.py", empty)
    env = os.environ | {"PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=empty, env=env, check=True, capture_output=True, text=True
        ).stdout

    assert run("-c", "import lightning_sv; print(lightning_sv.__file__)").startswith(str(site))
    assert "logits" in run("-W", "ignore", "lightning_trainer.py", str(corpus), "out")
    data = [f"--data.corpus.dir={corpus}", "--data.corpus.tokenizer=bpe:300"]
    run(
        "-m",
        "lightning_sv",
        "fit",
        "--config",
        "tiny-llama",
        *data,
        "--trainer.max_steps=2",
        "--run_dir=run",
    )
    assert (empty / "run/summary.json").is_file()
