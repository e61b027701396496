"""Sharpness: the parameters of a probe, its budget, and an undisturbed run."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig, PretrainModule
from lightning_sv.callbacks import Sharpness
from lightning_sv.callbacks.curvature_batch import parameter_subsets
from lightning_sv.corpus import CorpusConfig
from lightning_sv.scale import ScaleVector
from lightning_sv.settings.data import DataConfig
from tests.conftest import GEMMA, MOE, perturbed


def names_of(model: Backbone, members: Sequence[Tensor]) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    assert len({id(p) for p in members}) == len(members)
    return {names[id(p)] for p in members}


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
@pytest.mark.parametrize("family", ["llama", "gemma", "moe"])
def test_parameter_subsets_partition_by_role_and_layer(text: str, family: str, config: BackboneConfig) -> None:
    if (text, family) == ("unified", "gemma"):
        text = "hg+dp"  # q and k would be normalized twice
    model = Backbone(replace(config, **{"llama": {}, "gemma": GEMMA, "moe": MOE}[family]), text)
    every = dict(model.named_parameters())
    subsets = {name: names_of(model, members) for name, members in parameter_subsets(model).items()}
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


class Harness:
    """A run without its training: the parts of Trainer, module and data that the callback reads."""

    def __init__(self, config: BackboneConfig, text: str, steps: int, **arguments: Any):
        self.written: list[tuple[int, dict[str, float]]] = []
        self.now = 100.0
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randint(0, config.vocab_size, (4, 9), generator=generator)
        logger = SimpleNamespace(log_metrics=lambda values, step: self.written.append((step, values)))
        batches: Any = DataConfig(CorpusConfig(), seq_len=8, global_batch=8, validations=2, val_sequences=4)
        batches.held_out = lambda n: blocks[:n]
        data = SimpleNamespace(batches=batches)
        strategy = SimpleNamespace(broadcast=lambda value: value, barrier=lambda: None)
        self.trainer: Any = SimpleNamespace(
            max_steps=steps, estimated_stepping_batches=steps, global_step=0, is_global_zero=True, world_size=1,
            datamodule=data, strategy=strategy, loggers=[logger], callbacks=[],
        )  # fmt: skip
        self.module = PretrainModule(config, text, lr=0.1)
        self.module.backbone = perturbed(Backbone(config, text))
        self.callback = Sharpness(**arguments)
        self.callback.clock = lambda: self.now

    def run(self, seconds_a_step: float) -> None:
        self.callback.setup(self.trainer, self.module, "fit")
        self.callback.on_train_start(self.trainer, self.module)
        for step in range(1, self.trainer.max_steps + 1):
            self.trainer.global_step = step
            self.now += seconds_a_step
            for micro_batch in range(2):
                self.callback.on_train_batch_end(self.trainer, self.module, {}, None, micro_batch)
        self.callback.on_train_end(self.trainer, self.module)


@pytest.mark.parametrize("seconds", [0.5, 10.0, 40.0, 1000.0])
def test_sharpness_probes_beyond_the_budget_are_skipped(
    seconds: float, config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 steps of 1 s and a budget of 5% leave 52 s for 9 probes."""
    harness = Harness(config, "llama", 1000)

    def measure(*_: object) -> dict[str, float]:
        harness.now += seconds
        return {"all/trace": 1.0}

    monkeypatch.setattr(harness.callback, "_measure", measure)
    harness.run(seconds_a_step=1.0)
    probed = [step for step, values in harness.written if "sharpness/all/trace" in values]
    skipped = [values["sharpness/skipped"] for _, values in harness.written if len(values) == 1]
    assert probed[0] == 0 and probed[-1] == 1000 and len(probed) + len(skipped) == 9
    assert skipped == list(range(1, len(skipped) + 1))
    assert len(probed) == {0.5: 9, 10.0: 5, 40.0: 2, 1000.0: 2}[seconds]
    share = len(probed) * seconds / (1000 + len(probed) * seconds)
    assert share <= 0.05 or len(probed) == 2


def test_sharpness_loss_not_finite_is_logged_without_curvature(config: BackboneConfig) -> None:
    harness = Harness(config, "llama", 1)
    with torch.no_grad():
        harness.module.net.embed.weight.fill_(float("nan"))
    harness.run(seconds_a_step=1.0)
    (_, figures) = harness.written[0]
    assert math.isnan(figures["sharpness/loss"]) and "sharpness/all/trace" not in figures
