"""Check and time the kernels of all ggml-ext types on the GPUs of this machine, and write a report for the maintainers."""

from __future__ import annotations

import dataclasses
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Bar, Console
from .._base.encoding import to_json
from .._base.errors import UserError
from .._base.files import write_atomically
from .._base.option import option
from .._base.package import __version__
from .._base.threads import usable_cores
from .._base.types import WEIGHT_TYPES
from .._formats.gguf_file import bits_per_weight
from .._formats.names import unknown_type_message
from .._formats.reserved_paths import ReservedPaths, reserve_file
from .._native import backend, library
from .._native.backend import Device
from .._native.programs import not_built
from .gpu_page import DeviceReport, Machine, baselines, build_page
from .kernel_check import TypeResult, check_type, choose_shape

GPU_KINDS = ("gpu", "igpu")
START_SECONDS = 120.0  # limit for listing the devices, and for the first product, where a driver may compile all kernels of the backend
TYPE_SHARE = 0.1  # part of a device's time that one type may take
HOW_TO_BUILD = (
    "install the GPU's driver and a package built for it: pip install . -C cmake.define.GGML_CUDA=ON, or GGML_VULKAN=ON, "
    "as docs/using/install.md describes"
)


@dataclass(frozen=True, kw_only=True)
class GpuReportOptions:
    """Options of `ggml-ext gpu-report`."""

    output: Path = option(
        Path("gpu-report.json"), short="-o", metavar="FILE", help="JSON file to write; the page next to it ends in .md (default: gpu-report.json)"
    )
    device: str | None = option(None, metavar="NAME", help="device to check, such as CUDA0, Vulkan0 or CPU (default: all GPUs)")
    type: str | None = option(None, metavar="TYPES", help="ggml-ext types to check, with commas (default: all)")
    minutes: int = option(10, metavar="N", minimum=1, help="time limit in minutes (default: 10)")
    force: bool = option(False, short="-f", help="replace the files if they exist")

    def types(self) -> list[GGMLQuantizationType]:
        """Return the ggml-ext types to check. Raise UserError for an unknown name."""
        names = list(WEIGHT_TYPES) if self.type is None else self.type.lower().split(",")
        for name in names:
            if name not in WEIGHT_TYPES:
                raise UserError(unknown_type_message("--type", name, list(WEIGHT_TYPES)))
        return [GGMLQuantizationType[name.upper()] for name in dict.fromkeys(names)]

    def paths(self) -> tuple[Path, Path]:
        """Return the paths of the JSON file and of the page. UserError if one may not be written."""
        page = self.output.with_suffix(".md")
        if page == self.output:
            raise UserError(f"--output: {self.output} is the name of the page: name the JSON file, such as {self.output.with_suffix('.json')}")
        reserved = ReservedPaths({})
        for path in (self.output, page):
            reserved = reserve_file("--output", path, reserved, self.force)
        return self.output, page


@dataclass
class Report:
    """The report, written again after each type.

    Attributes:
        json_path, page_path: the files.
        machine: the machine and the versions.
        devices: the results by device.
    """

    json_path: Path
    page_path: Path
    machine: Machine
    devices: list[DeviceReport] = field(default_factory=list)

    def page(self) -> str:
        return build_page(self.machine, self.devices)

    def write(self, force: bool = True) -> None:
        """Write both files. force: replace existing ones."""
        record = {"machine": dataclasses.asdict(self.machine), "devices": [device.record() for device in self.devices]}
        for path, text in ((self.json_path, to_json(record, 1)), (self.page_path, self.page())):
            try:
                with write_atomically(path, force) as part:
                    part.write_text(text + "\n", encoding="utf-8")
            except FileExistsError:
                raise UserError(f"--output: {path} exists: name another file or pass --force to replace it") from None
            except OSError as e:
                raise UserError(f"cannot write {path}: {e.strerror}; name a file elsewhere with --output") from e

    def problem(self) -> str:
        """Say which types are not right; empty if all are."""
        wrong = [f"{r.type} on {device.device.name}" for device in self.devices for r in device.results if r.correct != "yes" and not r.is_standard]
        if not wrong:
            return ""
        names = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        return f"not right or not measured: {names}; please send {self.page_path} and {self.json_path} to the maintainers"


