"""One training step of Llamas: ours, Hugging Face's, litgpt's, torchtitan's; strategies.

    python -m benchmarks.step [--rounds 40] [--threads 1 2] [--widths 256 768] [--json FILE]

A step is forward, loss and backward on the same tokens; bf16 is autocast over float32 parameters.
For each combination of width, dtype, mode and threads, all candidates run interleaved in one
process. The peers load our `llama`'s weights, and equal losses are checked before timing. --json
writes the file after each combination, and skips those that it contains unless --again is given.
"""

import itertools
import json
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.interleave import Ratio, measure, show
from benchmarks.memory import DEVICE, peak_mib, saved_mib
from benchmarks.peers import PEERS, VARIANTS
from benchmarks.step_table import markdown
from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop import to_hugging_face
from lightning_sv.nn.backbone import INDUCTOR
from lightning_sv.runs.provenance import Provenance

HEADS = {256: 4, 768: 12}
N_LAYER = 4
VOCAB_SIZE = 4096
BATCH = 8
SEQ_LEN = 256
DTYPES = ("fp32", "bf16")
MODES = ("eager", "compiled")
THREADS = (1, 2)
STRATEGIES = ("llama", "hg", "hg+dp+or", "unified")
BUILDERS = PEERS | VARIANTS


@dataclass(frozen=True)
class Combination:
    """Conditions of a comparison."""

    width: int
    dtype: str
    mode: str
    threads: int

    def __str__(self) -> str:
        return (
            f"d={self.width} {self.dtype} {self.mode}, {self.threads}"
            f" thread{'s' if self.threads > 1 else ''}"
        )


@dataclass(frozen=True)
class Candidate:
    """A model and its loss on the tokens of the comparison, optionally compiled."""

    model: nn.Module
    loss: Callable[[], Tensor]

    def step(self) -> None:
        """Forward, loss and backward; gradients are freed."""
        self.loss().backward()
        self.model.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


def ours(
    config: BackboneConfig, strategy: str
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Our backbone and its loss."""
    model = Backbone(config, strategy)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets=targets)

    return model, loss


def candidates(at: Combination, peers: list[str]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates, and why peers are missing."""
    config = BackboneConfig(
        name="bench",
        d_model=at.width,
        n_layer=N_LAYER,
        n_head=HEADS[at.width],
        vocab_size=VOCAB_SIZE,
    )
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(0, VOCAB_SIZE, (BATCH, SEQ_LEN + 1), generator=generator).to(DEVICE)
    tokens = block[:, :-1].contiguous()
    targets = block[:, 1:].contiguous()
    found = {name: ours(config, name) for name in STRATEGIES}
    weights = to_hugging_face(Backbone(config, "llama")).state_dict()
    missing = {}
    for name in peers:
        try:
            peer = BUILDERS[name](config, SEQ_LEN)
            peer.load(weights)
        except Exception as error:  # a peer may not support this torch; measure the others
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            found[name] = peer.model, peer.loss
    made = {}
    for name, (model, loss) in found.items():
        model.to(DEVICE).train()
        if name in peers:
            with torch.no_grad():
                expected = found["llama"][1](tokens, targets)
                torch.testing.assert_close(
                    loss(tokens, targets),
                    expected,
                    rtol=1e-4,
                    atol=0,
                    msg=f"{name}'s loss is not llama's",
                )
        if at.mode == "compiled":  # options of `fit`; peers use PyTorch's defaults
            loss = torch.compile(
                loss, dynamic=False, options=INDUCTOR if name in STRATEGIES else None
            )
        made[name] = Candidate(model, autocast_loss(loss, tokens, targets, at.dtype))
    return made, missing


def autocast_loss(
    loss: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, targets: Tensor, dtype: str
) -> Callable[[], Tensor]:
    """A model's loss on some tokens, under autocast for bf16."""

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == "bf16"):
            return loss(tokens, targets)

    return run


