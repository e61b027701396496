"""TensorBoard's Custom Scalars page: curves per chart."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.runs.tags import TRAIN_LOSS, VAL_LOSS

#: page -> chart -> ["Multiline", tags or patterns of tags]
Pages = dict[str, dict[str, list[Any]]]

#: first page
LOSS_PAGE: Pages = {
    "loss": {
        "validation": ["Multiline", [VAL_LOSS]],
        "training": ["Multiline", [TRAIN_LOSS]],
        "training and validation": ["Multiline", [TRAIN_LOSS, VAL_LOSS]],
    }
}
#: page -> branches whose norms share its charts
BRANCH_PAGES = {
    "Q, K, V": ("q_proj", "k_proj", "v_proj"),
    "gate, up": ("gate_proj", "up_proj"),
    "shared expert": ("shared_gate_proj", "shared_up_proj"),
    "experts, mean": ("expert_gate_proj", "expert_up_proj"),
    "output norms": ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm"),
}


#: order of the charts of a page of branches
KINDS = ("effective", "W", "gamma_in", "gamma_out", "gamma")


def lay_out(trainer: L.Trainer) -> None:
    """Write the pages of all callbacks at once, because a second layout would replace the first.

    A callback with pages has a method `charts() -> Pages`, usually with a chart per metric and a
    line per branch.
    """
    pages = collect_pages(trainer.callbacks)  # type: ignore[attr-defined]
    for logger in tensorboard_loggers(trainer):
        logger.experiment.add_custom_scalars(with_prefix(logger, pages))


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


def with_prefix(logger: TensorBoardLogger, pages: Pages) -> Pages:
    """Return the pages with the tags of one logger."""
    own: Pages = {}
    for page, charts in pages.items():
        own[page] = {}
        for chart, (kind, tags) in charts.items():
            own_tags = [tag_of(logger, tag) for tag in tags]
            own[page][chart] = [kind, own_tags]
    return own


def tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that write TensorBoard's files."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def tag_of(logger: TensorBoardLogger, tag: str) -> str:
    """Return a tag with the logger's prefix, which `logger.experiment` does not add."""
    if not logger._prefix:
        return tag
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{tag}"


def chart_layout(norms: Iterable[str]) -> Pages:
    """Return the pages of these `branch_norms`: a page per group of branches.

    A page has a chart per layer and kind. Q, K and V also have one chart each: with several runs,
    colours stand for runs and TensorBoard's markers of a branch differ between runs.
    """
    keys = set(norms)
    places = sorted({key.split("/")[0] for key in keys}, key=_mean_first)
    pages: Pages = {}
    for page, members in BRANCH_PAGES.items():
        possible = _branch_charts(page, members, places)
        pages[page] = charts_of(possible, keys, "branch_norm")
    for side in ("gate", "up"):
        pages[f"experts, {side}"] = _expert_charts(side, keys, places)
    return {page: charts for page, charts in pages.items() if charts}


def charts_of(
    possible: Mapping[str, Sequence[str]], keys: Collection[str], prefix: str
) -> dict[str, list[Any]]:
    """Return the charts that have a line.

    Args:
        possible: title of a chart -> keys of its lines, if they are written
        keys: keys that are written
        prefix: first part of their tags
    """
    charts: dict[str, list[Any]] = {}
    for title, members in possible.items():
        tags = [f"{prefix}/{key}" for key in members if key in keys]
        if tags:
            charts[title] = ["Multiline", tags]
    return charts


def _mean_first(place: str) -> tuple[bool, int, str]:
    """Sort key of places: mean, then layer0, layer1, ..., layer10."""
    return (place != "mean", len(place), place)


def _branch_charts(
    page: str, members: Sequence[str], places: Sequence[str]
) -> dict[str, list[str]]:
    """Return the title of each chart of a page, and the keys that it would show."""
    charts: dict[str, list[str]] = {}
    if page == "Q, K, V":
        for name in members:
            charts[f"{name}, effective, mean"] = [f"mean/{name}/effective"]
    for place in places:
        for kind in KINDS:
            charts[f"{kind}, {place}"] = [f"{place}/{member}/{kind}" for member in members]
    return charts


def _expert_charts(side: str, keys: Collection[str], places: Sequence[str]) -> dict[str, list[Any]]:
    """Return a chart per layer for one side of the experts, with a curve per expert."""
    charts: dict[str, list[Any]] = {}
    for place in places:
        prefix = f"{place}/expert_{side}_proj/effective/expert"
        if f"{prefix}0" in keys:
            charts[place] = ["Multiline", [f"branch_norm/{prefix}.*"]]
    return charts