def gpu_report(options: GpuReportOptions, console: Console) -> Report:
    """Check all types on the chosen devices. Raise UserError if the libraries are missing, or no device can be checked."""
    end = time.monotonic() + 60 * options.minutes
    types, (json_path, page_path) = options.types(), options.paths()
    encoder = library.load()
    if encoder is None or not backend.can_run():
        raise not_built("the native library")
    devices, run = backend.list_devices(START_SECONDS)
    if run.failure:
        raise UserError(f"cannot list the devices: {run.failure}")
    chosen = choose_devices(devices, options.device)
    report = Report(json_path, page_path, describe_machine(devices, run.log))
    report.write(options.force)
    types = with_baselines(types)
    with console.bar("gpu-report", len(chosen) * len(types), "type") as bar:
        for i, device in enumerate(chosen):
            console.note(f"{device.name}: {device.description}")
            now = time.monotonic()
            check_device(DeviceReport(device, [new_result(t) for t in types]), report, encoder, (end - now) / (len(chosen) - i), bar)
    return report


def check_device(device_report: DeviceReport, report: Report, encoder: library.Library, seconds: float, bar: Bar) -> None:
    """Check all types on a device within a time limit, and add the results to the report."""
    start, n_threads, name = time.monotonic(), usable_cores(), device_report.device.name
    report.devices.append(device_report)
    shape, device_report.problem = choose_shape(device_report.device, n_threads, min(START_SECONDS, max(seconds, 1.0)))
    device_report.rows = shape.rows
    for result in device_report.results:
        limit = min(start + seconds - time.monotonic(), TYPE_SHARE * seconds)
        if limit < 1:
            result.failures.append(f"not measured: time limit reached; pass a larger --minutes, or --type {result.type.lower()}")
        else:
            with tempfile.TemporaryDirectory(prefix="ggml-ext-gpu-", ignore_cleanup_errors=True) as directory:
                check_type(encoder, name, GGMLQuantizationType[result.type], shape, Path(directory), n_threads, limit, result)
        device_report.seconds = time.monotonic() - start
        report.write()
        bar.update()


def choose_devices(devices: Sequence[Device], name: str | None) -> list[Device]:
    """Return the devices to check. UserError if there is none."""
    listed = ", ".join(f"{d.name} ({d.description})" for d in devices) or "none"
    if name is not None:
        chosen = [d for d in devices if d.name.lower() == name.lower()]
        if not chosen:
            raise UserError(f"--device: unknown device {name!r}; the devices are: {listed}")
        return chosen
    if chosen := [d for d in devices if d.kind in GPU_KINDS]:
        return chosen
    raise UserError(f"no GPU was found; the devices are: {listed}; {HOW_TO_BUILD}; to try the command without one, pass --device CPU")


def with_baselines(types: Sequence[GGMLQuantizationType]) -> list[GGMLQuantizationType]:
    """Return the types and the standard types that they are compared with, which come last because time may run out."""
    standard = {GGMLQuantizationType[name] for type_ in types for name in baselines(bits_per_weight(type_))}
    return [*types, *sorted(standard, key=bits_per_weight)]


def new_result(type_: GGMLQuantizationType) -> TypeResult:
    return TypeResult(type_.name, bits_per_weight(type_), type_.name.lower() not in WEIGHT_TYPES)


def describe_machine(devices: Sequence[Device], log: str) -> Machine:
    """Describe this machine. log: the messages of the backends."""
    cpu_info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", cpu_info.read_text(errors="replace")) if cpu_info.exists() else None
    described = next((d.description for d in devices if d.kind == "cpu"), "") or platform.processor()
    llama_cpp, ggml = library.upstream_versions()
    return Machine(
        ggml_ext=__version__, llama_cpp=llama_cpp, ggml=ggml, os=platform.platform(), python=platform.python_version(),
        cpu=match[1] if match else described, n_cores=usable_cores(), devices=list(devices), log=log.splitlines()[-40:],
    )
