"""Figures of synthetic runs, one panel of each kind."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.spec import FigureSpec, PanelSpec
from lightning_sv.runs.events import Curve, Run
from tests.experiments import fake_fit
from tests.plots.test_run_plot import synthetic


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


SIZES = (2e5, 5e5, 1.2e6, 3e6)


def arm(
    label: str, gain: float, *, seeds: int = 3, ours: bool = False, baseline: bool = False
) -> Arm:
    """Return runs with realistic curves; pairs share the offset of the seed and differ by `gain`
    and noise."""
    by_seed = {}
    for seed in range(seeds):
        run = synthetic(label, seed, gain)
        noise = np.random.default_rng([seed, len(label)]).normal(0, 0.004, 30)
        run.curve("val/loss").values[:] += noise
        summary = {"steps": 3000, "parameters": 200_000, "seed": seed}
        by_seed[seed] = replace(run, dir=Path(f"{label}-seed{seed}"), summary=summary)
    return Arm(label, by_seed, ours=ours, baseline=baseline)


def point(
    label: str, loss: float, seeds: int = 3, ours: bool = False, baseline: bool = False
) -> Arm:
    """Return runs that end near `loss`."""
    by_seed = {}
    for seed in range(seeds):
        noise = 0.002 * np.random.default_rng([seed, len(label)]).normal()
        end = Curve(np.array([1000]), np.array([loss + 0.01 * seed + noise]))
        directory = Path(f"{label}-{seed}")
        by_seed[seed] = Run(directory, label, {}, {"seed": seed}, {"val/loss": end})
    return Arm(label, by_seed, ours=ours, baseline=baseline)


def write_run(directory: Path, label: str, seed: int, **settings: Any) -> Path:
    """Write a run whose last loss is 3 + 0.01 seed, or 0.02, 0.04, 0.03 lower (seeds 0, 1, 2) if it
    is not llama."""
    directory.mkdir(parents=True)
    fake_fit.write_run(
        directory, label, seed, 0.0 if label == "llama" else -(0.02, 0.04, 0.03)[seed], **settings
    )
    return directory


def curves_panel(seeds: int = 3) -> LoadedPanel:
    dp = arm("dp", -0.05, seeds=seeds)
    llama = arm("llama", 0.0, seeds=seeds, baseline=True)
    ours = arm("hg+dp+or", -0.1, seeds=seeds, ours=True)
    return LoadedPanel.of_arms(PanelSpec("Placement"), (dp, llama, ours))


def scaling_panel(seeds: int = 3, sizes: tuple[float, ...] = SIZES) -> LoadedPanel:
    arms = []
    laws = {"llama": (20, 0.2), "unified": (21, 0.205), "hg+dp+or": (21, 0.21)}
    for label, (a, b) in laws.items():
        for n in sizes:
            name = f"{label}, {n:g}"
            loss = a * n**-b + 2
            one = point(name, loss, seeds, ours=label == "hg+dp+or", baseline=label == "llama")
            count = round(n) + len(label)  # strategies differ a little
            run_spec = RunSpec("dense", label, "", (), name, 1000, 10**6, count, 1.0, name)
            place = {"series": label, "point": (count,), "size": f"dense-{n:g}"}
            arms.append(replace(one, run_spec=run_spec, **place))
    return LoadedPanel.of_arms(PanelSpec("Dense models", kind="scaling"), arms)


def grid_panel() -> LoadedPanel:
    arms = []
    for label, best in (("unified", 1e-2), ("llama", 3e-3)):
        for v in (1e-3, 3e-3, 1e-2, 3e-2):
            loss = 3 + 0.03 * np.log(v / best) ** 2
            one = point(f"{label}, {v:g}", loss, baseline=label == "llama")
            arms.append(replace(one, series=label, point=(v,)))
    spec = PanelSpec("Learning rates", kind="grid", axes={"model.optim.lr": {}})
    return LoadedPanel.of_arms(spec, arms)


def figure() -> Figure:
    """Return a figure with all kinds of panels and with markup in its texts."""
    qkv = LoadedPanel.of_arms(
        PanelSpec("Branches", kind="qkv"), (arm("llama", 0.0, baseline=True), arm("hg", -0.02))
    )
    first = Verdict(
        "dp ends below llama", "holds", "It is lower.", -0.05, -0.06, -0.04, 3, 0.01, "lower"
    )
    equal = Verdict("dp + or", "equal within 0.01", "Inside.", 0.0, -0.004, 0.004, 3, 0.004)
    verdicts = (
        replace(first, p=0.003, df=4, primary=True, p_corrected=0.06, corrected="not resolved"),
        replace(equal, corrected="holds"),
        Verdict("a < b & <script>", "not resolved", "It covers zero.", 0.01, -0.1, 0.1, 3, 0.1),
        Verdict("at 1B", "not testable here", "Too small.", paper="-0.033"),
    )
    times = {}
    for tag in ("throughput/tokens_per_s", "memory/peak_gib"):
        times[tag] = Curve(np.array([1000]), np.array([151.0]))
    run = Run(Path("timed"), "llama", {}, {}, {**times, "val/loss": times[tag]})
    overhead = LoadedPanel.of_arms(
        PanelSpec("Overhead", kind="table"), [Arm("llama <b>", {0: run})]
    )
    panels = (curves_panel(), scaling_panel(), grid_panel(), qkv, overhead)
    title = "Placement <of> scale vectors"
    summary = "What <script>alert(1)</script> does."
    paper = {"difference at 0.12B": "-0.033"}
    specs = [panel.spec for panel in panels]
    spec = FigureSpec("placement", title, summary, specs, paper, section="Section 4.1")
    warnings = ("The runs differ in model.optim.lr: 1 against 2.",)
    return Figure(spec, panels, verdicts, warnings, "lightning-sv paper placement --scale 'a b'")
