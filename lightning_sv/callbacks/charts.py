"""TensorBoard's Custom Scalars page: which curves belong in one chart."""

from collections.abc import Iterable
from typing import Any

#: page -> the branches whose norms share its charts
BRANCH_PAGES = {
    "Q, K, V": ("q_proj", "k_proj", "v_proj"),
    "gate, up": ("gate_proj", "up_proj"),
    "shared expert": ("shared_gate_proj", "shared_up_proj"),
    "experts, mean": ("expert_gate_proj", "expert_up_proj"),
    "output norms": ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm"),
}
#: page -> pattern of the curves, one an expert, that share the chart of a layer
EXPERT_PAGES = {
    "expert load": "moe/{layer}/load/expert.*",
    "experts, gate": "branch_norm/{layer}/expert_gate_proj/effective/expert.*",
    "experts, up": "branch_norm/{layer}/expert_up_proj/effective/expert.*",
}


def chart_layout(norms: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the layout: a page a group of branches, a chart a layer and kind, a line a branch or expert.

    Args:
        norms: the keys of `branch_norms`, 'layer0/q_proj/effective'.
    """
    keys = dict.fromkeys(norms)
    places = sorted({key.split("/")[0] for key in keys}, key=lambda place: (place != "mean", len(place), place))
    pages: dict[str, dict[str, list[Any]]] = {}
    for page, members in BRANCH_PAGES.items():
        for place in places:
            for kind in ("effective", "W", "gamma_in", "gamma_out", "gamma"):
                tags = [f"branch_norm/{place}/{m}/{kind}" for m in members if f"{place}/{m}/{kind}" in keys]
                if tags:
                    pages.setdefault(page, {})[f"{kind}, {place}"] = ["Multiline", tags]
    mixtures = [place for place in places if f"{place}/expert_up_proj/effective/expert0" in keys]
    for page, pattern in EXPERT_PAGES.items():
        if mixtures:
            pages[page] = {place: ["Multiline", [pattern.format(layer=place)]] for place in mixtures}
    return pages
