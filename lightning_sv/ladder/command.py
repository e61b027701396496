"""The command: prepare the corpus, climb rung by rung within the minutes of a part, pack what there is."""

import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_sv.corpus import prepare
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.ladder.climb import Climb, Clock, rung_complete
from lightning_sv.ladder.plan import Ladder, load_ladder, runs_of
from lightning_sv.ladder.record import pack
from lightning_sv.ladder.text import Text
from lightning_sv.ladder.trainee import COMPILE
from lightning_sv.runs.directory import is_complete, read_summary, write_atomically
from lightning_sv.runs.provenance import Provenance
from lightning_sv.settings.plain_parser import PlainParser

TUNED = "tuned.json"


def run_ladder(argv: list[str]) -> int:
    """Parse the arguments, train, write `--out`; return the exit code."""
    began = time.monotonic()
    parser = PlainParser(prog="lightning_sv.ladder", description="Train a ladder of small models on one GPU, in parts.")
    parser.add_argument("plan", type=Path, help="YAML, see conf/ladder.")
    parser.add_argument("--minutes", type=float, default=9.0, help="Of this part, all included (9).")
    parser.add_argument("--state", type=Path, default=Path("runs/ladder"), help="Runs and checkpoints, to continue.")
    parser.add_argument("--out", type=Path, help="Where runs.tar.gz and ladder.json go; default: --state.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for plans of toy size.")
    parser.add_argument("--lanes", type=int, default=8, help="Streams side by side (8).")
    parser.add_argument("--compile", choices=COMPILE, default="block", help="What torch.compile sees at once (block).")
    parser.add_argument("--plain", action="store_true", help="Call steps instead of recording them as CUDA graphs.")
    parser.add_argument("--tokens_per_param", type=float, nargs="+", help="Of the rungs, in place of the plan's.")
    parser.add_argument("--seeds", type=int, help="Train so many of each rung's seeds only.")
    parser.add_argument("--only", nargs="+", help="Names of rungs; the others are left alone.")
    parser.add_argument("--save_every", type=float, default=60.0, help="Seconds between two checkpoints (60).")
    parser.add_argument("--tune", action="store_true", help=f"Train the plan's grid; the best go to {TUNED}.")
    parser.add_argument("--tuned", type=Path, help=f"{TUNED} of a grid: take its rates and stds.")
    parser.add_argument("--prepare", action="store_true", help="Only prepare the corpus.")
    options = parser.parse_args(argv)
    ladder = _planned(options)
    device = _device(options.device)
    if options.lanes < 1 or options.minutes <= 0:
        raise ValueError("--lanes must be at least 1 and --minutes positive.")
    if not (Path(ladder.corpus.dir) / FILENAME).is_file():
        _say(began, f"preparing {ladder.corpus.dir} from {ladder.corpus.source}")
    manifest = prepare(ladder.corpus, progress=False)
    _say(began, f"corpus {manifest.corpus_hash[:12]}: {manifest.train.tokens:,} training tokens")
    if options.prepare:
        return 0
    out, clock = options.out or options.state, Clock(options.minutes, began)
    out.mkdir(parents=True, exist_ok=True)
    text = Text(ladder.corpus, ladder.seq_len, ladder.val_sequences, device)
    failed: list[str] = []
    for rung in ladder.rungs:
        if rung_complete(options.state, ladder, rung):
            _say(began, f"{rung.name}: complete")
            continue
        if clock.left < 0:
            _say(began, f"{rung.name}: not begun in this part")
            break
        climb = Climb(
            ladder, rung, text, options.state, lanes=options.lanes, compile=options.compile, graphs=not options.plain,
            say=lambda line: _say(began, line),
        )  # fmt: skip
        climb.record()
        if not climb.run(clock, options.save_every):
            _say(began, f"{rung.name}: at step {climb.models[0].done:,} of {climb.models[0].run.steps:,}, to continue")
            break
        failed += climb.finish()
        del climb
        gc.collect()  # compiled blocks and their modules hold each other, and with them the graphs' memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    _report(ladder, options.state, out, began, tune=options.tune)
    if failed:
        raise RuntimeError(f"not finite, and left out: {', '.join(failed)}; lower their lr")
    return 0


def _planned(options: Any) -> Ladder:
    """The plan with what the command line changes, which the runs' configs record."""
    ladder = load_ladder(options.plan)
    if options.tuned is not None:
        ladder = ladder.with_rates(_rates(options.tuned))
    if options.tune:
        ladder = ladder.grid()
    rungs = ladder.rungs
    if options.tokens_per_param:
        given = options.tokens_per_param * (len(rungs) if len(options.tokens_per_param) == 1 else 1)
        if len(given) != len(rungs) or min(given) <= 0:
            raise ValueError(f"--tokens_per_param takes one positive number, or one for each of {len(rungs)} rungs.")
        rungs = [replace(rung, tokens_per_param=x) for rung, x in zip(rungs, given, strict=True)]
    if options.seeds is not None:
        if options.seeds < 1:
            raise ValueError(f"--seeds is {options.seeds}; it must be at least 1.")
        rungs = [replace(rung, seeds=rung.seeds[: options.seeds]) for rung in rungs]
    known = [rung.name for rung in rungs]
    for name in options.only or ():
        if name not in known:
            raise ValueError(f"--only {name}: the plan has no such rung; it has {' '.join(known)}.")
    return replace(ladder, rungs=[rung for rung in rungs if not options.only or rung.name in options.only])


def _rates(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    try:
        found = json.loads(path.read_text())["best"]
        return {
            rung: {arm: {key: float(best[key]) for key in ("lr", "init_std")} for arm, best in arms.items()}
            for rung, arms in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--tuned {path} is not what --tune writes ({error!r}).") from error


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device (or torch is built without CUDA); --device cpu is for toy sizes.")
    return torch.device(name)


def _report(ladder: Ladder, state: Path, out: Path, began: float, *, tune: bool) -> None:
    """Pack the runs, and write and say where they stand; `lightning-sv report` judges them."""
    rows: dict[str, Any] = {}
    best: dict[str, dict[str, dict[str, float]]] = {}
    for rung in ladder.rungs:
        losses: dict[str, list[float]] = {}
        for run in runs_of(ladder, rung):
            if not is_complete(state / "runs" / run.name):
                continue
            loss = read_summary(state / "runs" / run.name)["val_loss"]
            losses.setdefault(run.name.rpartition("-seed")[0].partition("/")[2], []).append(loss)
            found = {"lr": run.arm.lr, "init_std": run.arm.init_std, "val_loss": loss}
            arms = best.setdefault(rung.name, {})
            arms[run.arm.label] = min(arms.get(run.arm.label, found), found, key=lambda x: x["val_loss"])
        rows[rung.name] = losses
        for label, values in losses.items():
            _say(began, f"{rung.name} {label}: {statistics.mean(values):.4f} nats/token, mean of {len(values)}")
    content: dict[str, Any] = {"val_loss": rows, **Provenance.now()._asdict()}
    write_atomically(out / "ladder.json", json.dumps(content, indent=2) + "\n")
    if tune:
        write_atomically(out / TUNED, json.dumps({"best": best, **content}, indent=2) + "\n")
    if (state / "runs").is_dir():
        pack(state / "runs", out / "runs.tar.gz")
        _say(began, f"{out / 'runs.tar.gz'}: {(out / 'runs.tar.gz').stat().st_size / 2**20:.1f} MiB")


def _say(began: float, line: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)
