"""Summary of a finished run: summary.json and a table."""

import hashlib
import json
import logging
import shlex
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.callbacks import tokens_seen
from lightning_sv.json_text import json_text
from lightning_sv.lit.checkpoint.compat import recorded_settings
from lightning_sv.lit.module import PretrainModule
from lightning_sv.optim import group_table
from lightning_sv.own_code import modules_named
from lightning_sv.runs.directory import PICTURE
from lightning_sv.runs.job import program
from lightning_sv.runs.provenance import Provenance
from lightning_sv.runs.segments import schedule_lengths
from lightning_sv.runs.trust import allow_words
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import ModelPlan, PretrainConfig

log = logging.getLogger(__name__)


def summarize(trainer: L.Trainer, module: PretrainModule, data: DataConfig) -> dict[str, Any]:
    """Collect the results of a finished run."""
    segments = module.exact_resume.segments_so_far(trainer, module)
    return {
        "label": module.settings.label,
        "meaning": str(module.settings.plan.canonical),
        "model": module.settings.backbone.name,
        "seed": module.init_seed,
        "steps": trainer.global_step,
        "tokens": tokens_seen(trainer),
        "epochs": data.epochs(tokens_seen(trainer)),
        "parameters": sum(p.numel() for p in module.net.parameters()),
        "activated_parameters": module.settings.plan.n_activated,
        "lr": None if module.own_optimizer else module.settings.plan.lr,
        **data.manifest.loss_metrics(float(trainer.callback_metrics["val/loss"])),
        "seconds": sum(segment["seconds"] for segment in segments),
        "legs": segments,
        "origin": module.exact_resume.origin,
        "built_by": module.built_by,
        "own_optimizer": module.own_optimizer,
        "torch": torch.__version__,
        **Provenance.now()._asdict(),
    }


def hyperparameters(trainer: L.Trainer, module: PretrainModule, data: DataConfig) -> dict[str, Any]:
    """Collect the values that identify a run in a logger's table, known before the first step.

    settings: a hash of everything that affects the weights except the seed, so equal for the runs
        of an arm.
    """
    own = module.own_optimizer
    return {
        "model": module.settings.backbone.name,
        "label": module.settings.label,
        "seed": module.init_seed,
        "optimizer": own or module.settings.optim.name,
        "schedule": module.settings.schedule.name,
        "lr": "" if own else module.settings.plan.lr,
        "weight_decay": "" if own else module.settings.optim.weight_decay,
        "init_std": module.settings.backbone.init_std,
        "steps": trainer.max_steps,
        "tokens": trainer.max_steps * data.tokens_per_step,
        "batch": data.global_batch,
        "seq_len": data.seq_len,
        "corpus": f"{Path(data.corpus.dir).name} {data.manifest.corpus_hash[:8]}",
        "parameters": module.settings.plan.n_params,
        "init_from": module.settings.init_from or "",
        "settings": _settings_hash(trainer, module, data),
    }


def _settings_hash(trainer: L.Trainer, module: PretrainModule, data: DataConfig) -> str:
    identity = recorded_settings(module.settings, data) | {
        "corpus_hash": data.manifest.corpus_hash,
        "steps": trainer.max_steps,
        "precision": str(trainer.precision),
        "clip": trainer.gradient_clip_val,
        "origin": module.exact_resume.origin,
    }
    if module.own_optimizer:
        identity["optimizer"] = module.own_optimizer
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def print_groups(console: Console, module: PretrainModule, steps: int, data: DataConfig) -> None:
    """Print the budget and the parameter groups before training."""
    console.print(_budget(module.settings, steps, data))
    if module.built_by:
        numbers = "these numbers are those of PretrainModule"
        console.print(f"the model is that of {module.built_by}; {numbers}")
    if module.own_optimizer:
        console.print(f"the optimizer is that of {module.own_optimizer}")
    if not module.built_by and not module.own_optimizer:
        console.print(_group_table(module.settings.plan))


def _budget(settings: PretrainConfig, steps: int, data: DataConfig) -> str:
    """Return a line with the parameters, the steps and the tokens of a run."""
    plan = settings.plan
    tokens = steps * data.tokens_per_step
    parameters = f"{plan.n_params:,} parameters"
    kind = "parameter"
    if plan.n_activated < plan.n_params:
        parameters += f" ({plan.n_activated:,} activated per token)"
        kind = "activated parameter"
    name = f"[bold]{settings.backbone.name}[/bold], [bold]{escape(settings.label)}[/bold]"
    work = f"{steps:,} steps of {data.global_batch} x {data.seq_len} = {tokens:,} tokens"
    return f"{name}: {parameters}, {work} ({tokens / plan.n_activated:.1f} per {kind})"


def _group_table(plan: ModelPlan) -> Table:
    table = Table("role")
    for name in ("tensors", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("optimizer")
    for name in ("peak lr", "weight decay"):
        table.add_column(name, justify="right")
    for row in group_table(plan.optimizer(plan.meta())):
        table.add_row(*row)
    return table


def show_summary(summary: dict[str, Any], run_dir: Path, *, as_json: bool) -> None:
    """Draw `run.png` and show the results of a complete run; a failed picture is only a warning."""
    try:
        # Import matplotlib here, because it would delay every start.
        from lightning_sv.plots.run_plot import draw_run
        from lightning_sv.runs.events import read_run

        draw_run(read_run(run_dir), run_dir / PICTURE)
    except Exception as error:
        log.warning(
            "%s could not be drawn (%s: %s)", run_dir / PICTURE, type(error).__name__, error
        )
    if as_json:
        print(json_text({"run_dir": str(run_dir), **summary}))
        return
    console = Console()
    console.print(_result_table(summary))
    for name, text in suggestions(summary, run_dir).items():
        console.print(f"{name:8} {text}", markup=False, highlight=False, soft_wrap=True)


def _result_table(summary: dict[str, Any]) -> Table:
    title = escape(f"{summary['model']}, {summary['label']}")
    table = Table(
        Column(), Column(justify="right"), title=title, title_justify="left", show_header=False
    )
    table.add_row("validation loss", f"{summary['val_loss']:.4f} nats/token")
    table.add_row("perplexity", f"{summary['val_perplexity']:.2f}")
    table.add_row("bits per byte", f"{summary['val_bits_per_byte']:.4f}")
    table.add_row("training tokens", f"{summary['tokens']:,}")
    minutes, seconds = divmod(round(summary["seconds"]), 60)
    table.add_row("time", f"{minutes}:{seconds:02d}")
    lengths = schedule_lengths(summary)
    if lengths:
        table.add_row("trainer.max_steps, segment by segment", " ".join(map(str, lengths)))
    return table


def suggestions(summary: dict[str, Any], run_dir: Path) -> dict[str, str]:
    """Return name -> path or command of the next steps."""
    tensorboard = str(Path(program()).with_name("tensorboard"))
    charts = [tensorboard, "--logdir", str(run_dir.parent), "--host", "127.0.0.1"]
    shown = {"picture": str(run_dir / PICTURE), "charts": shlex.join(charts)}
    if not summary.get("built_by"):
        trusted = allow_words(modules_named(summary["label"]))
        shown["sample"] = shlex.join([program(), "generate", str(run_dir), *trusted])
    return shown
