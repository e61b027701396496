"""`lightning-sv plan`: estimate memory, hours and data of a run."""

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.cli.names import resolve_names
from lightning_sv.gpus import GPUS, find_gpu
from lightning_sv.json_text import json_text
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.gpu_memory import USABLE
from lightning_sv.plan.plan import MFUS, Plan, make_plan
from lightning_sv.settings.plain_parser import PlainParser, number

#: strategy -> what the communication keeps
_COMMUNICATION = {
    "ddp": "buckets of the gradients",
    "fsdp": "gathered blocks, embedding and head",
}


def run(argv: list[str]) -> int:
    """Parse the arguments, print the plan, return the exit code."""
    options, rest = _parser().parse_known_args(argv)
    gpu = find_gpu(options.gpu, options.gpu_memory)
    mfus = MFUS if options.mfu is None else (options.mfu,)
    named = resolve_names(rest, trainer="ddp")  # that of a run is cpu, without bf16
    parsed = parse_run(named.parseable, check_corpus=False)
    plan = make_plan(parsed.model, parsed.data, parsed.trainer, gpu, options.gpus, mfus)
    if options.json:
        print(json_text(plan.to_dict()))
    else:
        print_plan(Console(), plan)
    return 0


def _parser() -> PlainParser:
    text = (
        "Estimate GPU memory, hours, checkpoint size and data of a run. Other arguments are those "
        "of `fit`: --model NAME, e.g. --model llama-1b, with --trainer ddp by default, or --config "
        "FILE, any key."
    )
    parser = PlainParser("plan", text, json="Print the plan as JSON.")
    parser.add_argument(
        "--gpus", type=number(int, 1, 1_000_000), required=True, help="Number of GPUs."
    )
    parser.add_argument(
        "--gpu", default=GPUS[0].name, help=f"GPU model: {' '.join(gpu.name for gpu in GPUS)}."
    )
    parser.add_argument(
        "--gpu_memory", type=number(float, most=1e6), help="GiB per GPU; by default that of --gpu."
    )
    parser.add_argument(
        "--mfu", type=float, help="Fraction of the peak FLOP/s that the model reaches, e.g. 0.4."
    )
    return parser


def print_plan(console: Console, plan: Plan) -> None:
    """Print the plan."""
    where = f"{plan.gpus} x {plan.gpu}, {plan.strategy}, {plan.precision}"
    title = escape(f"{plan.model}, {plan.label}, on {where}")
    right = Column(justify="right")
    table = Table("", right, "", title=title, title_justify="left", show_header=False)
    _add_memory(table, plan)
    table.add_section()
    _add_time(table, plan)
    table.add_section()
    _add_data(table, plan)
    console.print(table)


def _add_memory(table: Table, plan: Plan) -> None:
    mode = "in eager mode" if plan.compile == "none" else "compiled"
    comments = {
        "optimizer": "its state",
        "communication": _COMMUNICATION.get(plan.strategy, ""),
        "activations": f"and temporaries, {mode}",
    }
    for name in ("weights", "gradients", "optimizer", "communication", "activations"):
        size = getattr(plan.memory, name)
        if size:
            table.add_row(name, _gib(size), comments.get(name))
    fits = "fits" if plan.fits else "does not fit"
    usable = f"{fits}: {USABLE:.0%} of {plan.gpu_memory / 2**30:.1f} GiB are for tensors"
    table.add_row("peak per GPU", _gib(plan.memory.peak), f"[bold]{usable}[/bold]")
    largest = plan.largest_micro_batch or "none"
    table.add_row("micro-batch", str(plan.micro_batch), f"largest that fits: {largest}")


def _add_time(table: Table, plan: Plan) -> None:
    work = f"{plan.tokens:,} tokens, {plan.flops:.3g} FLOPs"
    table.add_row("run", f"{plan.steps:,} steps", work)
    for mfu, hours, gpu_hours in plan.hours:
        table.add_row(f"at {mfu:.1%} MFU", _duration(hours), f"{gpu_hours:,.1f} GPU-hours")
    table.add_row("checkpoint", _gib(plan.checkpoint), "weights and optimizer state")


def _add_data(table: Table, plan: Plan) -> None:
    counts = " ".join(map(str, plan.device_counts))
    sharing = f"GPUs that can share it: {counts}"
    table.add_row("global batch", f"{plan.global_batch:,} sequences", sharing)

    sequences = plan.micro_batches * plan.micro_batch
    batch = f"{plan.micro_batches} micro-batches of {plan.micro_batch} x {plan.seq_len:,} tokens"
    if plan.activation_checkpointing:
        batch += ", blocks recomputed"
    table.add_row("batch per GPU", f"{sequences:,} sequences", batch)

    suffices = f"data.corpus.max_tokens {plan.sufficient_tokens:,} suffices"
    if plan.epochs is None:
        table.add_row("corpus", "not prepared", suffices)
    else:
        table.add_row("corpus", f"{plan.epochs:.3g} epochs", suffices)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _duration(hours: float) -> str:
    """Return a duration in its usual unit.

    >>> _duration(0.001), _duration(0.5), _duration(30), _duration(240)
    ('1 minute', '30 minutes', '30.0 hours', '10.0 days')
    """
    if hours >= 100:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = math.ceil(hours * 60)
    return "1 minute" if minutes <= 1 else f"{minutes} minutes"