def compare(at: Combination, options: Namespace, console: Console) -> dict[str, Any]:
    """Return times relative to llama and memory of every candidate."""
    torch.compiler.reset()
    console.print(f"{at}: candidates are built, and compiled where they are to be")
    torch.set_num_threads(at.threads)
    found, missing = candidates(at, options.peers)
    rows = measure({name: one.step for name, one in found.items()}, "llama", rounds=options.rounds)
    show(console, str(at), rows, "llama")
    for name, why in missing.items():
        console.print(f"{name} is not measured: {why}", markup=False)
    return vars(at) | record(found, rows, missing, options.rounds, "benchmarks.step")


def record(
    found: dict[str, Candidate],
    rows: list[Ratio],
    missing: dict[str, str],
    rounds: int,
    module: str,
) -> dict[str, Any]:
    """Return times relative to llama and memory of every candidate, with the environment."""
    return {
        "peers": [vars(row) for row in rows if row.name not in STRATEGIES],
        "strategies": [vars(row) for row in rows if row.name in STRATEGIES],
        "saved_mib": {name: saved_mib(one.loss, one.model) for name, one in found.items()},
        "peak_mib": {name: peak_mib(one.step) for name, one in found.items()},
        "missing": missing,
        "rounds": rounds,
        "measured": (
            Provenance.now()._asdict()
            | {"command": shlex.join(["python", "-m", module, *sys.argv[1:]])}
        ),
    }


def reading(folder: str, seq_len: int = 64, batch: int = 8) -> float:
    """Return the tokens per second of reading batches of a prepared corpus."""
    from lightning_sv.corpus import RankShare, TokenLoader, open_split

    loader = TokenLoader(open_split(folder, "train", seq_len=seq_len), RankShare(batch, batch))
    iterator = iter(loader)
    next(iterator)
    began = time.perf_counter()
    n = 0
    while time.perf_counter() - began < 3:
        n += next(iterator)[:, 1:].numel()
    return n / (time.perf_counter() - began)


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--widths", nargs="+", type=int, default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--threads", nargs="+", type=int, default=list(THREADS), choices=THREADS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(BUILDERS))
    parser.add_argument(
        "--json", type=Path, help="write the figures to this file, and continue from its content"
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat measurements that the file contains"
    )
    parser.add_argument("--data", default="data/stdlib")
    return parser.parse_args()


def combinations(
    threads: Iterable[int], widths: Iterable[int], dtypes: Iterable[str], modes: Iterable[str]
) -> list[Combination]:
    """Return every combination, in the order of the table."""
    rows = itertools.product(threads, widths, dtypes, modes)
    return [Combination(width, dtype, mode, n_threads) for n_threads, width, dtype, mode in rows]


def recorded_before(path: Path | None) -> dict[str, Any]:
    """Return the results that the file contains, without its description of the machine."""
    if path is None or not path.exists():
        return {}
    results = json.loads(path.read_text())
    results.pop("machine", None)
    return results


def main() -> None:
    options = parse()
    console = Console()
    results = recorded_before(options.json)
    for at in combinations(options.threads, options.widths, options.dtypes, options.modes):
        if str(at) in results and not options.again:
            continue
        results[str(at)] = compare(at, options, console)
        save(results, options.json)
    if Path(options.data, "manifest.json").exists():
        results["reading_tokens_per_s"] = reading(options.data)
        console.print(f"reading shards: {results['reading_tokens_per_s'] / 1e6:.2f} M tokens/s")
        save(results, options.json)
    known = map(str, combinations(THREADS, HEADS, DTYPES, MODES))
    print(markdown([results[key] for key in known if key in results]))


def save(results: dict[str, Any], path: Path | None) -> None:
    """Write the file atomically."""
    if path:
        sizes = {"layers": N_LAYER, "vocabulary": VOCAB_SIZE, "batch": [BATCH, SEQ_LEN]}
        machine = {"device": Provenance.now().machine} | sizes
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(results | {"machine": machine}, indent=2) + "\n")
        part.replace(path)


if __name__ == "__main__":
    main()
