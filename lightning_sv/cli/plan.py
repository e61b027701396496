"""`lightning-sv plan`: estimate memory, hours and data of a run."""

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.cli.names import resolve_names
from lightning_sv.gpus import GPUS, find_gpu
from lightning_sv.json_text import json_text
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.gpu_memory import USABLE
from lightning_sv.plan.parallel import STRATEGIES
from lightning_sv.plan.plan import MFUS, Plan, make_plan, measured_mfu
from lightning_sv.runs.events import read_run
from lightning_sv.runs.tags import MFU
from lightning_sv.settings.plain_parser import PlainParser, number


def run(argv: list[str]) -> int:
    """Parse the arguments, print the plan, return the exit code."""
    text = "Estimate GPU memory, hours, checkpoint size and data of a run. Other arguments are those of `fit`."
    parser = PlainParser("plan", text, json="Print the plan as JSON.")
    parser.add_argument("--gpus", type=number(int, 1, 1_000_000), required=True, help="Number of GPUs.")
    parser.add_argument("--gpu", default=GPUS[0].name, help=f"GPU model: {' '.join(gpu.name for gpu in GPUS)}.")
    parser.add_argument("--gpu_memory", type=number(float, most=1e6), help="GiB per GPU; by default that of --gpu.")
    parser.add_argument("--strategy", choices=STRATEGIES, help="Parallel strategy, by default trainer.strategy.")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--mfu", type=float, help="Fraction of the peak FLOP/s that the model reaches, e.g. 0.4.")
    speed.add_argument("--run", type=Path, help="Run directory; use the MFU that this run has logged.")
    options, rest = parser.parse_known_args(argv)
    gpu = find_gpu(options.gpu, options.gpu_memory)
    mfus: tuple[float, ...] = MFUS
    source = "no MFU is given or measured"
    if options.mfu is not None:
        mfus, source = (options.mfu,), "given"
    elif options.run is not None:
        logged = read_run(options.run, complete=False).curves.get(MFU)
        mfus, source = (measured_mfu(logged),), f"measured in {options.run}"
    module, data, trainer = parse_run(resolve_names(rest).now, check_corpus=False)
    plan = make_plan(module, data, trainer, gpu, options.gpus, strategy=options.strategy, mfus=mfus)
    if options.json:
        print(json_text(plan.to_dict() | {"mfu_source": source}))
    else:
        print_plan(Console(), plan, source)
    return 0


def print_plan(console: Console, plan: Plan, source: str) -> None:
    """Print the plan."""
    where = f"{plan.gpus} x {plan.gpu}, {plan.strategy}, {plan.precision}"
    title = escape(f"{plan.model}, {plan.label}, on {where}")
    table = Table("", Column(justify="right"), "", title=title, title_justify="left", show_header=False)
    recomputed = ", blocks recomputed" if plan.activation_checkpointing else ""
    batch = f"{plan.micro_batches} micro-batches of {plan.micro_batch} x {plan.seq_len:,} tokens{recomputed}"
    communication = {"ddp": "buckets of the gradients", "fsdp": "gathered blocks, embedding and head"}
    comments = {"optimizer": "its state", "activations": "and temporaries"}
    comments["communication"] = communication.get(plan.strategy, "")
    for name in ("weights", "gradients", "optimizer", "communication", "activations"):
        if value := getattr(plan.memory, name):
            table.add_row(name, f"{value / 2**30:.2f} GiB", comments.get(name))
    fits = "fits" if plan.fits else "does not fit"
    room = f"{fits}: {USABLE:.0%} of {plan.gpu_memory / 2**30:.1f} GiB are for tensors"
    table.add_row("peak per GPU", f"{plan.memory.peak / 2**30:.2f} GiB", f"[bold]{room}[/bold]")
    largest = plan.largest_micro_batch
    table.add_row("micro-batch", str(plan.micro_batch), f"largest that fits: {'none' if largest is None else largest}")
    table.add_section()
    table.add_row("run", f"{plan.steps:,} steps", f"{plan.tokens:,} tokens, {plan.flops:.3g} FLOPs")
    for mfu, hours, gpu_hours in plan.hours:
        table.add_row(f"at {mfu:.1%} MFU", _duration(hours), f"{gpu_hours:,.1f} GPU-hours")
    table.add_row("MFU", "", source)
    table.add_row("checkpoint", f"{plan.checkpoint / 2**30:.2f} GiB", "weights and optimizer state")
    table.add_section()
    counts = " ".join(map(str, plan.device_counts))
    table.add_row("global batch", f"{plan.global_batch:,} sequences", f"GPUs that can share it: {counts}")
    reads = plan.reads
    table.add_row("batch per GPU", f"{reads.sequences_per_step:,} sequences", batch)
    table.add_row("", f"{reads.bytes_per_step / 2**10:,.0f} KiB", f"{reads.tokens_per_step:,} tokens")
    epochs = "the corpus is not prepared here"
    if reads.epochs is not None:
        told = "" if reads.prepared else " (tokens from the name of the corpus)"
        epochs = f"all GPUs: {reads.epochs:.3g} epochs{told}"
    table.add_row("in the run", f"{reads.bytes / 2**30:.2f} GiB", f"{reads.tokens:,} tokens; {epochs}")
    console.print(table)


def _duration(hours: float) -> str:
    if hours >= 100:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{math.ceil(hours * 60)} minutes"
