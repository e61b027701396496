"""Stage 2: comparison of the GPU's results with float64 on the CPU, one process per strategy.

Errors are relative norms: of the loss, of all gradients as one vector, and of the worst
parameter. TF32 is off.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.process import Job, Task, at_once
from benchmarks.gpu.sizes import ARMS
from lightning_sv.nn import Backbone, BackboneConfig, next_token_loss, router_loss
from lightning_sv.scale.fast.grouped import grouped_mm, grouped_mm_wgrad

CASES = (
    "moe:unified", "unified", "llama", "hg", "hg+dp+or", "nop", "ap", "dp", "dnp", "or", "er", "offset", "hg+or",
)  # fmt: skip
#: relative to float64, for float32: sums of thousands of terms in another order
FLOAT32 = 1e-5
#: for bf16: 2^-9 per rounding, through two blocks and back
BF16 = 2e-2

Gradients = dict[str, Tensor]


def run(task: Task) -> dict[str, Any]:
    """Check every case in its own process; the test suite checks one in this process."""
    found: dict[str, Any] = {"cases": {}, "limits": {"float32": FLOAT32, "bf16": BF16}}
    try:
        found["experts_without_rows"] = experts_without_rows(torch.device(task.device))
    except Exception as error:  # the strategies are still checked, in other processes
        found["experts_without_rows"] = {
            "ok": False,
            "error": f"{type(error).__name__}: {str(error)[:300]}",
        }
    task.save(found)
    jobs = [
        Job(
            case,
            f"{__name__}:check",
            replace(task, seconds=task.seconds - 3, options={"case": case}),
        )
        for case in CASES
    ]
    if task.toy:
        return found | {"cases": {jobs[0].name: check(jobs[0].task)}}
    for case, outcome in at_once(jobs, most=7):
        ended = (
            {}
            if outcome["state"] == "done"
            else {"state": outcome["state"], "error": outcome["error"]}
        )
        found["cases"][case] = outcome["figures"] | ended
        task.save(found)
    return found


def check(task: Task) -> dict[str, Any]:
    """Compare one case: errors of each way to compute loss and gradients."""
    if not task.toy:  # many run concurrently
        torch.set_num_threads(2)
    clock = clock_of(task.device)
    case = task.options["case"]
    family, _, scale = case.rpartition(":")
    config = BackboneConfig(d_model=256, n_layer=2, n_head=4, vocab_size=512)
    if task.toy:
        config = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=48)
    if family:
        config = replace(config, n_expert=8, n_expert_active=2)
    model = _perturbed(Backbone(config, scale, seed=1))
    generator = torch.Generator().manual_seed(2)
    block = torch.randint(0, config.vocab_size, (2, 17 if task.toy else 257), generator=generator)
    exact = gradients(model.double(), block, plain=True)
    found: dict[str, Any] = {"loss": float(exact["loss"])}
    model = model.float()
    found["cpu_float32"] = errors(gradients(model, block), exact)
    model = model.to(clock.device)
    block = block.to(clock.device)
    eager = gradients(model, block)
    found["float32"] = errors(eager, exact)
    found["again"] = errors(gradients(model, block), eager)
    task.save(found)
    found["plain_against_fast"] = errors(gradients(model, block, plain=True), eager)
    half = gradients(model, block, bf16=True)
    found["bf16"] = errors(half, exact)
    task.save(found)
    compiled = torch.compile(
        model.forward, dynamic=False, backend="aot_eager" if task.toy else "inductor"
    )
    found["compiled_against_eager"] = errors(gradients(model, block, forward=compiled), eager)
    if scale in ARMS:  # timed later
        found["compiled_bf16"] = errors(gradients(model, block, bf16=True, forward=compiled), exact)
    found["fails"] = failing(found, choice=bool(family))
    return found


def gradients(
    model: Backbone,
    block: Tensor,
    *,
    plain: bool = False,
    bf16: bool = False,
    forward: Callable[..., Any] | None = None,
) -> Gradients:
    """Return the loss and the gradient of every parameter, in float64 on the CPU.

    Args:
        model: model on any device.
        block: (B, T + 1) token ids.
        plain: if True, compute logits, reference backward passes and math attention, as second
            derivatives do; otherwise the chunked loss, as in training.
        bf16: autocast, as in training.
        forward: replaces the model's own.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.autocast(block.device.type, torch.bfloat16, enabled=bf16):
        with sdpa_kernel([SDPBackend.MATH] if plain else list(_ATTENTION)):
            targets = None if plain else block[:, 1:]
            nats, routings = (forward or model)(block[:, :-1], targets=targets, with_routing=True)
        if plain:
            nats = next_token_loss(nats, block[:, 1:])
        loss = nats + router_loss(routings, model.config)
    with sdpa_kernel([SDPBackend.MATH] if plain else list(_ATTENTION)):
        values = torch.autograd.grad(loss, parameters, create_graph=plain)
    pairs = zip(("loss", *names), (loss, *values), strict=True)
    return {name: value.detach().double().cpu() for name, value in pairs}


