"""The paper's experiments: two strategies compared in pairs, the statistics, the figures.

Everything here reads what a run left on disk (event files, config, summary), never a live model,
so a comparison can be drawn again long after its runs ended, on a machine without torch devices.
"""

from lightning_sv.paper.compare import compare
from lightning_sv.paper.comparison import Arm, Comparison
from lightning_sv.paper.draw import draw_comparison, draw_run
from lightning_sv.paper.events import Curve, Run, read_run
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
    "PairedDifference",
    "Run",
    "TokenEfficiency",
    "compare",
    "draw_comparison",
    "draw_run",
    "paired_difference",
    "read_run",
    "token_efficiency",
    "tokens_to_reach",
]
