"""Sharpness: the parameters of a probe, and an undisturbed run."""

import math
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning import LightningModule

from lightning_sv import Backbone, BackboneConfig, TokenDataModule
from lightning_sv.callbacks import Sharpness
from lightning_sv.callbacks.sharpness import parameter_subsets
from lightning_sv.callbacks.sharpness.model_copy import plain_copy
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids, meta_backbone, next_token_loss
from lightning_sv.scale import ScaleVector
from lightning_sv.settings.data import DataConfig
from tests.callbacks.stub import run_of
from tests.conftest import GEMMA, MOE
from tests.lit.own_trainer import SIZES, column, module, trainer

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gemma": GEMMA, "moe": MOE}
CASES = list(product(FAMILIES, ("llama", "hg+dp+or", "unified", "nop")))
CASES.remove(("gemma", "unified"))  # q and k would be normalized twice


@pytest.mark.parametrize(("family", "text"), [*CASES, ("gemma", "hg+dp")])
def test_parameter_subsets_partition_by_role(
    family: str, text: str, config: BackboneConfig
) -> None:
    model = Backbone(replace(config, **FAMILIES[family]), text)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    subsets = {}
    for subset, members in parameter_subsets(model).items():
        subsets[subset] = sorted(name_of[parameter] for parameter in members)

    every = sorted(name_of.values())
    assert subsets["all"] == every
    roles = ("matrix", "router", "head", "embedding", "scale_input", "scale_output")
    assert sorted(chain.from_iterable(subsets[role] for role in roles)) == every
    expected: dict[str, list[str]] = {"input": [], "output": []}
    for path, vector in model.named_modules():
        if isinstance(vector, ScaleVector):
            expected[vector.role] += [name for name in every if name.startswith(f"{path}.")]
    for role, names in expected.items():
        assert subsets[f"scale_{role}"] == sorted(names)


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
    first, *_ = column(tmp_path, "sharpness/loss")
    start = module(backbone=sizes)
    start.configure_model()
    tokens = block[:, :-1]
    targets = block[:, 1:]
    documents = document_ids(tokens, frequent)
    masked = next_token_loss(start.net(tokens, documents), targets).item()
    unmasked = next_token_loss(start.net(tokens), targets).item()
    assert first == pytest.approx(masked, rel=1e-6) and abs(masked - unmasked) > 1e-3


def test_sharpness_loss_not_finite_is_logged_without_curvature() -> None:
    figures = Sharpness().measurement.figures({}, lambda: torch.tensor(math.nan))
    assert list(figures) == ["loss"] and math.isnan(figures["loss"])


def test_sharpness_leaves_out_subsets_that_are_frozen() -> None:
    """Also in the copy that it measures."""
    model = Backbone(SIZES, "hg+dp+or", seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("scale_out" not in name)
    copy: Any = plain_copy(model, meta_backbone(SIZES, "hg+dp+or"), torch.device("cpu"), keep=True)
    measurement = Sharpness(("all", "scale_output"), lanczos_steps=1).measurement
    tokens = torch.arange(9).unsqueeze(0)
    loss = partial(copy, tokens[:, :-1], targets=tokens[:, 1:])
    figures = measurement.figures(parameter_subsets(copy), loss)
    assert "all/lambda_max" in figures
    assert not any(key.startswith("scale_output") for key in figures)


def test_sharpness_full_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Sharpness(loss=lambda module: torch.zeros(()))
    monkeypatch.setattr(callback.loss, "figures", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(ConfigError, match="^a measurement of Sharpness"):
        callback.on_train_start(run_of(1000), LightningModule())
