"""The page of `ggml-ext gpu-report`, in Markdown, to paste into an issue."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._base.text import format_duration
from .._base.units import GIB
from .._native.backend import Device
from .kernel_check import MAX_NMSE, SPEED_COLUMNS, SPEED_ROW, SPEED_ROWS, TypeResult

# upper bound of the bits per weight, and the standard types to compare with
BASELINES = ((2.5, ("IQ2_XXS", "Q2_K")), (3.5, ("IQ3_S", "Q3_K")), (4.6, ("Q4_K",)), (99.0, ("Q5_K",)))


def baselines(bpw: float) -> tuple[str, ...]:
    """Return the standard types of a type's size, in bits per weight."""
    return next(names for limit, names in BASELINES if bpw <= limit)


@dataclass
class Machine:
    """The machine and the versions. log: messages of the backends."""

    ggml_ext: str
    llama_cpp: str
    ggml: str
    os: str
    python: str
    cpu: str
    n_cores: int
    devices: list[Device]
    log: list[str]


@dataclass
class DeviceReport:
    """The results on a device.

    Attributes:
        device: the device.
        results: of the standard types and the ggml-ext types.
        problem: why the first product failed; empty if it did not.
        rows: of the timed matrices.
        seconds: that the checks took.
    """

    device: Device
    results: list[TypeResult]
    problem: str = ""
    rows: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def ratios(self, result: TypeResult, what: str) -> dict[str, float | None]:
        """Return the speed relative to the standard types of its size; None if one of both was not measured. what: tokens or prompt."""
        by_type = {r.type: r.seconds.get(what) for r in self.results}
        own = by_type[result.type]
        return {name: base / own if own and (base := by_type.get(name)) else None for name in baselines(result.bpw)}

    def record(self) -> dict[str, Any]:
        """Return the results as JSON, with ratios."""
        record = dataclasses.asdict(self)
        for entry, result in zip(record["results"], self.results, strict=True):
            entry["ratios"] = {what: self.ratios(result, what) for what in SPEED_COLUMNS}
        return record


def build_page(machine: Machine, devices: Sequence[DeviceReport]) -> str:
    """Return the page."""
    listed = "; ".join(f"{d.name} ({d.description}, {d.backend}{memory(d)})" for d in machine.devices)
    lines = [
        "# GPU report", "",
        f"- ggml-ext {machine.ggml_ext}, llama.cpp {machine.llama_cpp}, ggml {machine.ggml}, Python {machine.python}",
        f"- {machine.os}", f"- CPU: {machine.cpu}, {machine.n_cores} cores", f"- Devices: {listed}",
    ]
    for device in devices:
        lines += ["", *device_lines(device)]
    if machine.log:
        lines += ["", "## Messages of the backends", "", "```text", *machine.log, "```"]
    return "\n".join(lines)


def memory(device: Device) -> str:
    return f", {device.total / GIB:.1f} GiB" if device.total else ""


def device_lines(report: DeviceReport) -> list[str]:
    """Return the section of a device: verdict, table and failures."""
    ours = [r for r in report.results if not r.is_standard]
    n_right = sum(r.correct == "yes" for r in ours)
    failures = [f"- {r.type}: {line}" for r in report.results for line in r.failures]
    unsupported = [f"- {r.type}: {', '.join(r.unsupported)}" for r in report.results if r.unsupported]
    title = f"## {report.device.name}: {report.device.description}"
    lines = [title, "", f"**{n_right} of {len(ours)} ggml-ext types are right.** The checks took {format_duration(report.seconds)}."]
    if report.problem:
        lines += ["", f"The first product failed, {report.problem}."]
    lines += ["", *table_lines(report), "", *legend_lines(report)]
    if failures:
        lines += ["", "### Failures", "", *failures]
    if unsupported:
        lines += ["", "### Not supported by the device", "", *unsupported]
    return lines


def table_lines(report: DeviceReport) -> list[str]:
    lines = [
        "| type | bits | right | worst NMSE | tokens: µs | GB/s | prompt: ms | compared with | tokens | prompt |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for result in report.results:
        nmse, times = result.worst_nmse(), result.seconds
        ratios = ["", "", ""]
        if not result.is_standard:
            ratios = [" / ".join(baselines(result.bpw)), *(format_ratios(report.ratios(result, what)) for what in SPEED_COLUMNS)]
        cells = [
            result.type + (" (standard)" if result.is_standard else ""), f"{result.bpw:.2f}", result.correct,
            "-" if nmse is None else f"{nmse:.1e}", number(times.get("tokens"), 1e6), number(result.gb_per_s, 1), number(times.get("prompt"), 1e3),
            *ratios,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.1f}" if value * factor < 1000 else f"{value * factor:,.0f}"


def format_ratios(ratios: dict[str, float | None]) -> str:
    return " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values())


def legend_lines(report: DeviceReport) -> list[str]:
    """Explain the columns."""
    shorter = [f"{what} with {rows:,} rows" for what, rows in report.rows.items() if rows < SPEED_ROWS]
    scaled = f" Timed with fewer rows and scaled: {', '.join(shorter)}." if shorter else ""
    return [
        f"right: products with 1 to 512 columns and of experts have at most an NMSE of {MAX_NMSE:.0e} against a reference in double precision, rows by "
        "index equal the decoded rows.",
        f"tokens, prompt: time of a product of a matrix of {SPEED_ROWS:,} x {SPEED_ROW:,} with {SPEED_COLUMNS['tokens']} and {SPEED_COLUMNS['prompt']} "
        f"columns; the last columns are the speed relative to the standard types, above 1 is faster.{scaled}",
    ]
