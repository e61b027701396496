"""Branches of a model, and norms of W, gamma and the effective W per branch (paper, Figure 4)."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.run_state import StepTrigger, model_of
from lightning_sv.callbacks.tensorboard_layout import Pages, chart_layout
from lightning_sv.callbacks.training_monitor import write_scalars
from lightning_sv.errors import expect
from lightning_sv.optim import full_tensor
from lightning_sv.scale import output_norms, scaled_linears
from lightning_sv.scale.definitions import effective_weight


class ScaledBranch(NamedTuple):
    """A matrix (*batch_dims, d_out, d_in) with its scale vectors, named as 'layer0/q_proj', or a norm without branches.

    `vectors` has the `ScaleVector` of each side ('in', 'out'), or a function that returns gamma.
    """

    name: str
    weight: Tensor | None
    vectors: dict[str, Callable[[], Tensor]]
    path: str  #: name if several branches have the same `name`

    def gammas(self) -> dict[str, Tensor]:
        """Return side -> gamma; a collective for sharded vectors."""
        return {side: full_tensor(vector()) for side, vector in self.vectors.items()}


def scaled_branches(model: nn.Module) -> list[ScaledBranch]:
    """Return every branch of `model`, then every output norm, then those of `apply_strategy`, in their order."""
    branches = [
        _branch(path, linear.weight, {"in": scale_in, "out": scale_out})
        for path, linear, (scale_in, scale_out) in scaled_linears(model)
    ]
    branches += [_branch(path, None, {"out": norm.scale}) for path, norm in output_norms(model)]
    for prefix, module, applied in applied_strategies(model):
        found = applied.branches(module)
        branches += [_branch(path, weight, sides, suffix, prefix) for path, suffix, weight, sides in found]
    counts = Counter(branch.name for branch in branches)
    return [b._replace(name=b.path) if counts[b.name] > 1 else b for b in branches]


def applied_strategies(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield path, module and `interop.apply.applied.Applied` of the modules that `apply_strategy` changed."""
    found = ((path, module, vars(module).get("applied_strategy")) for path, module in model.named_modules())
    return ((path, module, applied) for path, module, applied in found if applied is not None)


def _branch(
    path: str, weight: Tensor | None, vectors: dict[str, Any], suffix: str = "", prefix: str = ""
) -> ScaledBranch:
    name, vectors = path.rpartition(".")[2], {side: vector for side, vector in vectors.items() if vector is not None}
    unique = unique_place(f"{prefix}.{path}".removeprefix("."))
    return ScaledBranch(f"{place_of(path)}/{name}{suffix}", weight, vectors, unique + suffix)


def place_of(path: str) -> str:
    """Return 'layer3' for a module inside block 3, 'head' outside the blocks."""
    number = next((part for part in path.split(".") if part.isdigit()), None)
    return "head" if number is None else f"layer{number}"


def unique_place(path: str) -> str:
    """Return `place_of` with the complete path: 'layer3/decoder_blocks_mlp' for 'decoder.blocks.3.mlp'."""
    without_number = re.sub(r"\.\d+\b", "", path, count=1)
    return f"{place_of(path)}/{without_number.replace('.', '_')}"


def means_over_layers(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average 'layer0/q_proj/W', 'layer1/q_proj/W', ... as 'mean/q_proj/W'; longer keys are omitted."""
    over_layers: dict[str, list[Tensor]] = defaultdict(list)
    for key, value in figures.items():
        if key.startswith("layer") and key.count("/") == 2:
            over_layers[key.partition("/")[2]].append(value)
    return {f"mean/{key}": torch.stack(values).mean() for key, values in over_layers.items()}


class BranchCallback(L.Callback):
    """Callback that writes figures of a model's branches at the steps of `StepTrigger`, and before the first step."""

    def __init__(self, key: str, every_n_steps: int, model: str | None):
        self._clock, self.model = StepTrigger(key, every_n_steps), model

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the model and check that it has scale vectors, and that no second callback writes the same tags."""
        alike = [each for each in trainer.callbacks if type(each) is type(self)]  # type: ignore[attr-defined]
        hint = "Leave out `model`: then it measures all models of the module."
        expect(len(alike) == 1, f"number of {type(self).__name__} callbacks", len(alike), f"1. {hint}")
        model = self._model = model_of(pl_module, self.model)
        scaled = any(branch.vectors or branch.weight is not None for branch in scaled_branches(model))
        wanted = "a Backbone, a model built with ScaleBuilder, or a model after apply_strategy."
        expect(scaled, f"the model of {type(self).__name__}", f"{type(model).__name__}, without scale vectors", wanted)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the initial figures, unless the run is resumed."""
        self._clock.start(trainer)
        if trainer.global_step == 0:
            self._write(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write if the batch completed a step that is due."""
        if self._clock.ended(trainer) and self._is_due(trainer.global_step):
            self._write(trainer)

    def _is_due(self, step: int) -> bool:
        return self._clock.is_due(step)

    def _write(self, trainer: L.Trainer) -> None:
        raise NotImplementedError


def branch_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the norms of every branch of `model`, as scalar tensors keyed 'layer0/q_proj/W'.

    W: Frobenius norm of the weight; gamma_in, gamma_out: Euclidean norm over sqrt(width), so 1 at
    initialization; effective: Frobenius norm of diag(gamma_out) W diag(gamma_in) (paper, Section
    3.4). The head's branch is keyed 'head/lm_head/...'. 'mean/q_proj/...' averages over layers.
    For experts, the mean is returned, plus 'layer0/expert_up_proj/effective/expert3' for each. Norms
    without branches (Q/K-norm, Post-Norm) are keyed 'layer0/q_norm/gamma'.
    """
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for branch in scaled_branches(model):
            if branch.weight is None:
                (gamma,) = branch.gammas().values()
                out[f"{branch.name}/gamma"] = gamma.square().mean().sqrt()
            else:
                out |= {f"{branch.name}/{key}": value for key, value in _norms(branch.weight, branch.gammas()).items()}
    return out | means_over_layers(out)


def _norms(weight: Tensor, gammas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of one branch; a leading axis counts experts."""
    weight = full_tensor(weight)
    effective = torch.linalg.matrix_norm(effective_weight(weight, gammas.get("in"), gammas.get("out")))
    out = {"W": torch.linalg.matrix_norm(weight).mean(), "effective": effective.mean()}
    if effective.ndim:
        out |= {f"effective/expert{e}": value for e, value in enumerate(effective)}
    return out | {f"gamma_{side}": gamma.square().mean(-1).sqrt().mean() for side, gamma in gammas.items()}


class BranchNorms(BranchCallback):
    """Log `branch_norms` under branch_norm/, with Q, K and V together in one TensorBoard chart.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, every_n_steps: int = 50, model: str | None = None):
        super().__init__("every_n_steps of BranchNorms", every_n_steps, model)

    def charts(self) -> Pages:
        """Return one page per group of branches."""
        return chart_layout(branch_norms(self._model))

    def _write(self, trainer: L.Trainer) -> None:
        norms = branch_norms(self._model)
        values = torch.stack(list(norms.values())).tolist()  # one transfer from the device
        write_scalars(trainer, {f"branch_norm/{k}": v for k, v in zip(norms, values, strict=True)})
