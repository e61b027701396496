"""One model in training: its whole optimizer step is a function without arguments that never waits for the host."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_sv.ladder.lane import Lane
from lightning_sv.ladder.plan import Ladder, RunPlan
from lightning_sv.ladder.text import Text
from lightning_sv.nn import Backbone, activated_parameters
from lightning_sv.nn.compiling import compile_backbone, prepare_compiler
from lightning_sv.optim import build_optimizer, parameter_groups

#: steps that are taken as they are before one is recorded: the optimizer makes its state in the first
WARM_UP = 3
#: what is compiled: nothing; each block, and the head with the loss, apart, in seconds; or one graph, in a minute
COMPILE = ("none", "block", "model")
Loss = Callable[[Backbone, Tensor], Tensor]


def _plain_loss(net: Backbone, block: Tensor) -> Tensor:
    loss: Tensor = net(block[:, :-1], targets=block[:, 1:])
    return loss


@cache
def _compiled_loss(how: str) -> Loss:
    """The loss of any model: as one graph, one compilation serves all of one size and strategy."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False  # another size is another graph, not a general one
    prepare_compiler()
    return torch.compile(_plain_loss, dynamic=False) if how == "model" else _plain_loss


class Trainee:
    """A run of the ladder: what `fit` does in a step, with all that it reads and writes on the device.

    The step's number is a tensor: from it the step reads its blocks and its learning rate, and writes its loss and
    gradient norm. So steps follow each other without the host.

    Args:
        run: what is trained
        ladder: batch, schedule, optimizer
        text: the corpus
        lane: where it runs
        compile: one of `COMPILE`
    """

    def __init__(self, run: RunPlan, ladder: Ladder, text: Text, lane: Lane, *, compile: str = "none"):
        self.run, self.ladder, self.text, self.lane = run, ladder, text, lane
        device = text.train.device
        self.net = Backbone(run.backbone, run.arm.scale, seed=run.seed).to(device)
        self.parameters = sum(p.numel() for p in self.net.parameters())
        self.activated = activated_parameters(self.net, run.backbone)
        self._compiled = compile != "none"
        self._loss = _compiled_loss(compile) if self._compiled else _plain_loss
        if compile == "block":
            compile_backbone(self.net, "block")
        self.done = 0
        #: (step, nats per token) of the validations so far, on the device
        self.validations: list[tuple[int, Tensor]] = []
        self.every = -(-run.steps // ladder.validations)
        self._order = text.order(run.seed, ladder.global_batch, run.steps)
        rates = [run.arm.lr * ladder.schedule.factor(step, run.steps) for step in range(run.steps)]
        # A fused step on CUDA takes its rate in float32, on a CPU in float64 as from `fit`.
        wide = torch.float32 if lane.cuda else torch.float64
        self.rates = torch.tensor(rates, dtype=wide, device=device)
        self.losses, self.norms = (torch.full((run.steps,), float("nan"), device=device) for _ in range(2))
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._lr = torch.zeros((), dtype=wide, device=device)
        groups = parameter_groups(self.net, self.net.strategy.decayed_roles)
        self.optimizer = build_optimizer(groups, ladder.optim, run.arm.lr)
        self._let_capture()
        self._replay: Callable[[], None] | None = None

    def _let_capture(self) -> None:
        """All groups read one rate from the device, as a recorded step must."""
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self._lr, True

    def step(self) -> None:
        """Loss, gradients, clipping, AdamW: step number `_at`."""
        block = self.text.train.index_select(0, self._order.index_select(0, self._at).flatten()).long()
        self._lr.copy_(self.rates.index_select(0, self._at).squeeze(0))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._nats(block)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.ladder.clip, foreach=True)
        self.optimizer.step()
        self.losses.index_copy_(0, self._at, loss.detach().float().view(1))
        self.norms.index_copy_(0, self._at, norm.view(1))
        self._at.add_(1)

    def _nats(self, block: Tensor) -> Tensor:
        # Weights are cast where they are used: the cache of casts would outlive a recorded step.
        with torch.autocast(block.device.type, torch.bfloat16, enabled=self.lane.cuda, cache_enabled=False):
            return self._loss(self.net, block)

    @property
    def finished(self) -> bool:
        """Whether the last step is taken."""
        return self.done >= self.run.steps

    def advance(self, most: int) -> int:
        """Put up to `most` steps on the lane, and a validation where one is due; return their number."""
        n = min(most, self.run.steps - self.done, self.every - self.done % self.every)
        with self.lane.active():
            if self._replay is None:
                n = min(n, WARM_UP)
                for _ in range(n):
                    self.step()
            else:
                for _ in range(n):
                    self._replay()
            self.done += n
            if self.done % self.every == 0 or self.finished:
                self.validate()
        return n

    def record(self) -> None:
        """Record the step; it must have run in this process."""
        if self._replay is None:
            self._replay = self.lane.record(self.step)

    def validate(self) -> None:
        """Put a validation on the lane: mean nats per token of the held-out blocks, weighted by tokens."""
        blocks = self.text.val
        nats = torch.zeros((), dtype=torch.float64, device=blocks.device)
        # Compiled, the graph of training serves: without gradients there would be another to compile.
        with torch.set_grad_enabled(self._compiled):
            for block in blocks.split(self.ladder.global_batch):
                nats += self._nats(block).detach().double() * block[:, 1:].numel()
        self.validations.append((self.done, nats / blocks[:, 1:].numel()))

    def state(self) -> dict[str, Any]:
        """What continues the run, as tensors and plain values."""
        return {
            "done": self.done,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "losses": self.losses[: self.done],
            "norms": self.norms[: self.done],
            "validations": [(step, float(nats)) for step, nats in self.validations],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.done = state["done"]
        self._at.fill_(self.done)
        self.net.load_state_dict(state["net"])
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": own["param_groups"]})
        self._let_capture()
        self.losses[: self.done], self.norms[: self.done] = state["losses"], state["norms"]
        device = self.losses.device
        self.validations = [
            (step, torch.tensor(nats, dtype=torch.float64, device=device)) for step, nats in state["validations"]
        ]
