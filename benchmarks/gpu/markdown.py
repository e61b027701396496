"""Report as a page: tables of report.json, and the messages of all failures."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = "report.md"
Figures = dict[str, Any]


def write(out: Path, report: dict[str, Any]) -> None:
    """Write report.md next to report.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).write_text(page(report))


def page(report: dict[str, Any]) -> str:
    """Return the page of a report, which may be incomplete."""
    made = report["made"]["provenance"]
    lines = ["# GPU report", "", f"{made['machine']}; {made['date']}; code {made['commit']}.", ""]
    if report["made"]["toy"]:
        lines += ["**Toy sizes: these figures show that the stages run, and nothing else.**", ""]
    rows = []
    for name, stage in report["stages"].items():
        provenance = stage.get("provenance", {})
        rows.append(
            [
                name,
                stage["state"],
                f"{stage['seconds']:.0f}",
                provenance.get("date", ""),
                provenance.get("commit", ""),
            ]
        )
    lines += _table(["stage", "state", "s", "date", "code"], rows)
    for name, stage in report["stages"].items():
        lines += ["", f"## {name}", ""]
        if stage.get("error"):
            lines += [f"{stage['state']}:", "", "```", *stage["error"], "```", ""]
        try:
            part = _PARTS.get(name.partition("-")[0], _overhead)
            lines += part(stage.get("figures", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # an interrupted stage
            lines += [f"(the figures are incomplete: {type(error).__name__} {error})"]
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _get(row: Figures, key: str, form: str, scale: float = 1) -> str:
    value = row.get(key)
    return "" if value is None else format(value * scale, form)


def _ceilings(found: Figures) -> list[str]:
    versions = found.get("versions", {})
    packages = ", ".join(
        f"{name} {version or 'absent'}" for name, version in versions.get("packages", {}).items()
    )
    lines = [
        f"{versions.get('device')}, {versions.get('memory_gib')} GiB; Python"
        f" {versions.get('python')}; {packages}."
    ]
    lines += [
        "",
        f"Copy {found.get('copy_tb_s')} TB/s; 8,192³ in bf16 {found.get('bf16_tflops')} TFLOP/s.",
        "",
    ]
    keys = ["tokens", "d_in", "d_out", "forward", "d_input", "d_weight"]
    lines += ["Products in bf16, TFLOP/s:", ""]
    lines += _table(keys, [[row[key] for key in keys] for row in found.get("products", [])])
    rows = []
    for row in found.get("attention", []):
        said = row.get("errors", {}).get("error", "")
        cells = [
            _get(row, "forward_ms", ".3f"),
            _get(row, "both_ms", ".3f"),
            _get(row, "both_tflops", ".0f"),
        ]
        rows.append([row["shape"], row["backend"], *cells, said[:80]])
    lines += ["", "Causal attention (batch, heads, length, width), FLOPs of the causal half:", ""]
    lines += _table(["shape", "backend", "forward ms", "with backward ms", "TFLOP/s", ""], rows)
    return lines + [f"{name}: {error}" for name, error in found.get("errors", {}).items()]


def _correctness(found: Figures) -> list[str]:
    ways = [
        "cpu_float32",
        "float32",
        "again",
        "plain_against_fast",
        "compiled_against_eager",
        "bf16",
        "compiled_bf16",
    ]
    rows = []
    for case, errors in found.get("cases", {}).items():
        cells = [_get(errors.get(way, {}), "gradient", ".1e") for way in ways]
        verdict = (
            ", ".join(errors["fails"]) or "within"
            if "fails" in errors
            else " ".join(errors.get("error", []))[-200:]
        )
        rows.append([case, _get(errors.get("float32", {}), "loss", ".1e"), *cells, verdict])
    limits = found.get("limits", {})
    lines = [
        "Relative error of the gradient (and of the loss, first), against float64 on the CPU unless"
        " named;"
    ]
    lines += [f"limits {limits.get('float32')} and, in bf16, {limits.get('bf16')}.", ""]
    lines += _table(["", "loss, float32", *(way.replace("_", " ") for way in ways), "limits"], rows)
    empty = found.get("experts_without_rows", {})
    said = (
        f"zeros {empty.get('zeros')}, products {empty.get('rows', 0):.1e} apart"
        f" {empty.get('error', '')}"
    )
    return [*lines, "", f"Experts without rows: {said}"]


def _fit(found: Figures) -> list[str]:
    rows = []
    for name, run in found.get("runs", {}).items():
        rows.append(
            [
                name,
                run["exit"],
                _get(run, "seconds", ".0f"),
                run.get("val_loss", ""),
                run.get("error", [""])[-1],
            ]
        )
    lines = [
        f"`fit` for {found.get('steps')} steps; saved at {found.get('saved_at')}, killed after"
    ]
    lines += [f"{found.get('killed_after')}, resumed.", ""]
    lines += _table(["run", "exit", "s", "validation loss", ""], rows)
    for name, said in found.items():
        if " against " in name:
            equal = (
                "bit-equal"
                if said["bit_equal"]
                else f"not bit-equal, weights {said['weights_apart']:.1e} apart"
            )
            lines += ["", f"{name}: {equal}."]
    counted = found.get("synchronizations", {})
    if isinstance(counted, dict) and "a_step" in counted:
        lines += ["", f"Host waits for the device: {counted['a_micro_batch']:.2f} a micro-batch,"]
        lines += [f"{counted['a_step']:.2f} per step, at {counted['places'] or 'no place'}."]
    return lines


def _warm(found: Figures) -> list[str]:
    rows = [
        [
            name,
            _get(row, "first_step_s", ".1f"),
            _get(row, "second_step_s", ".2f"),
            " ".join(row.get("error", []))[-120:],
        ]
        for name, row in found.get("cases", {}).items()
    ]
    return ["Compiled cold, beside each other; one block, which serves all.", "", *_table(
        ["case", "first step s", "second s", ""], rows)]  # fmt: skip


def _overhead(found: Figures) -> list[str]:
    lines = [f"{found.get('model')}, sequences of {found.get('seq_len')} tokens."]
    for table in found.get("arms", {}).values():
        rows = []
        for name, row in table.get("rows", {}).items():
            interval = f"{row['low']:.4f} to {row['high']:.4f}" if "low" in row else ""
            cells = [
                _get(row, "ms", ".2f"),
                _get(row, "ratio", ".4f"),
                interval,
                _get(row, "rounds", "d"),
            ]
            cells.append(_get(row, "peak_mib", ",.0f"))
            cells += [
                _get(row, "tokens_per_s", ",.0f"),
                _get(row, "mfu", ".1f", 100),
                _get(row, "mfu_measured", ".1f", 100),
            ]
            rows.append([name, *cells, _get(row, "first_step_s", ".1f")])
        lines += [
            "",
            (
                f"Micro-batch {table['micro_batch']}, {table['tokens']:,} tokens per step,"
                " optimizer included:"
            ),
            "",
        ]
        head = [
            "",
            "ms",
            f"time / {table.get('reference', 'first')}",
            "95%",
            "rounds",
            "peak MiB",
            "tokens/s",
            "MFU %",
        ]
        lines += _table([*head, "of measured %", "first step s"], rows)
    for name, why in found.get("left_out", {}).items():
        lines += ["", f"Left out: {name}: {why}"]
    return lines


def _profile(found: Figures) -> list[str]:
    kinds = sorted(set().union(*(row.get("ms", {}) for row in found.values())))
    rows = []
    for name, row in found.items():
        milliseconds = row.get("ms", {})
        cells = [_get(milliseconds, kind, ".2f") for kind in kinds]
        cells += [_get(row, "gaps_ms", ".2f"), _get(row, "kernels", ".0f"), row.get("error", "")]
        rows.append([name, _get(row, "step_ms", ".2f"), *cells])
    lines = [
        "Milliseconds per step by kind of kernel.",
        "",
        *_table(["", "step", *kinds, "gaps", "kernels", ""], rows),
    ]
    for name, row in found.items():
        lines += _largest_kernels(name, row.get("largest", []))
    return lines


def _largest_kernels(name: str, kernels: list[Figures]) -> list[str]:
    rows = []
    for row in kernels:
        cells = [
            _get(row, "launches", ".0f"),
            _get(row, "ms", ".3f"),
            _get(row, "gb", ".3f"),
            _get(row, "tb_s", ".2f"),
        ]
        rows.append([f"`{row['name']}`", row["kind"], *cells])
    title = f"Kernels of {name}, per step; bytes are those that a generated kernel must move:"
    return ["", title, "", *_table(["kernel", "kind", "launches", "ms", "GB", "TB/s"], rows)]


def _memory(found: Figures) -> list[str]:
    rows = [[name, f"{mib:,}"] for name, mib in found.get("planned_mib", {}).items()]
    return ["Peak of a step as `plan` expects it.", "", *_table(["", "MiB"], rows)]


def _attention(found: Figures) -> list[str]:
    rows = []
    for kind, table in found.items():
        rows += [
            [kind, name, _get(row, "error_of_norm", ".1e"), row.get("error", "")]
            for name, row in table.items()
        ]
    return ["Relative error in bf16 against float64.", "", *_table(["", "", "error", ""], rows)]


def _cache(found: Figures) -> list[str]:
    if found.get("saved"):
        return [
            f"{found['archive']}: {found['files']} files, {found['archive_bytes'] / 2**20:.1f} MiB."
        ]
    return [f"Not saved: {found.get('why')}."]


_PARTS: dict[str, Callable[[Figures], list[str]]] = {
    "ceilings": _ceilings,
    "correctness": _correctness,
    "fit": _fit,
    "warm": _warm,
    "profile": _profile,
    "memory": _memory,
    "attention": _attention,
    "cache": _cache,
}