_ATTENTION = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


def errors(ours: Gradients, reference: Gradients) -> dict[str, Any]:
    """Return the relative errors of the loss, of the full gradient, and of the worst parameter.

    Parameters with a gradient below 1/1000 of the total are skipped there: that of a scale before a
    norm is 0.
    """
    names = [name for name in reference if name != "loss"]
    each = {name: _norm([ours[name] - reference[name]]) for name in names}
    sizes = {name: _norm([reference[name]]) for name in names}
    whole = math.hypot(*sizes.values())
    worst = max(
        names, key=lambda name: each[name] / sizes[name] if sizes[name] > 1e-3 * whole else 0.0
    )
    return {
        "loss": abs(float(ours["loss"] - reference["loss"])) / abs(float(reference["loss"])),
        "gradient": math.hypot(*each.values()) / whole,
        "worst": each[worst] / sizes[worst],
        "worst_parameter": worst,
    }


def failing(found: dict[str, Any], *, choice: bool) -> list[str]:
    """Return the names of the comparisons beyond their limits.

    Args:
        found: result of `check`.
        choice: if True, experts are selected; bf16 changes the selection of some tokens, so only
            float32 counts.
    """
    limits = dict.fromkeys(("float32", "plain_against_fast", "compiled_against_eager"), FLOAT32)
    if not choice:
        limits |= dict.fromkeys(("bf16", "compiled_bf16"), BF16)
    limits = {name: limit for name, limit in limits.items() if name in found}
    return [
        name
        for name, limit in limits.items()
        if not all(
            found[name][key] <= limit for key in ("loss", "gradient")
        )  # NaN exceeds any limit
    ]


def experts_without_rows(device: torch.device) -> dict[str, Any]:
    """Check grouped products with three empty blocks against a loop: zeros there and at the end."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.tensor([0, 16, 16, 40, 40], dtype=torch.int32)
    x, dy, w = (
        torch.randn(*shape, generator=generator) for shape in ((48, 24), (48, 21), (5, 21, 24))
    )
    x[40:] = 0
    dy[40:] = 0
    wanted_rows = torch.zeros(48, 21)
    wanted_blocks = torch.zeros(5, 21, 24)
    for e, (begin, end) in enumerate([(0, 0), (0, 16), (16, 16), (16, 40), (40, 40)]):
        wanted_rows[begin:end] = x[begin:end].bfloat16().float() @ w[e].bfloat16().float().T
        wanted_blocks[e] = dy[begin:end].bfloat16().float().T @ x[begin:end].bfloat16().float()
    on = [t.to(device) for t in (x.bfloat16(), dy.bfloat16(), w.bfloat16())]
    rows = grouped_mm(on[0], on[2], ends.to(device)).float().cpu()
    blocks = grouped_mm_wgrad(on[1], on[0], ends.to(device)).float().cpu()
    empty = bool((blocks[[0, 2, 4]] == 0).all()) and bool((rows[40:] == 0).all())
    found = {"zeros": empty, "rows": _norm([rows - wanted_rows]) / _norm([wanted_rows])}
    found["blocks"] = _norm([blocks - wanted_blocks]) / _norm([wanted_blocks])
    found["ok"] = empty and found["rows"] < 2**-7 and found["blocks"] < 2**-7
    return found


def _norm(values: Sequence[Tensor]) -> float:
    return float(
        torch.linalg.vector_norm(torch.cat([value.flatten() for value in values]).double())
    )


@torch.no_grad()
def _perturbed(model: Backbone) -> Backbone:
    """Perturb every parameter, so that no scale vector is 1."""
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        size = 0.3 * parameter.abs().mean().clamp(min=0.01)
        parameter.add_(size * torch.rand(parameter.shape, generator=generator))
    return model
