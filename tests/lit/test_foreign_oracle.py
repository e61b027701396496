"""`fit` against foreign code: models of Hugging Face, equations of the paper, optimizers of torch,
a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, PreTrainedModel

from lightning_sv import Backbone, PretrainCLI, PretrainModule
from lightning_sv.interop import to_hugging_face
from lightning_sv.runs.events import read_run
from tests.conftest import ROOT, argv, thinned
from tests.interop.wide import float64_throughout
from tests.paper_llama import PaperLlama

STEPS = 14
WARMUP = 3
LR = 1e-2
DECAY = 0.1
CLIP = 2.0
#: largest relative error of losses and final weights; float64 leaves 1e-13
NEAR = 1e-9
GEMMA = argv("--model.backbone.qk_norm true --model.backbone.post_norm true")
#: Learnable Multipliers (arXiv:2601.04890): every matrix is diag(r) W diag(c)
MULTIPLIERS = ["--config", str(ROOT / "conf/scale/learnable-multipliers.yaml")]
#: norms of Gemma 3 that a matrix follows at once
INPUT_NORMS = ("input_layernorm", "pre_feedforward_layernorm", "model.norm")


class Case(NamedTuple):
    """A strategy, the foreign model that it is, and which of that model's norms or scale vectors
    decay.

    The others have a decay of `kept`. With `free_vectors`, gradients of scale vectors are not
    clipped.
    """

    args: list[str]
    theirs: type[nn.Module]
    decays: Callable[[str], bool]
    muon: bool = False
    kept: float = 0.0
    free_vectors: bool = False
    clip: float = CLIP


CASES = {
    "wd": Case(["--model.scale", "llama"], LlamaForCausalLM, lambda norm: True),
    "nowd": Case(["--model.scale", "nowd"], LlamaForCausalLM, lambda norm: False),
    "muon": Case(["--model.scale", "llama"], LlamaForCausalLM, lambda norm: True, muon=True),
    "iwd, gemma, muon": Case(
        ["--model.scale", "iwd+offset", *GEMMA],  # their norms are 1 + w
        Gemma3ForCausalLM,
        lambda norm: any(name in norm for name in INPUT_NORMS),
        muon=True,
    ),
    "unified": Case(
        ["--model.scale", "unified"], PaperLlama, lambda vector: "scale_out" not in vector
    ),
    "unified, muon": Case(
        ["--model.scale", "unified"], PaperLlama, lambda vector: "scale_out" not in vector, True
    ),
    "hg+dp+or": Case(["--model.scale", "hg+dp+or"], PaperLlama, lambda vector: True),
    "ap+er": Case(["--model.scale", "ap+er"], PaperLlama, lambda vector: True),
    "multipliers": Case(
        MULTIPLIERS, PaperLlama, lambda vector: False, kept=0.002, free_vectors=True, clip=0.1
    ),
}


class Recorded(PretrainModule):
    """Notes its first weights, and its micro-batches with their losses."""

    def on_train_start(self) -> None:
        self.first = [copy.deepcopy(self.net)]  # in a list, which makes it no submodule
        self.blocks: list[Tensor] = []
        self.losses: list[float] = []

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        out = super().training_step(block, batch_idx)
        self.blocks.append(block.clone())
        self.losses.append(out["loss"].item())
        return out


def as_theirs(model: Backbone, kind: type[nn.Module]) -> nn.Module:
    if issubclass(kind, PaperLlama):
        return kind(model)
    theirs = to_hugging_face(model)
    assert type(theirs) is kind
    if kind is Gemma3ForCausalLM:
        # an optimizer treats scaled embeddings differently; the paper's Gemma has none
        theirs.model.embed_tokens.embed_scale.fill_(1.0)
        theirs.model.embed_tokens.weight.data.copy_(model.embed.weight)
    return theirs


def learning_rate(step: int) -> float:
    """Linear warm-up that peaks at step 3, then a cosine that is at a twentieth in the last
    step."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    angle = math.pi * (step - WARMUP) / (STEPS - 1 - WARMUP)
    return LR * (0.05 + 0.95 * (1 + math.cos(angle)) / 2)


def optimizers(theirs: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices inside blocks; every parameter decays but the norms that do
    not."""
    matrices = []
    decayed = []
    kept = []
    for name, parameter in theirs.named_parameters():
        if case.muon and name.endswith(("_proj.weight", "_proj/weight")):
            matrices.append(parameter)
        else:
            is_matrix = "norm" not in name and "scale" not in name
            (decayed if is_matrix or case.decays(name) else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": kept, "weight_decay": case.kept},
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    ]
    if case.muon:
        found.append(
            torch.optim.Muon(matrices, LR, DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
    return found


def train(theirs: nn.Module, case: Case, batches: list[Tensor]) -> tuple[list[float], list[float]]:
    """The losses, and the gradient's norms before clipping."""
    losses = []
    norms = []
    mine = optimizers(theirs, case)
    clipped = [
        p for name, p in theirs.named_parameters() if not (case.free_vectors and "scale_" in name)
    ]
    for step, block in enumerate(batches):
        logits = theirs(input_ids=block[:, :-1]).logits
        loss = -logits.log_softmax(-1).gather(-1, block[:, 1:, None]).mean()
        theirs.zero_grad()
        loss.backward()
        norm = get_total_norm([p.grad for p in clipped])
        norms.append(get_total_norm([p.grad for p in theirs.parameters()]).item())
        for parameter in clipped:
            parameter.grad *= min(1.0, case.clip / (norm.item() + 1e-6))
        for optimizer in mine:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    "name", thinned(CASES, ("wd", "unified, muon", "hg+dp+or", "ap+er", "multipliers"))
)
def test_fit_equals_foreign_code(name: str, run_args: list[str], tmp_path: Path) -> None:
    """`fit` has two micro-batches per step, the foreign code one batch."""
    case = CASES[name]
    words = (
        f"--trainer.precision 64-true --trainer.max_steps {STEPS} --data.micro_batch 2"
        f" --data.validations 1 --trainer.gradient_clip_val {case.clip} --model.optim.lr {LR}"
        f" --model.optim.name {'muon' if case.muon else 'adamw'} --model.backbone.init_std 0.1"
        f" --model.schedule.warmup_ratio {WARMUP / STEPS} --run_dir {tmp_path / 'run'}"
    )
    made: Any = PretrainCLI(Recorded, args=["fit", *run_args, *case.args, *argv(words)]).model
    batches = [torch.cat(pair) for pair in zip(made.blocks[::2], made.blocks[1::2], strict=True)]
    ours = [sum(pair) / 2 for pair in zip(made.losses[::2], made.losses[1::2], strict=True)]
    assert len(batches) == STEPS and batches[0].shape == (4, 33)
    wide: AbstractContextManager[Any] = nullcontext()
    if issubclass(case.theirs, PreTrainedModel):
        wide = float64_throughout(case.theirs)
    with wide:
        theirs, expected = (as_theirs(model, case.theirs) for model in (*made.first, made.net))
        losses, norms = train(theirs, case, batches)
    # clipping bites in some steps and not in others
    assert case.free_vectors or min(norms) < CLIP < max(norms)
    assert losses[-1] < losses[0] - 0.5
    assert ours == pytest.approx(losses, rel=NEAR, abs=0)
    assert read_run(tmp_path / "run").curve("grad_norm").values == pytest.approx(norms, rel=1e-6)
    weights = dict(theirs.named_parameters())
    for key, weight in expected.named_parameters():
        assert (weight - weights[key]).norm() <= NEAR * weights[key].norm(), key
