"""Models with a strategy on two processes, and in torch's compiler."""

from pathlib import Path

import pytest
import torch

from lightning_sv.interop import apply_strategy
from tests.interop.test_apply import ROUNDING, named
from tests.launch import launch


@pytest.mark.long
def test_apply_strategy_ddp_and_fsdp_same_losses(tmp_path: Path) -> None:
    ended = launch("tests.interop.several_processes", logs=tmp_path, seconds=300)
    assert ended.fine, ended


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_apply_strategy_compiled_model_same_gradients() -> None:
    """In one graph, the norms that dnp puts behind matrices included."""
    model, ids = named("llama", 0.3), torch.arange(4, 20)[None]
    model.model.layers = model.model.layers[:1]
    apply_strategy(model, "unified")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([loss.detach()[None], *gradients]))  # some are zero but for rounding: as one
    eager, other = found
    assert (other - eager).norm() < ROUNDING * eager.norm()
