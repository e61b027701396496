"""TensorBoard's Custom Scalars page: curves per chart."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.runs.tags import TRAIN_LOSS, VAL_LOSS

#: page -> chart -> tags of its curves, or patterns of tags
Pages = dict[str, dict[str, list[str]]]

#: first page
LOSS_PAGE: Pages = {
    "loss": {
        "validation": [VAL_LOSS],
        "training": [TRAIN_LOSS],
        "training and validation": [TRAIN_LOSS, VAL_LOSS],
    }
}
#: page -> branches whose curves share its charts
BRANCH_PAGES = {
    "Q, K, V": ("q_proj", "k_proj", "v_proj"),
    "gate, up": ("gate_proj", "up_proj"),
    "shared expert": ("shared_gate_proj", "shared_up_proj"),
    "experts, mean": ("expert_gate_proj", "expert_up_proj"),
    "output norms": ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm"),
}


class BranchCurve(NamedTuple):
    """A figure of a branch, such as 'layer0/q_proj/W'.

    Attributes:
        page: its group of branches, a key of `BRANCH_PAGES`
        key: 'layer0/q_proj/W'
        place: 'layer0', or 'mean' over layers
        branch: 'q_proj'
        figure: 'W'; 'effective/expert3' of an expert
    """

    page: str
    key: str
    place: str
    branch: str
    figure: str


def branch_curves(keys: Iterable[str]) -> Iterator[BranchCurve]:
    """Yield the figures whose branch is on a page, in their order."""
    page_of: dict[str, str] = {}
    for page, members in BRANCH_PAGES.items():
        page_of |= dict.fromkeys(members, page)
    for key in keys:
        place, branch, figure = key.split("/", 2)
        if branch in page_of:
            yield BranchCurve(page_of[branch], key, place, branch, figure)


def add_curve(pages: Pages, page: str, chart: str, tag: str) -> None:
    """Add a curve to a chart, after those that it has."""
    pages.setdefault(page, {}).setdefault(chart, []).append(tag)


def lay_out(trainer: L.Trainer) -> None:
    """Write the pages of all callbacks at once, because a second layout would replace the first.

    A callback with pages has a method `charts() -> Pages`, usually with a chart per metric and a
    curve per branch.
    """
    pages = collect_pages(trainer.callbacks)  # type: ignore[attr-defined]
    for logger in tensorboard_loggers(trainer):
        logger.experiment.add_custom_scalars(layout_of(logger, pages))


def collect_pages(callbacks: Iterable[L.Callback]) -> Pages:
    """Return the pages of all callbacks, those of the losses and branches first."""
    pages: Pages = dict(LOSS_PAGE)
    for page in BRANCH_PAGES:
        pages[page] = {}
    for callback in callbacks:
        if hasattr(callback, "charts"):
            _add(pages, callback.charts())
    return {page: charts for page, charts in pages.items() if charts}


def _add(pages: Pages, more: Pages) -> None:
    """Add pages; the charts of a page that exists follow its own."""
    for page, charts in more.items():
        pages[page] = pages.get(page, {}) | charts


def layout_of(logger: TensorBoardLogger, pages: Pages) -> dict[str, dict[str, list[Any]]]:
    """Return the pages as `add_custom_scalars` takes them, with the tags of one logger."""
    layout: dict[str, dict[str, list[Any]]] = {}
    for page, charts in pages.items():
        layout[page] = {}
        for chart, tags in charts.items():
            own_tags = [tag_of(logger, tag) for tag in tags]
            layout[page][chart] = ["Multiline", own_tags]
    return layout


def tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that write TensorBoard's files."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def tag_of(logger: TensorBoardLogger, tag: str) -> str:
    """Return a tag with the logger's prefix, which `logger.experiment` does not add."""
    if not logger._prefix:
        return tag
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{tag}"
