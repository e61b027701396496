"""Golden losses: 20 steps of every strategy on the CPU, in float32 to the last bit, and in float64
for all machines.

`python -m tests.golden.record` records them in losses.json, those in float32 for this torch,
machine and CPU capability; with `--print` these go to stdout. The process that measures them has
ENVIRONMENT: torch's plain kernels, one code path of MKL and oneDNN for all CPUs, one thread. What
remains are the C library's exp and log, and the processor's family: they are in the key. An Intel
Xeon and an AMD EPYC give the same bits.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.nn import router_loss
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, role_groups
from tests.conftest import BUILDS, GEMMA, MOE, ROOT

FILE = Path(__file__).with_name("losses.json")
#: Without MKL's switch, with two threads, or (Muon's bfloat16 products) with oneDNN's free choice,
#: losses differ.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
STEPS = 20
BATCH = 4
LENGTH = 16
#: the record that any machine is near to
FLOAT64 = "float64"
#: how far the last record in float32 is from float64
ROUNDING = "rounding"
#: case -> (strategy, what differs from the smallest Llama, optimizer, schedule)
CASES: dict[str, tuple[str, dict[str, Any], OptimConfig, ScheduleConfig]] = {
    **{build: (f"{build}+iwd", {}, OptimConfig(), ScheduleConfig()) for build in BUILDS},
    "gemma, hg+dp+or": ("hg+dp+or+iwd", GEMMA, OptimConfig(), ScheduleConfig()),
    "experts, llama": ("llama", MOE, OptimConfig(), ScheduleConfig()),
    "experts, unified": ("unified", MOE, OptimConfig(), ScheduleConfig()),
    "muon, float32": ("unified", {}, OptimConfig("muon", ns_dtype="float32"), ScheduleConfig()),
    "muon, bfloat16": ("unified", {}, OptimConfig("muon"), ScheduleConfig()),
    "muon, experts": ("unified", MOE, OptimConfig("muon", ns_dtype="float32"), ScheduleConfig()),
    "wsd": ("unified", {}, OptimConfig(), ScheduleConfig("wsd")),
}


def key() -> str:
    """What the last bit depends on."""
    version = torch.__version__.partition("+")[0]
    where = f"{platform.machine()} {platform.libc_ver()[0] or platform.system()}"
    return f"torch {version} / {where} / {torch.backends.cpu.get_cpu_capability()}"


def distance(one: Sequence[float], two: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a / b - 1) for a, b in zip(one, two, strict=True))


def stream(vocab: int, n: int) -> Tensor:
    """A Markov chain in integers: each token is one of four successors of the last, the first ones
    likelier."""
    generator = torch.Generator().manual_seed(7)
    successors = torch.randint(vocab, (vocab, 4), generator=generator).tolist()
    choices = torch.randint(10, (n,), generator=generator).tolist()
    ids = [0]
    for choice in choices[1:]:
        ids.append(successors[ids[-1]][(0, 0, 0, 0, 0, 0, 1, 1, 2, 3)[choice]])
    return torch.tensor(ids)


def draw_uniform(model: Backbone) -> None:
    """Sample matrices that are equal on every machine: the last bit of normal numbers depends on
    the CPU."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.copy_(
                    (torch.rand(parameter.shape, dtype=torch.float64, generator=generator) - 0.5)
                    / 4
                )


def losses(
    case: str, steps: int = STEPS, dtype: torch.dtype = torch.float32, *, uniform: bool = False
) -> list[float]:
    """Training losses of one case: the backbone, its loss, clipping, optimizer and schedule as
    `fit` runs them.

    In float64 all of it is, Newton-Schulz as well. `uniform`: from weights of `draw_uniform`.
    """
    scale, changes, optim, schedule = CASES[case]
    if dtype == torch.float64:
        optim = replace(optim, ns_dtype="float64")
    config = BackboneConfig(
        **{"d_model": 32, "n_layer": 2, "n_head": 2, "vocab_size": 48, "init_std": 0.08, **changes}
    )
    blocks = stream(config.vocab_size, steps * BATCH * (LENGTH + 1)).view(steps, BATCH, LENGTH + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strategies that are the same model
        model = Backbone(config, scale, seed=3).to(dtype)
    if uniform:
        draw_uniform(model)
    optimizer = build_optimizer(role_groups(model, model.strategy.decayed_roles), optim, 1e-2)
    found = []
    for step, block in enumerate(blocks):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule.factor(step, steps)
        nats, routings = model(block[:, :-1], targets=block[:, 1:], with_routing=True)
        loss = nats + router_loss(routings, config)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        found.append(loss.item())
    return found


def measure() -> dict[str, Any]:
    """Return key and losses of a process of its own: what decides the kernels is read at its
    start."""
    command = [sys.executable, "-m", "tests.golden.record", "--print"]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main(argv: list[str]) -> None:
    if "--print" in argv:
        print(json.dumps({"key": key(), "losses": {case: losses(case) for case in CASES}}))
        return
    found = measure()
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    golden[found["key"]] = found["losses"]
    golden[ROUNDING] = {
        case: distance(found["losses"][case], losses(case, dtype=torch.float64)) for case in CASES
    }
    golden[FLOAT64] = {case: losses(case, dtype=torch.float64, uniform=True) for case in CASES}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{FILE.name}: {len(found['losses'])} cases under {found['key']!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
