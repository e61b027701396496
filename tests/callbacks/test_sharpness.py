"""Sharpness: the parameters of a probe, its budget, and an undisturbed run."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.callbacks import Sharpness
from lightning_sv.callbacks.sharpness import parameter_subsets
from lightning_sv.errors import ConfigError
from lightning_sv.scale import ScaleVector
from tests.conftest import GEMMA, MOE


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
@pytest.mark.parametrize("family", ["llama", "gemma", "moe"])
def test_parameter_subsets_partition_by_role_and_layer(text: str, family: str, config: BackboneConfig) -> None:
    if (text, family) == ("unified", "gemma"):
        text = "hg+dp"  # q and k would be normalized twice
    model = Backbone(replace(config, **{"llama": {}, "gemma": GEMMA, "moe": MOE}[family]), text)
    every = dict(model.named_parameters())
    name_of, found = {id(p): name for name, p in every.items()}, parameter_subsets(model)
    subsets = {subset: {name_of[id(p)] for p in members} for subset, members in found.items()}
    assert all(len(subsets[subset]) == len(members) for subset, members in found.items())
    assert subsets["all"] == set(every)
    roles = ("matrix", "router", "head", "embedding", "scale_input", "scale_output")
    assert sum(len(subsets[role]) for role in roles) == len(every)
    assert set().union(*(subsets[role] for role in roles)) == set(every)
    vectors = [(path, module) for path, module in model.named_modules() if isinstance(module, ScaleVector)]
    for role in ("input", "output"):
        assert subsets[f"scale_{role}"] == {name for name in every for v, m in vectors if m.role == role and v in name}
    assert subsets["layer1"] == {name for name in every if name.startswith("layers.1.")}
    own = {name for name in every if ".q_proj." in name}
    shared = {name for name in every if ".qkv.norm." in name}
    assert subsets["q_proj"] == own | shared and subsets.get("attn_norm", set()) == shared
    assert subsets["o_proj"] == {name for name in every if ".o_proj." in name}
    if family == "gemma" and text != "nop":
        assert subsets["k_norm"] == {name for name in every if ".k_norm." in name}
    if family == "moe":
        assert subsets["expert_down_proj"] == {name for name in every if ".expert_down_proj." in name}
        assert {name for name in every if ".expert_up_proj." in name} <= subsets["expert_up_proj"]


def trainer_stub(written: dict[int, dict[str, float]]) -> Any:
    logger = SimpleNamespace(log_metrics=lambda values, step: written.update({step: values}))
    strategy = SimpleNamespace(broadcast=lambda value: value, barrier=lambda: None)
    return SimpleNamespace(
        global_step=0, estimated_stepping_batches=1000, max_epochs=None, strategy=strategy, loggers=[logger],
        callbacks=[], callback_metrics={},
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 9), (10.0, 5), (40.0, 2), (1000.0, 2)])
def test_sharpness_beyond_its_budget_is_skipped(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 steps of 1 s and a budget of 5% leave 52 s for 9 probes."""
    written: dict[int, dict[str, float]] = {}
    trainer, module = trainer_stub(written), LightningModule()
    callback = Sharpness(loss=lambda module: torch.zeros(()))
    spent = 0.0

    def measure(*_: object) -> dict[str, float]:
        nonlocal spent
        spent += seconds
        return {"all/trace": 1.0}

    monkeypatch.setattr(callback, "_measure", measure)
    callback.clock = lambda: trainer.global_step + spent
    callback.on_train_start(trainer, module)
    for step in range(1, 1001):
        trainer.global_step = step
        for micro_batch in range(2):
            callback.on_train_batch_end(trainer, module, {}, None, micro_batch)
    probed = [step for step, values in written.items() if "sharpness/all/trace" in values]
    skipped = [values["sharpness/skipped"] for values in written.values() if len(values) == 1]
    assert probed[0] == 0 and probed[-1] == 1000 and len(probed) == count and len(probed) + len(skipped) == 9
    assert skipped == list(range(1, len(skipped) + 1))
    assert spent <= 0.05 * (1000 + spent) or count == 2


def test_sharpness_loss_not_finite_is_logged_without_curvature() -> None:
    figures = Sharpness()._measure({}, lambda: torch.tensor(math.nan))
    assert list(figures) == ["loss"] and math.isnan(figures["loss"])


def test_sharpness_full_memory_names_the_cheaper_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError

    callback = Sharpness(loss=lambda module: torch.zeros(()))
    monkeypatch.setattr(callback, "_measure", full)
    with pytest.raises(ConfigError, match="method: difference"):
        callback.on_train_start(trainer_stub({}), LightningModule())
