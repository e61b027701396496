"""The paper's experiments: strategies compared in pairs with a baseline, the statistics, the figures.

Everything here reads what a run left on disk (event files, config, summary), never a live model,
so a comparison can be drawn again long after its runs ended, on a machine without torch devices.
"""

from lightning_sv.paper.compare import compare
from lightning_sv.paper.comparison import Comparison
from lightning_sv.paper.draw import draw_run
from lightning_sv.paper.draw_arms import draw_comparison
from lightning_sv.paper.events import Curve, Run, read_run
from lightning_sv.paper.pair import Arm, Pair, TrainedArm
from lightning_sv.paper.stats import (
    PairedDifference,
    TokenEfficiency,
    paired_difference,
    token_efficiency,
    tokens_to_reach,
)

__all__ = [
    "Arm",
    "Comparison",
    "Curve",
    "Pair",
    "PairedDifference",
    "Run",
    "TokenEfficiency",
    "TrainedArm",
    "compare",
    "draw_comparison",
    "draw_run",
    "paired_difference",
    "read_run",
    "token_efficiency",
    "tokens_to_reach",
]
