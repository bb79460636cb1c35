#!/usr/bin/env python3
"""Check correctness and speed of the kernels on one GPU in ten minutes; writes a JSON file and a Markdown page.

    ./gpu-check                        in an unpacked bundle (make gpu-bundle), which needs no compiler and no network
    scripts/gpu/gpu_check.py           in the sources: builds the programs first, which takes a compiler and for CUDA the toolkit
    gpu_check.py --backend vulkan      a GPU of any vendor; metal on a Mac
    gpu_check.py --rehearse            without a GPU: all checks on little data, on the CPU and on a Vulkan driver for CPUs

Needs the GPU's driver, Python 3.10 or newer and numpy; CUDA also cuBLAS, of a toolkit or the Python package nvidia-cublas.
compute-sanitizer and ncu are used if they are installed. From the sources also cmake, ninja and the Python package gguf.

The most important parts run first, and each result is written before the next check begins. To resume, repeat the command: checks that
passed are kept unless --again is given. The exit code is 1 if a check failed, a required speed was missed, or the time was too short.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build"))
import check_page
from check_backend import BACKENDS, Backend, describe_machine, find_device, set_environment
from check_correctness import check_more, check_operations, check_perplexities
from check_faults import FAULTS
from check_run import BUNDLE_FILE, EXT_TYPES, ROOT, Run
from check_speed import SyntheticModels, check_more_speed, check_speed
from check_tools import check_counters, check_sanitizers

# part -> its share of --minutes 10, in minutes; unused time goes to the next part, and at last to `more`
PARTS = {"correctness": 2, "perplexity": 1, "speed": 4, "sanitizer": 2, "counters": 1, "more": 0}
CUDA_PARTS = ("sanitizer", "counters")


def run_parts(run: Run, parts: list[str], minutes: float, models_dir: Path | None) -> None:
    start = time.monotonic()
    run.end = start + 60 * minutes
    unit, allotted = 60 * minutes / sum(PARTS.values()), 0
    with tempfile.TemporaryDirectory() as tmp:
        directory = Path(tmp)
        models = SyntheticModels(run, models_dir or directory, in_advance="speed" in parts)
        actions = {
            "correctness": lambda: check_operations(run), "perplexity": lambda: check_perplexities(run, directory),
            "speed": lambda: check_speed(run, models), "sanitizer": lambda: check_sanitizers(run), "counters": lambda: check_counters(run),
            "more": lambda: (check_more(run, directory), check_more_speed(run, models)),
        }
        try:
            for part, action in actions.items():
                allotted += PARTS[part]
                if part not in parts or (part in CUDA_PARTS and run.backend != "cuda"):
                    continue
                # a rehearsal tests the check itself, so no part may take another's time
                run.start_part(part, run.end if run.rehearsal or part == "more" else start + allotted * unit)
                part_start = time.monotonic()
                action()
                run.report.setdefault("seconds", {})[part] = round(time.monotonic() - part_start, 1)
                run.write()
        finally:
            models.close()


def check_backend(run: Run, backend: Backend, parts: list[str], minutes: float, models_dir: Path | None) -> None:
    """Check one backend; the other parts run only if the machine and the device are usable."""
    run.start_part("machine", time.monotonic() + 60 * min(2.0, minutes))
    if run.check("machine", describe_machine, backend, again=True) is not None and run.check("device", find_device, backend, again=True) is not None:
        run_parts(run, parts, minutes, models_dir)
    run.write()


def build_from_sources(backend: str) -> Path:
    """Build what the check runs, for this machine's GPU; returns the directory of the programs. SystemExit if that fails."""
    import gpu_build

    architectures = None
    if backend == "cuda":
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            raise SystemExit("error: nvidia-smi names no GPU: install NVIDIA's driver, or build a bundle for another machine (make gpu-bundle)") from None
        architectures = [capability.strip().replace(".", "")]
    return gpu_build.build([backend], architectures) / "bin"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check" if BUNDLE_FILE.exists() else None, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help=f"one or more of {', '.join(BACKENDS)}, separated by commas (default: cuda; rehearsed: cuda,vulkan)")
    parser.add_argument("--minutes", type=float, default=10, help="time for all backends, without the build (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="report; the page has the same name with .md (default: %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order (default: %(default)s)")
    parser.add_argument("--types", default=",".join(EXT_TYPES), help="ggml-ext types (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="also repeat checks that have passed")
    parser.add_argument("--device", help="llama.cpp's name of the device (default: the backend's first)")
    parser.add_argument("--shape", default="llama-3.1-8b", help="shape of the synthetic models, as in synth_model.py (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the synthetic models; Llama-3.1-8B has 32 (default: %(default)s)")
    parser.add_argument("--models", type=Path, metavar="DIR", help="directory for about 15 GB of synthetic models (default: a temporary one)")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="use the programs in this directory instead of building them")
    parser.add_argument("--rehearse", action="store_true", help="run without a GPU, on little data")
    parser.add_argument("--inject", choices=FAULTS, metavar="FAULT",
                        help="with --rehearse: let something fail: " + ", ".join(f"{name} ({text})" for name, text in FAULTS.items()))
    args = parser.parse_args(argv)
    args.backends = (args.backend or ("cuda,vulkan" if args.rehearse else "cuda")).split(",")
    args.parts, args.types = args.only.split(","), args.types.split(",")
    for flag, values, known in (("--backend", args.backends, BACKENDS), ("--only", args.parts, PARTS), ("--types", args.types, EXT_TYPES)):
        if unknown := set(values) - set(known):
            raise SystemExit(f"error: {flag}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if args.inject and not args.rehearse:
        raise SystemExit("error: --inject needs --rehearse")
    if args.rehearse:
        args.shape, args.layers = "tiny", 1
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # else llama.cpp leaves out drivers for CPUs
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    out = args.out.resolve()
    runs = []
    minutes_left = args.minutes
    for i, name in enumerate(args.backends):
        backend = BACKENDS[name]
        on_cpu = args.rehearse and name == "cuda"  # there is no CUDA driver for CPUs
        bundled = ROOT / "bin" if BUNDLE_FILE.exists() else None
        programs = args.programs or bundled or build_from_sources(name)
        run = Run(name, args.device or ("CPU" if on_cpu else backend.device), programs.resolve(), out, types=args.types, shape=args.shape,
                  n_layers=args.layers, rehearsal=args.rehearse, fault=args.inject, resume=not args.again)
        set_environment(run)
        signal.signal(signal.SIGTERM, run.stop)
        signal.signal(signal.SIGINT, run.stop)
        print(f"\n{name} on {run.device}" + (", a rehearsal" if args.rehearse else ""), flush=True)
        start = time.monotonic()
        check_backend(run, backend, args.parts, minutes_left / (len(args.backends) - i), args.models)
        minutes_left = max(0.0, minutes_left - (time.monotonic() - start) / 60)
        runs.append(run)
    page = check_page.page(runs, json.loads(BUNDLE_FILE.read_text()) if BUNDLE_FILE.exists() else {})
    out.with_suffix(".md").write_text(page)
    print("\n" + page[page.index(check_page.SUMMARY) :])
    print(f"figures: {out}; page: {out.with_suffix('.md')}")
    return 0 if all(run.report["passed"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
