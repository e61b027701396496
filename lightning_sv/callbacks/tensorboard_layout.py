"""TensorBoard's Custom Scalars page: curves per chart."""

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.runs.tags import COPYING, TRAIN_LOSS, VAL_LOSS

_QKV = "branch_norm/mean/[qkv]_proj"
_GATE_UP = "branch_norm/mean/(expert_|shared_)?(gate|up)_proj"

#: page -> chart -> regular expressions of complete tags. A run has the charts of all callbacks;
#: those of a callback that it lacks stay empty. 'mean' is over layers.
PAGES: dict[str, dict[str, list[str]]] = {
    "loss": {
        "validation": [VAL_LOSS],
        "training": [TRAIN_LOSS],
        "training and validation": [TRAIN_LOSS, VAL_LOSS],
    },
    "Q, K, V": {
        # A chart each: with several runs, colours stand for runs, and TensorBoard's markers of a
        # branch differ between runs.
        "q_proj, effective, mean": ["branch_norm/mean/q_proj/effective"],
        "k_proj, effective, mean": ["branch_norm/mean/k_proj/effective"],
        "v_proj, effective, mean": ["branch_norm/mean/v_proj/effective"],
        "effective, mean": [f"{_QKV}/effective"],
        "W, mean": [f"{_QKV}/W"],
        "gamma_in, mean": [f"{_QKV}/gamma_in"],
        "gamma_out, mean": [f"{_QKV}/gamma_out"],
    },
    "gate, up": {
        "effective, mean": [f"{_GATE_UP}/effective"],
        "W, mean": [f"{_GATE_UP}/W"],
        "gamma_in, mean": [f"{_GATE_UP}/gamma_in"],
        "gamma_out, mean": [f"{_GATE_UP}/gamma_out"],
    },
    "output norms": {"gamma, mean": ["branch_norm/mean/[^/]+_norm/gamma"]},
    "experts": {
        "largest load": ["moe/layer[^/]+/load_max"],
        "smallest load": ["moe/layer[^/]+/load_min"],
        "balance loss": ["moe/layer[^/]+/balance_loss"],
        "entropy": ["moe/layer[^/]+/entropy"],
    },
    "steps": {"share that is clipped": ["clipped_steps"]},
    "sharpness": {
        "lambda_max": ["sharpness/[^/]+/lambda_max"],
        "trace": ["sharpness/[^/]+/trace"],
        "fro2": ["sharpness/[^/]+/fro2"],
        "cost": ["sharpness/seconds"],
    },
    "scale vectors": {
        "drift_in, mean": ["scale_vector/mean/[^/]+/drift_in"],
        "drift_out, mean": ["scale_vector/mean/[^/]+/drift_out"],
        "imbalance_in, mean": ["scale_vector/mean/[^/]+/imbalance_in"],
        "imbalance_out, mean": ["scale_vector/mean/[^/]+/imbalance_out"],
        "beta_in, mean": ["scale_vector/mean/[^/]+/beta_in"],
        "beta_out, mean": ["scale_vector/mean/[^/]+/beta_out"],
        "gradient of beta_in, mean": ["scale_vector/mean/[^/]+/beta_in_grad"],
        "gradient of beta_out, mean": ["scale_vector/mean/[^/]+/beta_out_grad"],
    },
    "copying": {
        "loss by kind of token": [f"{COPYING}(repeat|seen|unseen)"],
        "text read twice": [f"{COPYING}(first|second)_copy"],
        "second copy minus first": [f"{COPYING}second_minus_first"],
    },
    "residual stream": {"RMS of output / RMS of residual": ["residual/mean/[^/]+/ratio"]},
}


def lay_out(trainer: L.Trainer) -> None:
    """Write the layout of the page."""
    for logger in tensorboard_loggers(trainer):
        layout: dict[str, dict[str, list[object]]] = {}
        for page, charts in PAGES.items():
            layout[page] = {}
            for chart, tags in charts.items():
                # TensorBoard compares the beginning of a tag, so the end is given here
                patterns = [f"{tag_of(logger, tag)}$" for tag in tags]
                layout[page][chart] = ["Multiline", patterns]
        logger.experiment.add_custom_scalars(layout)


def tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that write TensorBoard's files."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def tag_of(logger: TensorBoardLogger, tag: str) -> str:
    """Return a tag with the logger's prefix, which `logger.experiment` does not add."""
    if not logger._prefix:
        return tag
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{tag}"
