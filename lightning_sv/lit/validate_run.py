"""One run of `validate`: check it, and show the loss."""

from pathlib import Path

from lightning_sv.errors import ConfigError
from lightning_sv.json_text import json_text
from lightning_sv.lit.command_run import CommandRun
from lightning_sv.runs.directory import LAST, run_of


class ValidateRun(CommandRun):
    """Check a validation before the Trainer's `validate`, and show its loss afterwards."""

    def check(self) -> None:
        """Check checkpoint and corpus, and choose the micro-batch.

        Raises:
            ConfigError: no checkpoint is given, or it does not fit
        """
        path = self.start.checkpoint
        if path is None:
            expected = f"a checkpoint to validate. Add --ckpt_path RUN/{LAST}."
            raise ConfigError(f"ckpt_path is not set; expected {expected}")
        self.read_checkpoint(path)
        run_dir = run_of(Path(path))
        if run_dir is not None:  # ModelCheckpoint warns if it is not that of the checkpoint
            self.trainer._default_root_dir = str(run_dir)  # type: ignore[attr-defined]
        self.check_corpus()
        self.set_micro_batch()

    def finish(self) -> None:
        """Print loss and perplexity on the first rank, as JSON with `--json`."""
        self.check_validated()
        if not self.trainer.is_global_zero:
            return
        loss = self.trainer.callback_metrics["val/loss"]
        corpus = self.data.manifest.corpus_hash
        perplexity = float(loss.exp())
        if self.config["json"]:
            numbers = {"val_loss": float(loss), "val_perplexity": perplexity}
            print(json_text({**numbers, "corpus_hash": corpus}, indent=None))
            return
        losses = f"val/loss {float(loss):.4f} nats/token, perplexity {perplexity:.2f}"
        print(f"{losses}, of corpus {corpus[:12]} in {self.data.corpus.dir}")
