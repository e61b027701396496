"""One training step as in `fit`: loss in bf16 autocast, backward, clipping, fused AdamW."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.gpu.sizes import Size
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn import BackboneConfig, router_loss
from lightning_sv.nn.backbone import INDUCTOR, CompileMode, compile_backbone
from lightning_sv.optim import OptimConfig, build_optimizer
from lightning_sv.scale import ScaleVector


@dataclass
class Trainee:
    """A model in training.

    Attributes:
        name: name of the arm or peer.
        step: one optimizer step on one micro-batch.
        flops: FLOPs of a step, forward and backward.
        tokens: tokens of a step.
        model: module with the parameters.
    """

    name: str
    step: Callable[[], None]
    flops: float
    tokens: int
    model: nn.Module


def prepare_compiler() -> None:
    """Compile for fixed shapes and several models with the same code in one process."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 512)


def draw_tokens(size: Size, batch: int, device: torch.device) -> Tensor:
    """Return (batch, seq_len + 1) token ids; their values do not affect times."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, size.seq_len + 1)
    return torch.randint(0, size.config.vocab_size, shape, generator=generator).to(device)


def ours(
    arm: str,
    size: Size,
    batch: int,
    device: torch.device,
    *,
    compile: CompileMode = "block",
    inductor: dict[str, Any] | None = None,
    **settings: Any,
) -> Trainee:
    """Return our model under a strategy, with the parts of `PretrainModule`.

    Args:
        arm: the strategy
        size: the model
        batch: sequences per micro-batch
        device: device of the training
        compile: `model.compile`
        inductor: Inductor's options in addition to the package's
        **settings: further arguments of `PretrainModule`
    """
    module = PretrainModule(size.config, scale=arm, optim=OptimConfig(lr=1e-3), seed=0, **settings)
    with torch.device(device), patch("lightning_sv.nn.backbone.init_weights", _draw_there):
        module.configure_model()
    module.net.to(device).train()
    compile_backbone(module.net, compile, INDUCTOR | (inductor or {}))
    optimizer = build_optimizer(
        module.settings.plan.parameter_groups(module.net),
        module.settings.optim,
        module.settings.plan.lr,
    )
    block = draw_tokens(size, batch, device)

    def loss() -> Tensor:
        nats, routings = module.loss(block)
        return nats + router_loss(routings, size.config)

    tokens = batch * size.seq_len
    step = step_of(loss, module.net, optimizer, device)
    return Trainee(
        arm, step, module.settings.plan.flops_per_token(size.seq_len) * tokens, tokens, module.net
    )


def step_of(
    loss: Callable[[], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Callable[[], None]:
    """Run one step: loss under autocast, backward, clipping, optimizer; frees the gradients."""
    parameters = list(model.parameters())

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # nothing without CUDA graphs
        with torch.autocast(device.type, torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@torch.no_grad()
def _draw_there(model: nn.Module, config: BackboneConfig, seed: int) -> None:
    """Initialize on the device: a billion numbers take ten seconds on the CPU."""
    vectors: set[Any] = set()
    for module in model.modules():
        if isinstance(module, ScaleVector):
            module.reset_parameters()
            vectors |= set(module.parameters())
    for parameter in model.parameters():
        if parameter not in vectors:
            parameter.normal_(std=config.init_std)
