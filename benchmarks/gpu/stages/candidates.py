"""Candidates for a faster or smaller step, each against the package's own in one process.

The step of the package comes first; every candidate changes one thing of it. Their steps are
interleaved, so that drift affects all equally.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch._functorch.config as functorch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.joint_products import joint_products
from benchmarks.gpu.process import Task
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.stages.overhead import time_arms
from benchmarks.gpu.trainee import Trainee, ours
from lightning_sv.scale.fast import cross_entropy


@dataclass(frozen=True)
class Candidate:
    """One change.

    Attributes:
        inductor: Inductor's options in addition to the package's
        settings: arguments of `PretrainModule`
        context: makes the context in which the model is built and compiled
        arms: arms for which it is a change; () for all
        sizes: sizes for which it is measured; () for all
    """

    inductor: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    arms: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def partitioner(**settings: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a maker of contexts with settings of torch's partitioner."""
    return lambda: functorch.patch(**settings)


PACKAGE = "the package"
CANDIDATES: dict[str, Candidate] = {
    PACKAGE: Candidate(),
    "attention by flash": Candidate(settings={"attention_backend": "flash"}),
    "inputs of products recomputed": Candidate(
        context=partitioner(ban_recompute_materialized_backward=False)
    ),
    "activation_memory_budget 0.9": Candidate(context=partitioner(activation_memory_budget=0.9)),
    "mix-order reduction": Candidate(
        inductor={"triton.mix_order_reduction_non_strict_mode": True}, arms=("unified",)
    ),
    "norm of the logits by chunks": Candidate(
        context=lambda: patch.object(cross_entropy, "GRAM_FROM_ON_GPU", 1 << 30), arms=("unified",)
    ),
    "narrow residual": Candidate(settings={"residual": "narrow"}),
    "one product per norm": Candidate(context=joint_products),
    "max_autotune": Candidate(inductor={"max_autotune": True}),
    "CUDA graphs": Candidate(inductor={"triton.cudagraphs": True}, sizes=("0.12b",)),
    "the model as one graph": Candidate(settings={"compile": "model"}, sizes=("0.12b",)),
}


def run(task: Task) -> dict[str, Any]:
    """Time the candidates of options['arm'] at options['size'] in the protocol's batch."""
    clock = clock_of(task.device)
    names = names_of(task.options["arm"], task.options["size"])
    return time_arms(task, clock, names, ["protocol"], build_candidate)


def names_of(arm: str, size: str) -> list[str]:
    """Return the candidates of an arm and size, the package first."""
    names = []
    for name, candidate in CANDIDATES.items():
        if candidate.arms and arm not in candidate.arms:
            continue
        if candidate.sizes and size not in candidate.sizes:
            continue
        names.append(name)
    return names


def build_candidate(name: str, task: Task, size: Size, batch: int, clock: Clock) -> Trainee:
    """Return a candidate after its first step, which compiles it with its settings."""
    candidate = CANDIDATES[name]
    how = candidate.settings.get("compile", "block")
    settings = candidate.settings | {"compile": "none" if task.toy else how}
    if task.toy:
        settings.pop("attention_backend", None)  # a CPU has no choice
    with candidate.context():
        trainee = ours(
            task.options["arm"], size, batch, clock.device, inductor=candidate.inductor, **settings
        )
        trainee.step()
    return trainee
