"""Results of `benchmarks.step` as Markdown: times relative to our llama, then memory."""

from collections.abc import Sequence
from typing import Any


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the two tables of these combinations, missing measurements, and where and when it ran.

    Args:
        found: result of `benchmarks.step.compare`, in the order of the rows.
    """
    if not found:
        return "Nothing is measured yet."
    peers = list(dict.fromkeys(row["name"] for one in found for row in one["peers"]))
    ours = list(dict.fromkeys(row["name"] for one in found for row in one["strategies"]))
    others = [name for name in ours if name != "llama"]
    parts = [
        (
            "Time of a step over `llama`'s, with 95% intervals; 'ahead': tokens/s of `llama` over"
            " the fastest peer's."
        ),
        _table(
            ["", "llama, ms", *peers, "ahead", *others],
            [
                [
                    _place(one),
                    _milliseconds(one),
                    *_times(one, peers),
                    _ahead(one),
                    *_times(one, others),
                ]
                for one in found
            ],
        ),
        "Saved for backward / peak of a step, MiB.",
        _table(
            ["", *peers, *ours],
            [[_place(one), *(_memory(one, name) for name in (*peers, *ours))] for one in found],
        ),
    ]
    missing = {(name, why) for one in found for name, why in one["missing"].items()}
    parts += [f"{name} is not measured: {why}" for name, why in sorted(missing)]
    return "\n\n".join([*parts, *_sources(found)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _place(one: dict[str, Any]) -> str:
    return (
        f"d={one['width']}, {one['dtype']}, {one['mode']}, {one['threads']}"
        f" thread{'s' if one['threads'] > 1 else ''}"
    )


def _rows(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in (*one["peers"], *one["strategies"])}


def _milliseconds(one: dict[str, Any]) -> str:
    return f"{_rows(one)['llama']['milliseconds']:.0f}"


def _times(one: dict[str, Any], names: Sequence[str]) -> list[str]:
    rows = _rows(one)
    return [
        (
            f"{rows[name]['ratio']:.3f} ({rows[name]['low']:.3f} to {rows[name]['high']:.3f})"
            if name in rows
            else "-"
        )
        for name in names
    ]


def _ahead(one: dict[str, Any]) -> str:
    return f"{min(row['ratio'] for row in one['peers']):.3f}" if one["peers"] else "-"


def _memory(one: dict[str, Any], name: str) -> str:
    if name not in one["saved_mib"]:
        return "-"
    return f"{one['saved_mib'][name]:.1f} / {one['peak_mib'][name]:.1f}"


def _sources(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return when, where and how, each once."""
    said = {
        (
            one["measured"]["machine"],
            one["measured"]["commit"],
            one["measured"]["date"][:10],
            one["rounds"],
        ): one
        for one in found
    }
    return [
        f"{day}, {machine}, commit {commit}, {rounds} rounds: `{one['measured']['command']}`."
        for (machine, commit, day, rounds), one in said.items()
    ]
