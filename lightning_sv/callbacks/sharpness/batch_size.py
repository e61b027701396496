"""How many sequences, and how much of each, one measurement of sharpness can afford.

A measurement is a gradient with its graph, and for each subset some Hessian-vector products on that
graph. Its cost is counted in forward and backward passes over one sequence:

    cost = GRAPH + products * sum over subsets of (PRODUCT or SCALE_PRODUCT)

The budget is a share of the run's plan, not of measured times, so that all compared runs read the
same batch.
"""

from lightning_sv.callbacks.sharpness.measure import Measurement
from lightning_sv.nn import BackboneConfig, activated_parameters, flops_per_token, meta_backbone

#: Costs in passes: the maximum over strategies in benchmarks/results/curvature.json. Products for
#: scale vectors are cheaper than for all parameters.
GRAPH = 1.49
PRODUCT = 2.15
SCALE_PRODUCT = 1.71
#: Overhead of a product per block in FLOP, fitted to `unified` at d_model 64 on one CPU core.
OVERHEAD = 84e6
#: Fraction of the budget to plan for, because a small batch uses fewer cores than the training
#: batch (`mini` on two cores took 1.4 times the plan).
PLANNED = 0.6
#: Default limit on the tokens of a retained graph.
MOST_TOKENS = 4096
#: Default limit on the attention entries (blocks x heads x queries x keys) of a retained graph:
#: math attention keeps about six float32 copies of each, 18 GB in total.
MOST_ATTENTION = 750_000_000


def attention_entries(config: BackboneConfig, seq_len: int) -> int:
    """Return the entries of the attention matrices of one sequence."""
    return config.n_layer * config.n_head * seq_len**2


def fitting_length(config: BackboneConfig, seq_len: int) -> int:
    """Return the tokens of a sequence in an exact measurement: all, or 1/2, 1/4, ... of them.

    >>> fitting_length(BackboneConfig(d_model=1792, n_layer=22, n_head=28), 4096)
    1024
    """
    while attention_entries(config, seq_len) > MOST_ATTENTION and seq_len > 1:
        seq_len //= 2
    return seq_len


def fitting_sequences(
    config: BackboneConfig,
    seq_len: int,
    work: float,
    points: int,
    measurement: Measurement,
) -> int:
    """Return the number of sequences per measurement, from the run's plan only.

    It includes subsets that a strategy lacks. The overhead of a product, most of its cost in a
    small model, is an estimate.

    Args:
        config: sizes of the model
        seq_len: tokens per sequence
        work: budget of all measurements, in passes over one sequence of `seq_len` tokens
        points: number of measurements
        measurement: its subsets, and the products of each
    """
    cost = GRAPH
    for name in measurement.subsets:
        product = SCALE_PRODUCT if name.startswith("scale_") else PRODUCT
        cost += measurement.n_products * product
    parameters = activated_parameters(meta_backbone(config), config)
    pass_flops = seq_len * flops_per_token(parameters, config, seq_len)
    overhead = OVERHEAD * config.n_layer / pass_flops
    affordable = PLANNED * work / points / cost - overhead

    in_memory = min(MOST_TOKENS // seq_len, MOST_ATTENTION // attention_entries(config, seq_len))
    return max(1, min(int(affordable), in_memory))
