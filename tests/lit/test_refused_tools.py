"""Tools of Lightning that change what is trained are refused, before anything changes."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as tools
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
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


ON_ERROR = tools.OnExceptionCheckpoint(".")
KEEPING = tools.ModelCheckpoint(save_on_exception=True)
#: a strategy, its devices, callbacks, and what the error names
ON_DEVICES: list[tuple[type, int, list[L.Callback], str | None]] = [
    (FSDPStrategy, 2, [], "^trainer.strategy is FSDPStrategy;"),
    (DeepSpeedStrategy, 2, [], "^trainer.strategy is DeepSpeedStrategy;"),
    (ModelParallelStrategy, 2, [], "^trainer.strategy is ModelParallelStrategy;"),
    # saving is a collective, and the other ranks wait in a different one
    (DDPStrategy, 2, [ON_ERROR], "^a callback is OnExceptionCheckpoint, "),
    (DDPStrategy, 2, [KEEPING], "^a callback is ModelCheckpoint, "),
    (DDPStrategy, 1, [ON_ERROR, KEEPING], None),
]


@pytest.mark.parametrize(("kind", "devices", "callbacks", "key"), ON_DEVICES)
def test_strategy_with_its_callbacks_is_refused_by_its_key(
    kind: type, devices: int, callbacks: list[L.Callback], key: str | None
) -> None:
    made = module()
    made._trainer = SimpleNamespace(
        callbacks=callbacks,
        world_size=devices,
        precision="32-true",
        gradient_clip_algorithm=None,
        strategy=object.__new__(kind),
    )
    with pytest.raises(ConfigError, match=key) if key else nullcontext():
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


def test_sharding_of_lightning_is_refused_before_ranks_join() -> None:
    with pytest.raises(ConfigError, match="^trainer.strategy is OnCpu;"):
        join_ranks(L.Trainer(accelerator="cpu", devices=2, strategy=OnCpu(), logger=False))


@pytest.mark.parametrize(
    ("made", "callback", "key"),
    [
        # its gradients would be reduced by the attribute `net`, its states named by `settings`
        (BoringModel, tools.Callback, "^trainer.strategy is .*BoringModel"),
        (module, tools.EMAWeightAveraging, "^a callback is EMAWeightAveraging;"),
    ],
)
def test_sharding_of_other_modules_and_of_averages_is_refused(
    made: Callable[[], L.LightningModule], callback: Callable[[], L.Callback], key: str
) -> None:
    strategy = FullyShardedStrategy()
    run = L.Trainer(accelerator="cpu", strategy=strategy, callbacks=[callback()], logger=False)
    run.strategy.connect(made())
    run.strategy.lightning_module._trainer = run
    with pytest.raises(ConfigError, match=key):
        run.strategy.setup_environment()


def test_fit_warns_about_weights_in_bfloat16_once(
    data: TokenDataModule, run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(precision="bf16-true", enable_checkpointing=False).fit(module(), data)
    assert capsys.readouterr().err.count("bf16-true") == 1
    words = argv("--trainer.precision bf16-true --trainer.fast_dev_run true")
    assert main(["fit", *run_args, *words]) == 0
    assert capsys.readouterr().err.count("bf16-true") == 1
