"""Stages of the report, and which of them fit the time of a call."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

STAGES_OF = "benchmarks.gpu.stages"


@dataclass(frozen=True)
class Stage:
    """One part of the report.

    Attributes:
        name: name on the command line and of its file
        target: 'module:function'
        seconds: time limit; a stage starts only if this much is left
        beside: if True, it runs concurrently with the previous stage, because neither is timed
        last: if True, it runs at the end of every call
        options: options of the function
    """

    name: str
    target: str
    seconds: float
    beside: bool = False
    last: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def stage(
    name: str,
    module: str,
    seconds: float,
    *,
    beside: bool = False,
    last: bool = False,
    **options: Any,
) -> Stage:
    """Return the stage that runs `run` of a module of benchmarks.gpu.stages."""
    return Stage(name, f"{STAGES_OF}.{module}:run", seconds, beside, last, options)


#: arms that compile a full model are last: at 1B that could take all of the stage's time
PEER_ARMS = (
    "llama", "Hugging Face", "Hugging Face liger", "Hugging Face compiled", "litgpt compiled", "torchtitan compiled",
    "litgpt compiled, loss in one",
)  # fmt: skip
STAGES = (
    stage("ceilings", "ceilings", 40),
    stage("correctness", "correctness", 120),
    stage("fit", "fit", 120, beside=True),
    stage("warm", "warm", 120, beside=True),
    stage("memory", "memory", 120, beside=True),
    stage("attention", "attention", 120, beside=True),
    # several models of 1B leave no room for the large micro-batch
    stage("overhead-1b", "overhead", 120, size="1b", batches=["protocol"]),
    stage("overhead-0.12b", "overhead", 55, size="0.12b"),
    stage("profile-1b", "kernels", 80, size="1b", arms=["llama", "unified"]),
    stage("profile-0.12b", "kernels", 50, size="0.12b", arms=["llama", "unified"]),
    stage("candidates-1b-llama", "candidates", 100, size="1b", arm="llama"),
    stage("candidates-1b-unified", "candidates", 110, size="1b", arm="unified"),
    stage("candidates-0.12b-unified", "candidates", 85, size="0.12b", arm="unified"),
    stage("moe", "overhead", 45, size="moe-0.25b", arms=["llama", "unified"]),
    stage("peers", "overhead", 90, size="0.12b", arms=PEER_ARMS, batches=["protocol"]),
    stage("peers-1b", "overhead", 120, size="1b", arms=PEER_ARMS, batches=["protocol"]),
    stage("cache", "cache", 20, last=True),
)  # fmt: skip


def in_groups(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Return the stages in groups that run concurrently."""
    groups: list[list[Stage]] = []
    for each in stages:
        if each.beside and groups:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def time_of(group: list[Stage]) -> float:
    """Return the time limit of a group."""
    return max(each.seconds for each in group)


def fitting(groups: list[list[Stage]], seconds: float) -> list[list[Stage]]:
    """Return the groups that run within `seconds`, in order; a later, shorter one may still fit.

    Time for the stages that end every call is kept.
    """
    ending = [group for group in groups if group[0].last]
    left = seconds - sum(map(time_of, ending))
    chosen = []
    for group in groups:
        if group[0].last or time_of(group) > left:
            continue
        chosen.append(group)
        left -= time_of(group)
    return chosen + ending if chosen else []
