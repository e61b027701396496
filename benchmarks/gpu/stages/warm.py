"""Stage 2c: parallel compilation of the code of later stages; cold compile times."""

from dataclasses import replace
from typing import Any

from benchmarks.gpu.clock import USABLE, clock_of
from benchmarks.gpu.process import Job, Task, at_once
from benchmarks.gpu.sizes import ARMS, Size, size_of

#: memory of concurrent stages and of the processes' contexts
ELSEWHERE_GIB = 25


def run(task: Task) -> dict[str, Any]:
    """Compile each (size, arm, micro-batch) in its own process, as many as fit the GPU at once."""
    jobs = [_job(task, *case) for case in _cases(task.toy)]
    found: dict[str, Any] = {"cases": {}}
    room = USABLE * clock_of(task.device).total_bytes() / 2**30 - ELSEWHERE_GIB
    for name, outcome in at_once(jobs, most=2 if task.toy else 13, gib=room):
        case = {"seconds": outcome["seconds"]} | outcome["figures"]
        if outcome["state"] != "done":
            case |= {"state": outcome["state"], "error": outcome["error"]}
        found["cases"][name] = case
        task.save(found)
    return found


def _cases(toy: bool) -> list[tuple[str, str, str]]:
    """Return (size, arm, micro-batch) of each compilation."""
    cases = [("1b", arm, "protocol") for arm in ARMS]
    cases += [("0.12b", arm, "protocol") for arm in ARMS]
    cases += [("0.12b", peer, "protocol") for peer in ("Hugging Face compiled", "litgpt compiled")]
    cases += [("moe-0.25b", arm, "protocol") for arm in ("llama", "unified")]
    cases += [("0.12b", arm, "large") for arm in ARMS]
    cases += [("moe-0.25b", arm, "large") for arm in ("llama", "unified")]
    return cases[3:5] if toy else cases


def _job(task: Task, name: str, arm: str, batch: str) -> Job:
    options = {"size": name, "arm": arm, "batch": batch}
    size = size_of(name, task.toy)
    return Job(
        f"{name} {arm} {batch}",
        "benchmarks.gpu.stages.overhead:warm",
        replace(task, seconds=task.seconds - 3, options=options),
        gib(size, size.batches[batch]),
    )


def gib(size: Size, batch: int) -> float:
    """Estimate a block's memory: states of embedding and head, and four float32 logits."""
    states = 16 * 2 * size.config.vocab_size * size.config.d_model
    return (states + 16 * batch * size.seq_len * size.config.vocab_size) / 2**30 + 2
