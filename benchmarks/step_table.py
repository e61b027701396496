"""Results of `benchmarks.step` as Markdown: times relative to our llama, then memory."""

from collections.abc import Sequence
from itertools import chain
from typing import Any


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the two tables of these combinations, missing measurements, and where and when it ran.

    Args:
        found: result of `benchmarks.step.compare`, in the order of the rows.
    """
    if not found:
        return "Nothing is measured yet."
    peers = _names(found, "peers")
    strategies = _names(found, "strategies")
    others = [name for name in strategies if name != "llama"]
    times = []
    memory = []
    for one in found:
        ratios = [*_times(one, peers), _ahead(one), *_times(one, others)]
        times.append([_place(one), _milliseconds(one), *ratios])
        memory.append([_place(one), *(_memory(one, name) for name in (*peers, *strategies))])
    parts = [
        "Time of a step over `llama`'s, with 95% intervals; 'ahead': tokens/s of `llama` over"
        " the fastest peer's.",
        _table(["", "llama, ms", *peers, "ahead", *others], times),
        "Saved for backward / peak of a step, MiB.",
        _table(["", *peers, *strategies], memory),
        *_missing(found),
        *_sources(found),
    ]
    return "\n\n".join(parts)


def _names(found: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Return the names of all peers or strategies, each once."""
    rows = chain.from_iterable(one[kind] for one in found)
    return list(dict.fromkeys(row["name"] for row in rows))


def _missing(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return why peers are missing, each reason once."""
    missing = set[tuple[str, str]]()
    for one in found:
        missing.update(one["missing"].items())
    return [f"{name} is not measured: {why}" for name, why in sorted(missing)]


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
    return [interval(rows[name]) if name in rows else "-" for name in names]


def interval(row: dict[str, Any]) -> str:
    """Return the ratio of a row with its interval."""
    return "{ratio:.3f} ({low:.3f} to {high:.3f})".format_map(row)


def _ahead(one: dict[str, Any]) -> str:
    return f"{min(row['ratio'] for row in one['peers']):.3f}" if one["peers"] else "-"


def _memory(one: dict[str, Any], name: str) -> str:
    if name not in one["saved_mib"]:
        return "-"
    return f"{one['saved_mib'][name]:.1f} / {one['peak_mib'][name]:.1f}"


def _sources(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return when, where and how, each once."""
    lines = []
    for one in found:
        measured = one["measured"]
        place = f"{measured['date'][:10]}, {measured['machine']}, commit {measured['commit']}"
        lines.append((f"{place}, {one['rounds']} rounds: ", f"`{measured['command']}`."))
    return [source + command for source, command in dict(lines).items()]
