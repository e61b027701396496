"""Sharpness: the parameters of a probe, its budget, and an undisturbed run."""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule

from lightning_sv import Backbone, BackboneConfig, TokenDataModule
from lightning_sv.callbacks import Sharpness
from lightning_sv.callbacks.sharpness import parameter_subsets
from lightning_sv.callbacks.sharpness.time_budget import TimeBudget
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids, next_token_loss
from lightning_sv.scale import ScaleVector
from lightning_sv.settings.data import DataConfig
from tests.conftest import GEMMA, MOE
from tests.lit.own_trainer import SIZES, module, rows, trainer


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
@pytest.mark.parametrize("family", ["llama", "gemma", "moe"])
def test_parameter_subsets_partition_by_role_and_layer(
    text: str, family: str, config: BackboneConfig
) -> None:
    if (text, family) == ("unified", "gemma"):
        text = "hg+dp"  # q and k would be normalized twice
    model = Backbone(replace(config, **{"llama": {}, "gemma": GEMMA, "moe": MOE}[family]), text)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    every = set(name_of.values())
    subsets = {}
    for subset, members in parameter_subsets(model).items():
        names = [name_of[parameter] for parameter in members]
        subsets[subset] = set(names)
        assert len(names) == len(subsets[subset])

    def named(part: str) -> set[str]:
        return {name for name in every if part in name}

    assert subsets["all"] == every
    roles = ("matrix", "router", "head", "embedding", "scale_input", "scale_output")
    assert sorted(chain.from_iterable(subsets[role] for role in roles)) == sorted(every)
    for role in ("input", "output"):
        expected: set[str] = set()
        for path, vector in model.named_modules():
            if isinstance(vector, ScaleVector) and vector.role == role:
                expected |= named(f"{path}.")
        assert subsets[f"scale_{role}"] == expected
    assert subsets["layer1"] == named("layers.1.")
    assert subsets["q_proj"] == named(".q_proj.") | named(".qkv.norm.")
    assert subsets.get("attn_norm", set()) == named(".qkv.norm.")
    assert subsets["o_proj"] == named(".o_proj.")
    assert subsets.get("k_norm", set()) == named(".k_norm.")
    assert subsets.get("expert_down_proj", set()) == named(".expert_down_proj.")
    assert named(".expert_up_proj.") <= subsets.get("expert_up_proj", set())


def trainer_stub(written: dict[int, dict[str, float]]) -> Any:
    logger = SimpleNamespace(log_metrics=lambda values, step: written.update({step: values}))
    strategy = SimpleNamespace(broadcast=lambda value: value, barrier=lambda: None)
    return SimpleNamespace(
        global_step=0, estimated_stepping_batches=1000, max_steps=1000, strategy=strategy, loggers=[logger],
        callbacks=[], callback_metrics={},
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 9), (10.0, 5), (40.0, 2), (1000.0, 2)])
def test_sharpness_beyond_its_budget_is_skipped(
    seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 steps of 1 s and a budget of 5% leave 52 s for 9 probes."""
    written: dict[int, dict[str, float]] = {}
    trainer = trainer_stub(written)
    module = LightningModule()
    callback = Sharpness(loss=lambda module: torch.zeros(()))
    spent = 0.0

    def measure(*_: object) -> dict[str, float]:
        nonlocal spent
        spent += seconds
        return {"all/trace": 1.0}

    monkeypatch.setattr(callback.loss, "figures", measure)
    callback.time.clock = lambda: trainer.global_step + spent
    callback.on_train_start(trainer, module)
    for step in range(1, 1001):
        trainer.global_step = step
        for micro_batch in range(2):
            callback.on_train_batch_end(trainer, module, {}, None, micro_batch)
    probed = [step for step, values in written.items() if "sharpness/all/trace" in values]
    skipped = [values["sharpness/skipped"] for values in written.values() if len(values) == 1]
    assert probed[0] == 0 and probed[-1] == 1000
    assert len(probed) == count and len(skipped) == 9 - count
    assert skipped == list(range(1, len(skipped) + 1))
    assert spent <= 0.05 * (1000 + spent) or count == 2


@pytest.mark.parametrize(
    ("step", "affordable"), [(0, True), (500, False), (999, False), (1001, True)]
)
def test_sharpness_first_and_last_are_never_skipped(step: int, affordable: bool) -> None:
    """Also if the last batch completes several steps."""
    budget = TimeBudget(0.05)
    budget.clock = lambda: 0.0
    budget.start(is_new=True)
    budget.measured(1000.0)
    assert budget.affords(step, 1000) == affordable


def test_sharpness_resumed_continues_its_budget() -> None:
    """Also from a checkpoint of an earlier version, which has the key `sequences`."""
    state = {"done": 2, "skipped": 1, "spent": 40.0, "run": 900.0}
    probe = Sharpness()
    probe.load_state_dict({"sequences": 3, **state})
    probe.time.clock = lambda: 0.0
    probe.time.start(is_new=False)
    assert probe.state_dict() == state
    probe.time.start(is_new=True)
    assert not any(probe.state_dict().values())


def test_sharpness_loss_is_that_of_training_in_float32(
    data: TokenDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = replace(SIZES, init_std=1.0)
    block = data.settings.held_out(8)
    frequent = int(block.flatten().mode().values)  # so that short sequences have several documents
    # of the class, because the fit replaces the config by one with a micro-batch
    monkeypatch.setattr(DataConfig, "manifest", replace(data.settings.manifest, eot=frequent))
    probe = Sharpness(("scale_input",), 2, sequences=8, lanczos_steps=1)
    run = trainer(tmp_path, probe, precision="bf16-mixed", max_steps=1, val_check_interval=None)
    run.fit(module(backbone=sizes, mask_documents=True), data)
    logged = [float(row["sharpness/loss"]) for row in rows(tmp_path) if row.get("sharpness/loss")]
    start = module(backbone=sizes)
    start.configure_model()
    tokens = block[:, :-1]
    targets = block[:, 1:]
    documents = document_ids(tokens, frequent)
    masked = next_token_loss(start.net(tokens, documents), targets).item()
    unmasked = next_token_loss(start.net(tokens), targets).item()
    assert logged[0] == pytest.approx(masked, rel=1e-6) and abs(masked - unmasked) > 1e-3


def test_sharpness_loss_not_finite_is_logged_without_curvature() -> None:
    figures = Sharpness().measurement.figures({}, lambda: torch.tensor(math.nan))
    assert list(figures) == ["loss"] and math.isnan(figures["loss"])


def test_sharpness_leaves_out_subsets_that_are_frozen_by_now() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    measurement = Sharpness(("all", "scale_output")).measurement
    figures = measurement.figures({"all": (p,), "scale_output": ()}, lambda: p.square().sum())
    assert figures["all/lambda_max"] == pytest.approx(2)
    assert not any(key.startswith("scale_output") for key in figures)


def test_sharpness_full_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError

    callback = Sharpness(loss=lambda module: torch.zeros(()))
    monkeypatch.setattr(callback.loss, "figures", full)
    with pytest.raises(ConfigError, match="^a measurement of Sharpness"):
        callback.on_train_start(trainer_stub({}), LightningModule())
