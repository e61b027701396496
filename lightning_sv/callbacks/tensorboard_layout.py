"""TensorBoard's Custom Scalars page: curves per chart."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

#: page -> chart -> ["Multiline", tags or patterns of tags]
Pages = dict[str, dict[str, list[Any]]]

#: first page
LOSS_PAGE: Pages = {
    "loss": {
        "validation": ["Multiline", ["val/loss"]],
        "training": ["Multiline", ["train/loss"]],
        "training and validation": ["Multiline", ["train/loss", "val/loss"]],
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


def lay_out(trainer: L.Trainer) -> None:
    """Write the pages of all callbacks at once, because a second layout would replace the first.

    A callback with pages has a method `charts() -> Pages`, usually with a chart per metric and a line per branch.
    """
    pages: Pages = dict(LOSS_PAGE)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for page, charts in callback.charts().items() if hasattr(callback, "charts") else ():
            pages[page] = pages.get(page, {}) | charts
    first = [page for page in (*LOSS_PAGE, *BRANCH_PAGES) if page in pages]
    pages = {page: pages[page] for page in dict.fromkeys([*first, *pages])}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            own = {
                page: {chart: [kind, [tag_of(logger, tag) for tag in tags]] for chart, (kind, tags) in charts.items()}
                for page, charts in pages.items()
            }
            logger.experiment.add_custom_scalars(own)


def tag_of(logger: TensorBoardLogger, tag: str) -> str:
    """Return a tag with the logger's prefix, which `logger.experiment` does not add."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{tag}" if logger._prefix else tag


def chart_layout(norms: Iterable[str]) -> Pages:
    """Return the pages of these `branch_norms`: a page per group of branches, a chart per layer and kind.

    Q, K and V also have one chart each: with several runs, colours stand for runs and TensorBoard's markers of a
    branch differ between runs.
    """
    keys = set(norms)
    places = sorted({key.split("/")[0] for key in keys}, key=lambda place: (place != "mean", len(place), place))
    kinds = ("effective", "W", "gamma_in", "gamma_out", "gamma")
    pages: Pages = {}
    for page, members in BRANCH_PAGES.items():
        charts = {f"{name}, effective, mean": [f"mean/{name}/effective"] for name in members if page == "Q, K, V"}
        charts |= {f"{kind}, {place}": [f"{place}/{m}/{kind}" for m in members] for place in places for kind in kinds}
        for title, wanted in charts.items():
            if tags := [f"branch_norm/{key}" for key in wanted if key in keys]:
                pages.setdefault(page, {})[title] = ["Multiline", tags]
    mixtures = [place for place in places if f"{place}/expert_up_proj/effective/expert0" in keys]
    for side in ("gate", "up") if mixtures else ():  # one curve per expert
        patterns = {place: f"branch_norm/{place}/expert_{side}_proj/effective/expert.*" for place in mixtures}
        pages[f"experts, {side}"] = {place: ["Multiline", [pattern]] for place, pattern in patterns.items()}
    return pages
