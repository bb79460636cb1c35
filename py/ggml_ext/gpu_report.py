"""Check the kernels on the GPUs of this machine, and write a report: ggml-ext gpu-report"""

from __future__ import annotations

import argparse
import sys

from ._base.errors import UserError
from ._commands.gpu_reporting import GpuReportOptions, gpu_report
from ._console import arguments
from ._console.cli import print_text, run_command
from ._console.program import ProgressOptions
from ._console.terminal import Terminal


def build_parser(prog: str = "ggml-ext gpu-report") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, GpuReportOptions, ProgressOptions,
        description="Check that the kernels of all ggml-ext types are right on each GPU of this machine, and compare their speed with standard "
        "types. The result is a JSON file and a page to paste into an issue.",
        epilog="Each type runs in a process of its own: a crash or a hang is one line of the report. Exit code 1: a type is wrong, not supported or not measured.",
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext gpu-report") -> int:
    """Run the command and return its exit code, as run_program() documents it."""
    args = argparse.Namespace()

    def run() -> None:
        build_parser(prog).parse_intermixed_args(argv, args)
        output = arguments.from_namespace(ProgressOptions, args)
        report = gpu_report(arguments.from_namespace(GpuReportOptions, args), Terminal(quiet=output.quiet, progress=output.progress))
        print_text(report.page())
        if problem := report.problem():
            raise UserError(problem)

    def stopped() -> str:
        path = getattr(args, "output", None)
        return f"the results until now are in {path}" if path is not None and path.exists() else "nothing was written"

    return run_command(run, stopped, args=args)


if __name__ == "__main__":
    sys.exit(main())
