"""Fake `lightning-sv fit` with known losses, which writes the files of a run without training.

val/loss after 1000 i tokens (i = 1..10) is 4 - 0.1 i + 0.01 seed, plus --delta[seed] for each
strategy except llama, plus with --best LR STD a paraboloid in their logarithms.
"""

import argparse
import json
import math
import struct
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary


def write_scalars(
    directory: Path, tag: str, points: list[tuple[int, float]], wall_time: float
) -> None:
    """Add `points` (tokens, value) of one tag to the event file of a run.

    TensorBoard's writer is a slow import.
    """
    events = [Event(wall_time=wall_time, file_version="brain.Event:2")]
    for tokens, value in points:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        events.append(Event(wall_time=wall_time, step=tokens, summary=summary))
    with (directory / "events.out.tfevents.1").open("ab") as file:
        for event in events:
            file.write(record(event.SerializeToString()))


def record(data: bytes) -> bytes:
    """Return a TFRecord: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def checksum(data: bytes) -> bytes:
    """Return the CRC-32C, rotated and shifted as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_run(
    directory: Path,
    label: str,
    seed: int,
    delta: float,
    *,
    lr: float = 1e-3,
    corpus: str = "c0ffee",
    **data: int,
) -> None:
    """Write the files of a run."""
    points = [(1000 * i, 4 - 0.1 * i + 0.01 * seed + delta) for i in range(1, 11)]
    write_scalars(directory, "val/loss", points, wall_time=1.0)
    # the last tenth of the steps has two points, with the mean of the last validation
    train = [(500 * i, points[-1][1] + (20 - i)) for i in range(1, 19)]
    ends = [(9_500, points[-1][1] - 0.25), (10_000, points[-1][1] + 0.25)]
    write_scalars(directory, "train/loss", [*train, *ends], wall_time=1.0)
    config = {
        "seed_everything": seed,
        "run_dir": str(directory),
        "model": {"scale": label, "optim": {"lr": lr}},
        "data": {"seq_len": 64, "val_sequences": 512, **data},
    }
    (directory / "config.yaml").write_text(json.dumps(config))
    summary = {
        "label": label,
        "seed": seed,
        "tokens": 10_000,
        "epochs": 2.5,
        "val_loss": points[-1][1],
        "corpus_hash": corpus,
        "tokenizer_sha256": "7001",
        "torch": "2.13.0",
    }
    (directory / "summary.json").write_text(json.dumps(summary))


def main() -> int:
    """Parse the arguments of compare, and write a run."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model.scale", dest="scale", required=True)
    parser.add_argument("--seed_everything", dest="seed", type=int, required=True)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--ckpt_path", choices=["last"], required=True)
    parser.add_argument("--delta", default="-0.02,-0.04,-0.03")
    parser.add_argument("--best", nargs=2, type=float, help="learning rate and initial std")
    parser.add_argument(
        "--corpus_of", nargs=2, default=("", ""), help="a strategy and its own corpus_hash"
    )
    parser.add_argument("--model.optim.lr", dest="lr", type=float, default=1e-3)
    parser.add_argument("--model.backbone.init_std", dest="std", type=float, default=0.08)
    parser.add_argument("--sharp", type=float, help="lambda_max in the first write")
    parser.add_argument("--fail_seed", type=int, default=-1)
    parser.add_argument("--hang_seed", type=int, default=-1)
    parser.add_argument(
        "--diverge_lr", type=float, default=math.inf, help="lowest rate that diverges"
    )
    args, _ = parser.parse_known_args()  # other keys of fit do not change the losses
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Write a run, or end as the arguments say; return the exit code."""
    print("step 1/10 train/loss 3.9", flush=True)
    if args.seed == args.hang_seed:
        (args.run_dir / "hanging").touch()
        time.sleep(60)
    if args.seed == args.fail_seed:
        print("simulated failure", file=sys.stderr)
        return 3
    if args.lr >= args.diverge_lr:
        (args.run_dir / "nonfinite.jsonl").write_text('{"step": 5}\n')
        return 1
    strategy, of_strategy = args.corpus_of
    corpus = of_strategy if args.scale == strategy else "c0ffee"
    loss = delta(args)
    write_run(args.run_dir, args.scale, args.seed, loss, lr=args.lr, corpus=corpus)
    if args.sharp:
        write_sharpness(args.run_dir, args.sharp, has_scales=args.scale != "nop")
    return 0


def delta(args: argparse.Namespace) -> float:
    """Return what is added to the losses of a strategy, seed and point of a grid."""
    added = 0.0
    if args.scale != "llama":
        deltas = args.delta.split(",")
        added = float(deltas[args.seed % len(deltas)])
    if args.best:
        lr, std = args.best
        added += 0.05 * math.log(args.lr / lr) ** 2 + 0.05 * math.log(args.std / std) ** 2
    return added


def write_sharpness(run_dir: Path, start: float, *, has_scales: bool) -> None:
    """Write scalars that fall from `start`; those of the scale vectors are a tenth."""
    starts = {"all": start}
    if has_scales:
        starts["scale_input"] = 0.1 * start
    for part, first in starts.items():
        points = [(0, first), (100, first / 2), (1000, first / 3), (10_000, first / 4)]
        for tag in ("lambda_max", "trace"):
            write_scalars(run_dir, f"sharpness/{part}/{tag}", points, wall_time=2.0)


if __name__ == "__main__":
    sys.exit(main())
