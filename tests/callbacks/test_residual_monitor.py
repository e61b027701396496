"""RMS of sublayers over the residual stream, against the sums of the blocks written out; and probes in a run."""

from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_sv import Backbone, BackboneConfig, TokenDataModule
from lightning_sv.callbacks import ResidualMonitor, residual_ratios
from lightning_sv.cli.main import main
from lightning_sv.errors import ConfigError
from lightning_sv.nn.rope import rope_tables
from lightning_sv.runs.events import read_run


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("post_norm", [False, True])
def test_residual_ratios_equal_the_written_out_sums(post_norm: bool) -> None:
    config = BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=64, post_norm=post_norm)
    net, tokens = Backbone(config, "hg+or"), torch.randint(0, 64, (2, 8))
    expected, logs = {}, {"attn": 0.0, "ffn": 0.0}
    with torch.no_grad():
        x = net.embed(tokens)
        rope = rope_tables(8, config.head_width, config.rope_theta, x, config.rope_scaling)
        for i, block in enumerate(net.layers):
            for name in logs:
                y = block.attn(x, rope, None) if name == "attn" else block.ffn(x)[0]
                y = getattr(block, f"{name}_post_norm")(y)
                expected[f"layer{i}/{name}/ratio"] = rms(y) / rms(x)
                logs[name] += torch.tensor(rms(y) / rms(x)).log().item() / 2
                x = x + y
    expected |= {f"mean/{name}/ratio": torch.tensor(log).exp().item() for name, log in logs.items()}
    assert {key: value.item() for key, value in residual_ratios(net, tokens).items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("callback", "tag"),
    [("CopyingMonitor", "copying/second_minus_first"), ("ResidualMonitor", "residual/mean/attn/ratio")],
)
def test_held_out_probe_logs_and_leaves_the_run_unchanged(
    callback: str, tag: str, run_args: list[str], tmp_path: Path
) -> None:
    keys = {"--trainer.callbacks": f"lightning_sv.callbacks.{callback}", "--trainer.callbacks.points": "3"}
    probes = [word for pair in keys.items() for word in pair]
    for name, more in (("plain", []), ("probed", [*probes, "--trainer.callbacks.sequences", "4"])):
        assert main(["fit", *run_args, *more, "--run_dir", str(tmp_path / name)]) == 0
    plain, probed = (read_run(tmp_path / name) for name in ("plain", "probed"))
    assert plain.val_loss == probed.val_loss
    assert probed.curve(tag).tokens.tolist() == [512, 1024, 1536]


def test_residual_monitor_model_without_blocks_is_refused(corpus: Path) -> None:
    trainer = Trainer(max_steps=1, callbacks=[ResidualMonitor()], logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match="BoringModel"):
        trainer.fit(BoringModel(), TokenDataModule(corpus, seq_len=8, batch_size=2))
