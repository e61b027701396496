"""Run each block of docs/extend.md and use the registered object."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sv import PretrainModule, apply_strategy, weight_decay_roles
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.claims.claim_types import KINDS as CLAIM_KINDS
from lightning_sv.experiments.kinds.base import KINDS, LoadedPanel
from lightning_sv.experiments.panel_checks import check_panel
from lightning_sv.experiments.spec import ArmSpec, ClaimSpec, PanelSpec, load_figure
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, role_groups
from lightning_sv.optim.build import OPTIMIZERS
from lightning_sv.optim.schedule import SCHEDULES
from lightning_sv.roles.ops import PRODUCTS, TRANSPOSED
from lightning_sv.scale import ScaleVector
from lightning_sv.scale.strategy import DECAYS, PARAMETERIZATIONS, PLACEMENTS
from lightning_sv.scale.validate import check_parameterization
from tests.experiments.fake_results import arm

PAGE = (Path(__file__).parents[1] / "docs/extend.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=64)


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Rows that a block adds are gone after the test."""
    with ExitStack() as stack:
        for table in (
            PARAMETERIZATIONS,
            PLACEMENTS,
            DECAYS,
            OPTIMIZERS,
            SCHEDULES,
            PRODUCTS,
            KINDS,
        ):
            stack.enter_context(mock.patch.dict(table))
        yield
        TRANSPOSED.discard("my_library::fused_linear")


def run(word: str) -> dict[str, Any]:
    (block,) = (block for block in BLOCKS if word in block)
    names: dict[str, Any] = {"__name__": "my_module"}
    exec(block, names)
    return names


def test_extend_page_blocks_are_run_here() -> None:
    words = (
        "SoftplusScale(",
        '"bnp"',
        "ScaleOptions(",
        "mixer =",
        "def rms",
        "MatrixNorms",
        "Cubed",
        "fused_linear",
        "KINDS",
    )
    assert len(BLOCKS) == len(words) and all(
        sum(word in block for block in BLOCKS) == 1 for word in words
    )


def test_parameterization_block_keeps_the_contract() -> None:
    names = run("SoftplusScale(")
    check_parameterization(names["SoftplusScale"])
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(
        names["model"](tokens), Backbone(SMALL, "llama")(tokens), atol=1e-5, rtol=1e-5
    )


def test_placement_and_decay_blocks_build_a_model() -> None:
    with pytest.warns(
        UserWarning, match=r"the same model as 'bnp\+nowd'"
    ):  # it has no output side that could decay
        model = Backbone(SMALL, run('"bnp"')["strategy"])
    assert (
        model.layers[0].attn.qkv.q_proj.scale_out is None
        and model.layers[0].attn.qkv.q_proj.norm_width == 16
    )


def test_options_and_group_blocks_build_a_model() -> None:
    Backbone(SMALL, "hg+dp", run("ScaleOptions(")["options"])
    names = run("mixer =")
    assert names["key"].shape == (2, 8, 32) and names["value"].shape == (2, 8, 64)


def test_optimizer_and_schedule_blocks_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_module", SimpleNamespace(**run("def rms")))
    model = Backbone(SMALL, "hg+dp")
    groups = role_groups(model, frozenset({"input"}))
    optimizer = build_optimizer(groups, OptimConfig("my_module:rms"), 0.1)
    assert type(optimizer) is type(build_optimizer(groups, OptimConfig("rms"), 0.1))
    tokens = torch.arange(9)[None]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    for name in ("linear", "my_module:linear"):
        assert ScheduleConfig(name, warmup_ratio=0.0).factor(5, 10) == 0.5


def test_callback_block_logs_in_a_trainer(tmp_path: Path) -> None:
    callback = run("MatrixNorms")["MatrixNorms"]()
    module = PretrainModule(BackboneConfig(16, 1, 2, 32), lr=1e-3, seed=0)
    batches = torch.utils.data.DataLoader(torch.randint(0, 32, (4, 9)), batch_size=2)
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    L.Trainer(
        max_steps=2,
        logger=logger,
        callbacks=[callback],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    ).fit(module, batches, batches)
    logger.save()
    assert "matrix_norm/backbone.embed.weight" in Path(logger.log_dir, "metrics.csv").read_text()


def test_student_block_is_studied() -> None:
    names = run("Cubed")
    assert names["losses"].shape == (3,) and names["is_faster"] and names["exact"][3] < 0
    assert (
        names["Cubed"]().rate(names["Cubed"]().initial(1, 2), np.array([[2, 1]])) == -5
    )  # of W alone, which is 0


@torch.library.custom_op("my_library::fused_linear", mutates_args=())
def fused_linear(input: Tensor, weight: Tensor) -> Tensor:
    return input @ weight.T


fused_linear.register_fake(lambda input, weight: input @ weight.T)
fused_linear.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.mT @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return fused_linear(self.norm(x), self.weight)


def test_traced_operation_block_scales_the_output_side() -> None:
    run("fused_linear")
    model = Fused()
    x = torch.randn(4, 8)
    apply_strategy(model, "ap", x)
    (scale,) = (each for each in model.modules() if isinstance(each, ScaleVector))
    before = model(x)
    gamma = 1 + torch.rand(8)
    scale.set_gamma(gamma)
    torch.testing.assert_close(model(x), gamma * before)


class FusedScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return fused_linear(self.norm(x), x)


def test_traced_operation_block_may_multiply_two_activations() -> None:
    run("fused_linear")
    roles = weight_decay_roles(FusedScores(), torch.randn(4, 8))
    assert roles["norm.weight"].role == "output"


@pytest.mark.parametrize(("claim", "is_decided"), [("less", True), ("slope", False)])
def test_panel_kind_block_is_a_kind_of_conf_paper(claim: str, is_decided: bool) -> None:
    run("KINDS")
    claims = [ClaimSpec(claim, a="hg", b="llama")]
    arms = {label: ArmSpec(label) for label in ("llama", "hg")}
    spec = PanelSpec("Losses", arms, claims, kind="worst_seed")
    if is_decided:
        check_panel(spec)
    else:
        with pytest.raises(ConfigError, match=claim):
            check_panel(spec)
    panel = LoadedPanel.of_arms(spec, [arm("hg", -0.1), arm("llama", 0.0, baseline=True)])
    table = panel.kind.table(panel)
    assert table["arm"].tolist() == ["llama", "hg"] and len(panel.pairs) == 1
    assert float(table["highest final loss"][0]) == pytest.approx(
        panel.arm("llama").losses.max(), abs=1e-4
    )


def test_extend_figure_with_claims(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(title.*?)```", PAGE, re.DOTALL)
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper/mine.yaml").write_text(text)
    figure = load_figure("mine", tmp_path)
    (panel,) = figure.panels
    check_panel(panel)
    assert [claim.kind for claim in panel.claims] == ["less", "equal"]


def test_extend_lists_every_kind_of_claim() -> None:
    (rows,) = re.findall(r"\| kind \| statement .*\n((?:\|.*\n)*)", PAGE)
    listed: list[str] = []
    for row in rows.splitlines()[1:]:
        _, kinds, *_ = row.split("|")
        listed += re.findall(r"`(\w+)`", kinds)
    assert sorted(listed) == sorted(CLAIM_KINDS)
