"""Hours from floating-point operations, and the share of a GPU's peak that a run reaches."""

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError

#: shares of the peak shown where none is given or measured: what well-tuned dense models of this size span
MFUS = (0.3, 0.4, 0.5)


def train_hours(tokens: int, flops_per_token: float, gpus: int, peak: float, mfu: float) -> float:
    """Tokens x FLOPs a token / (GPUs x peak x MFU), in hours.

    Args:
        tokens: of the run
        flops_per_token: of forward and backward (`lightning_sv.nn.flops_per_token`)
        gpus: number of GPUs
        peak: FLOP/s of one
        mfu: share of the peak that the model's FLOPs reach, recomputation not counted (arXiv:2204.02311)

    Raises:
        ConfigError: mfu is no share
    """
    if not 0 < mfu <= 1:
        raise ConfigError(f"the MFU is {mfu}; it must be above 0 and at most 1 (0.4 is 40%).")
    return tokens * flops_per_token / (gpus * peak * mfu) / 3600


def measured_mfu(tokens: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """Harmonic mean of throughput/mfu after the first tenth of the tokens: the share that gives the run's time.

    Args:
        tokens: (N,) training tokens of each value
        values: (N,) the MFU since the value before

    Raises:
        ConfigError: no value is left, or one is not positive
    """
    warm = values[tokens > tokens[-1] / 10] if len(tokens) > 1 else values[:0]
    if not len(warm) or not (warm > 0).all():
        raise ConfigError("the run of --run logged too few positive values of throughput/mfu; give --mfu instead.")
    return float(len(warm) / (1 / warm).sum())
