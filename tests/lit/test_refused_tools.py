"""Tools of Lightning that change what is trained are refused, before anything changes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as tools
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner.tuning import Tuner

from lightning_sv import TokenDataModule
from lightning_sv.__main__ import main
from lightning_sv.errors import ConfigError
from lightning_sv.lit.distributed import join_ranks
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.run_arguments import run_parser
from lightning_sv.lit.supported import check_supported
from lightning_sv.settings.trainer import (
    REFUSED_CALLBACKS,
    REFUSED_EVERYWHERE,
    check_trainer_keys,
)
from tests.conftest import argv
from tests.lit.own_trainer import module

#: those that the package refuses in any Trainer
CALLBACKS = [
    tools.LearningRateFinder(),
    tools.BatchSizeFinder(),
    tools.GradientAccumulationScheduler({0: 1}),
    tools.StochasticWeightAveraging(0.1),
    tools.ModelPruning("l1_unstructured"),
    tools.BackboneFinetuning(),
]


def trainer(**changes: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, **changes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("named", "changes"),
    [
        *((type(each).__name__, {"callbacks": [each]}) for each in CALLBACKS),
        ("value", {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
        (
            "16-mixed",
            {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        ),
    ],
)
def test_own_trainer_with_an_unsupported_tool_is_refused_before_the_weights(
    named: str, changes: dict[str, Any], data: TokenDataModule
) -> None:
    made = module()
    with pytest.raises(ConfigError, match=f"is {named}; expected"):
        trainer(**changes).fit(made, data)
    assert made.backbone is None


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "callback",
    [tools.OnExceptionCheckpoint("."), tools.ModelCheckpoint(save_on_exception=True)],
    ids=lambda callback: type(callback).__name__,
)
def test_save_on_an_exception_is_refused_on_several_devices(
    callback: L.Callback, devices: int
) -> None:
    """Saving is a collective, and the other ranks wait in a different one."""
    made = module()
    made._trainer = L.Trainer(
        accelerator="cpu", devices=devices, callbacks=[callback], logger=False
    )
    is_refused = pytest.raises(ConfigError, match=f"^a callback is {type(callback).__name__}, ")
    with is_refused if devices > 1 else nullcontext():
        check_supported(made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_tuner_is_refused_before_anything_changes(search: str, data: TokenDataModule) -> None:
    made = module()
    before = made.lr, data.batch_size
    with pytest.raises(ConfigError, match="^a callback is "):
        getattr(Tuner(trainer()), search)(made, datamodule=data)
    assert before == (made.lr, data.batch_size) and made.backbone is None


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_command_line_refuses_a_callback_that_changes_training(name: str) -> None:
    assert hasattr(tools, name)
    assert set(REFUSED_EVERYWHERE) == {type(each).__name__ for each in CALLBACKS}
    given = run_parser().get_defaults()["trainer"].as_dict()
    with pytest.raises(ConfigError, match=name):
        check_trainer_keys(given | {"callbacks": f"{tools.__name__}.{name}"})


class OnCpu(FSDPStrategy):
    root_device = torch.device("cpu")


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_sharding_of_lightning_is_refused(kind: type) -> None:
    made = module()
    made._trainer = SimpleNamespace(
        callbacks=[],
        world_size=2,
        precision="32-true",
        gradient_clip_algorithm=None,
        strategy=object.__new__(kind),
    )
    with pytest.raises(ConfigError, match=f"^trainer.strategy is {kind.__name__};"):
        check_supported(made)
    with pytest.raises(ConfigError, match="^trainer.strategy is OnCpu;"):
        join_ranks(L.Trainer(accelerator="cpu", devices=2, strategy=OnCpu(), logger=False))


def test_sharding_of_a_module_of_your_own_is_refused() -> None:
    """Its gradients would be reduced by the attribute `net`, its states named by `settings`."""
    run = L.Trainer(accelerator="cpu", strategy=FullyShardedStrategy(), logger=False)
    run.strategy.connect(BoringModel())
    with pytest.raises(ConfigError, match="^trainer.strategy is .*BoringModel"):
        run.strategy.setup_environment()


def test_fit_warns_about_weights_in_bfloat16_once(
    data: TokenDataModule, run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(precision="bf16-true", enable_checkpointing=False).fit(module(), data)
    assert capsys.readouterr().err.count("bf16-true") == 1
    words = argv("--trainer.precision bf16-true --trainer.fast_dev_run true")
    assert main(["fit", *run_args, *words]) == 0
    assert capsys.readouterr().err.count("bf16-true") == 1


def test_averages_of_sharded_weights_are_refused() -> None:
    averages = tools.EMAWeightAveraging()
    run = L.Trainer(accelerator="cpu", strategy=FullyShardedStrategy(), callbacks=[averages])
    run.strategy.connect(module())
    run.strategy.lightning_module._trainer = run
    with pytest.raises(ConfigError, match="^a callback is EMAWeightAveraging;"):
        run.strategy.setup_environment()
