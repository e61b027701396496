"""A mixture of experts in a run: optimized parameters, updates of the biases, logged values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn import router_loss
from lightning_sv.runs.events import read_run
from tests.conftest import thinned


@pytest.mark.parametrize("balance", thinned(["bias", "loss"], ["bias"]))
def test_fit_moe_losses_biases_and_figures_equal_the_routings(
    balance: str, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has two micro-batches. The oracle is the routings that the training steps return."""
    seen: list[dict[str, Any]] = []
    original = PretrainModule.training_step

    def recorded(self: PretrainModule, block: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        out = original(self, block, batch_idx)
        seen.append(
            out | {"loss": out["loss"].detach().clone(), "routed": router_loss(out["routings"], self.settings.backbone)}
        )
        return out

    monkeypatch.setattr(PretrainModule, "training_step", recorded)
    args = ["--model.backbone.n_expert", "6", "--model.backbone.n_expert_active", "2", "--data.micro_batch", "2"]
    args += ["--model.backbone.router.balance", balance, "--model.backbone.router.z_coef", "0.1"]
    args += ["--model.backbone.router.bias_rate", "0.01", "--model.optim.lr", "6e-3", "--trainer.max_steps", "6"]
    assert main(["fit", *run_args, *args, "--experts.every_n_steps", "3", "--run_dir", str(tmp_path / "run")]) == 0
    assert len(seen) == 12
    for out in seen:
        torch.testing.assert_close(out["loss"], out["nats"] + out["routed"])
        assert out["routed"] > 0.1  # the z-loss of six nearly equal experts is log(6)^2 = 3.2
    record = read_run(tmp_path / "run")
    train = record.curve("train/loss").values
    means = [float(a["nats"] + b["nats"]) / 2 for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert train == pytest.approx(means, rel=1e-5)

    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for i in range(2):
        loads = torch.stack([out["routings"][i].load for out in seen])
        assert (loads.sum(-1) == 2 * 32 * 2).all()  # sequences, tokens, choices: none is dropped
        of_steps = loads.view(6, 2, 6).sum(1)
        key = f"backbone.layers.{i}.ffn.router_bias"
        if balance == "bias":
            moves = 0.01 * (of_steps.mean(-1, keepdim=True) - of_steps).sign()
            torch.testing.assert_close(checkpoint[key], moves.sum(0))
        else:
            assert key not in checkpoint
        for w, window in enumerate(loads.view(2, 6, 6)):  # two writes of three steps each
            share = window.sum(0) / window.sum(0).mean()
            found = [record.curve(f"moe/layer{i}/load/expert{e}").values[w] for e in range(6)]
            assert found == pytest.approx(share.tolist())
            assert record.curve(f"moe/layer{i}/load_max").values[w] == pytest.approx(float(share.max()))
            assert record.curve(f"moe/layer{i}/load_min").values[w] == pytest.approx(float(share.min()))
            for name in ("balance_loss", "entropy"):
                mean = sum(float(getattr(out["routings"][i], name)) for out in seen[6 * w : 6 * w + 6]) / 6
                assert record.curve(f"moe/layer{i}/{name}").values[w] == pytest.approx(mean, rel=1e-5)
