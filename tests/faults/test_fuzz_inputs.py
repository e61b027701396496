"""Strategy strings, configs and checkpoints: read as they are, or refused with one sentence."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, load_backbone
from lightning_sv.scale import ScaleOptions
from lightning_sv.scale.strategy import AXES, PRESETS
from lightning_sv.settings.parse import parse_run
from tests.faults.conftest import Tally
from tests.faults.fuzz import ODD, attempt, budget, edited, few_and_all, mangled

CONFIG: dict[str, Any] = yaml.safe_load("""
seed_everything: 0
model:
  backbone:
    {d_model: 32, n_layer: 1, n_head: 2, vocab_size: 48, name: fuzz, d_head: 16, d_ff: 8, qk_norm: false,
     post_norm: true, n_expert: 6, n_expert_active: 2, n_expert_shared: 1, d_expert: 21, rope_theta: 1.0e+4,
     norm_eps: 1.0e-5, init_std: 0.02, init_residual_scaling: true,
     router: {renormalize: true, balance: loss, balance_coef: 0.01, bias_rate: 1.0e-3, z_coef: 0.0}}
  scale: hg+dp+or
  scale_options: {placement_at: {lm_head: dp}, role_at: {v_proj.scale_out: input}, share_scale_out: false}
  optim: {name: muon, lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1, ns_dtype: float32}
  schedule: {name: wsd, warmup_ratio: 0.01, final_ratio: 0.0, stable_ratio: 0.8}
  tokens_per_param: 100.0
  mask_documents: false
  compile: false
  seed: 1
data:
  corpus: {dir: nowhere, source: stdlib, tokenizer: "bpe:300", val_fraction: 0.1, chunk_bytes: 64MB}
  seq_len: 32
  global_batch: 4
  micro_batch: 2
  num_workers: 0
  validations: 2
  val_sequences: 16
  seed: 0
trainer: {accelerator: cpu, max_steps: 12}
""")
#: as ODD; a count of a million blocks is no crash, only long
VALUES = ODD.filter(lambda value: not isinstance(value, int) or value < 100 or value >= 1 << 31)


def parse(args: list[str]) -> None:
    # The library prints resolved values.
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        parse_run(args, check_corpus=False)


def fuzz_strategies(tally: Tally, n: int) -> None:
    known = [*PRESETS, *(token for table in AXES.values() for token in table)]
    token = st.one_of(
        st.sampled_from(known), st.text(max_size=8), st.sampled_from(["", ":", "a:", ":b", "os:system", "..:x"])
    )
    text = st.one_of(st.lists(token, max_size=6).map("+".join), st.text(max_size=30), ODD)

    @budget(n)
    @given(text)
    def run(text: Any) -> None:
        attempt(tally, "hostile strategy", lambda: ScaleStrategy.parse(text))

    run()


def fuzz_configs(tally: Tally, folder: Path, n: int) -> None:
    good = yaml.safe_dump(CONFIG).encode()
    texts = st.one_of(edited(CONFIG, VALUES).map(lambda value: yaml.safe_dump(value).encode()), mangled(good))
    path = folder / "config.yaml"

    @budget(n)
    @given(texts)
    def run(raw: bytes) -> None:
        path.write_bytes(raw)
        attempt(tally, "hostile config", lambda: parse(["--config", str(path)]))

    run()


def fuzz_overrides(tally: Tally, folder: Path, n: int) -> None:
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    keys = [
        f"{section}.{key}.{leaf}" if leaf else f"{section}.{key}"
        for section in ("model", "data")
        for key, value in CONFIG[section].items()
        for leaf in ("", *(value if isinstance(value, dict) else ()))
    ]
    words = st.one_of(
        VALUES.map(str),
        st.text(max_size=12),
        st.sampled_from(["null", "[]", "{}", ".inf", ".nan", "1e999", "!!python/name:os.system", "${model}"]),
    )

    @budget(n)
    @given(st.lists(st.tuples(st.sampled_from(keys), words), min_size=1, max_size=2))
    def run(pairs: list[tuple[str, str]]) -> None:
        overrides = [f"--{key}={word}" for key, word in pairs]
        attempt(tally, "hostile override", lambda: parse(["--config", str(path), *overrides]))

    run()


def checkpoint() -> dict[str, Any]:
    config = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=20, n_expert=4, n_expert_active=2)
    model = Backbone(config, "unified")
    made = {"backbone": asdict(config), "scale": "unified", "scale_options": asdict(ScaleOptions())}
    state = {f"backbone.{name}": value for name, value in model.state_dict().items()}
    return {CHECKPOINT_KEY: made, "state_dict": state, "global_step": 3}


#: tensors of other kinds and shapes, and one that claims a terabyte
TENSORS = st.sampled_from(
    [
        torch.zeros(3),
        torch.zeros(16, dtype=torch.int64),
        torch.zeros(16, dtype=torch.complex64),
        torch.zeros(()).expand(1 << 20, 1 << 20),
        torch.zeros(4, 4).to_sparse(),
        torch.full((16, 16), float("nan")),
    ]
)


def fuzz_checkpoints(tally: Tally, folder: Path, n: int) -> None:
    path = folder / "last.ckpt"
    torch.save(checkpoint(), path)
    entries = edited(checkpoint(), st.one_of(VALUES, TENSORS))

    @budget(n)
    @given(st.one_of(entries, mangled(path.read_bytes())))
    def run(value: Any) -> None:
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            torch.save(value, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(tally, "hostile checkpoint", lambda: load_backbone(str(path)))

    run()


FUZZ = {
    "strategies": (lambda tally, folder, n: fuzz_strategies(tally, n), 2000),
    "configs": (fuzz_configs, 500),
    "overrides": (fuzz_overrides, 500),
    "checkpoints": (fuzz_checkpoints, 1600),
}


@pytest.mark.parametrize(("kind", "n"), few_and_all({kind: n for kind, (_, n) in FUZZ.items()}, few=15))
def test_hostile_inputs_are_read_or_refused(tally: Tally, tmp_path: Path, kind: str, n: int) -> None:
    FUZZ[kind][0](tally, tmp_path, n)
