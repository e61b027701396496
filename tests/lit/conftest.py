"""A small real corpus, and short runs on it."""

import sysconfig
from pathlib import Path

import pytest

from lightning_sv.corpus import CorpusConfig, prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty modules of the standard library: about 100,000 tokens."""
    root = tmp_path_factory.mktemp("corpus")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    config = CorpusConfig(
        dir=str(root / "shards"),
        source="files:" + ",".join(map(str, files)),
        tokenizer="bpe:300",
        val_fraction=0.2,
        max_bytes=400_000,
    )
    prepare(config, progress=False)
    return root / "shards"


@pytest.fixture
def run_args(corpus: Path, tmp_path: Path) -> list[str]:
    """Arguments of a fit that takes seconds; the train split is 12 steps long or more."""
    config = tmp_path / "base.yaml"
    config.write_text(
        f"""
model:
  scale: unified
  backbone: {{name: tiny, d_model: 32, n_layer: 2, n_head: 2, vocab_size: 300}}
data:
  corpus: {{dir: {corpus}, tokenizer: "bpe:300"}}
  seq_len: 32
  global_batch: 4
  validations: 2
  val_sequences: 16
trainer: {{accelerator: cpu, devices: 1, max_steps: 12}}
scalars: {{every_n_steps: 1}}
branch_norms: {{every_n_steps: 5}}
"""
    )
    return ["--config", str(config)]
