"""Lists a GGUF file, counts its codes and checks it against its original: python -m ggml_ext.inspect FILE [--against ORIGINAL]"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from ._base.encoding import to_json
from ._base.errors import UserError
from ._base.types import WEIGHT_TYPES
from ._base.units import MIB
from ._console import picture
from ._console.cli import Parser, add_common_options, add_threads_option, check_threads, print_text, run_command
from ._console.report import error_record
from ._encode.accuracy import Accuracy, read_epsilons
from ._encode.codec import Codec
from ._encode.compare import compare
from ._encode.histogram import Histogram
from ._formats.gguf_file import GGUFFile, Tensor
from ._formats.imatrix import n_importances
from ._formats.split import open_model
from ._importance.importance import KINDS, Importance, open_importance
from ._native import library
from ._native.blas import one_blas_thread
from ._plan.plan import replacement_type

T = GGMLQuantizationType
WAY_OUT = "pass it to a program that reads it all"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ggml-ext-inspect",
        description="Lists the tensors of a GGUF file, their types and bits per weight and, for ditto3, epsilon: the largest "
        "error of a weight, with which |W x - W' x|_inf <= epsilon * |x|_1.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="GGUF file, or the first of the parts of a split one")
    parser.add_argument(
        "--against",
        metavar="ORIGINAL",
        type=Path,
        help="the file it was made from: compute the errors of all tensors and check them against epsilon; exit code 1 "
        "if one is larger",
    )
    parser.add_argument(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="with --against: show errors weighed with this importance matrix too, with its second moments if it has some",
    )
    parser.add_argument(
        "--importance", metavar="{diagonal,block,full}", help="what to weigh them with; default: the most that --imatrix holds"
    )
    parser.add_argument(
        "--tensor",
        metavar="REGEX",
        help="only the tensors whose name matches, in whole or in part, such as blk.3.attn_q.weight or ffn_",
    )
    parser.add_argument(
        "--histograms",
        action="store_true",
        help="count the codes and scales of each type of ggml-ext, in samples of large tensors",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="with --against: draw the errors by layer and class into this .svg or .png file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("-f", "--force", action="store_true", help="replace the file of --picture if it exists")
    add_threads_option(parser)
    add_common_options(parser)
    return parser


def choose_tensors(file: GGUFFile, pattern: str | None) -> list[Tensor]:
    """Those that --tensor names; UserError if there are none."""
    if pattern is None:
        return file.tensors
    try:
        regex = re.compile(pattern)
    except re.error as e:
        raise UserError(f"--tensor: {pattern!r} is not a regular expression: {e}") from None
    found = [t for t in file.tensors if t.name == pattern] or [t for t in file.tensors if regex.search(t.name)]
    if not found:
        some = f", such as {file.tensors[0].name}" if file.tensors else ""
        raise UserError(f"--tensor: {pattern!r} matches none of the {len(file.tensors)} tensors of {file.path}{some}")
    return found


def load_importance(args: argparse.Namespace, file: GGUFFile) -> Importance:
    """What the errors are weighed with; UserError for an importance matrix of another model."""
    if args.importance is not None and args.importance not in KINDS[1:]:
        raise UserError(f"--importance: got {args.importance!r}, must be {', '.join(KINDS[1:])}")
    if args.imatrix is None or args.against is None:
        for flag, given in (("--imatrix", args.imatrix), ("--importance", args.importance)):
            if given is not None:
                raise UserError(f"{flag} weighs errors, which takes both --against ORIGINAL and --imatrix FILE")
        return Importance()
    importance = open_importance([args.imatrix], args.importance)
    for tensor in file.tensors:
        if tensor.name in importance.matrix and importance.matrix.n_values(tensor.name) != n_importances(tensor):
            raise UserError(
                f"--imatrix: {args.imatrix}: tensor {tensor.name} has {importance.matrix.n_values(tensor.name):,} importances, the model needs "
                f"{n_importances(tensor):,}: it is for another model"
            )
    if not any(t.name in importance.matrix for t in file.tensors):
        raise UserError(f"--imatrix: {args.imatrix} has no tensor of {file.path}: it is for another model")
    return importance


def check_same_tensors(file: GGUFFile, original: GGUFFile) -> None:
    """UserError naming the first tensor that only one of them has or that has another shape."""
    theirs = {t.name: t for t in original.tensors}
    for tensor in file.tensors:
        other = theirs.pop(tensor.name, None)
        if other is None:
            raise UserError(f"tensor {tensor.name} of {file.path} is not in {original.path}: name the file it was made from")
        shapes = [list(t.ne[: t.n_dims]) for t in (tensor, other)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"tensor {tensor.name} is {shapes[0]} in {file.path} and {shapes[1]} in {original.path}: name the file it "
                "was made from"
            )
    if theirs:
        raise UserError(f"tensor {next(iter(theirs))} of {original.path} is not in {file.path}: name the file it was made from")


def check_epsilons(file: GGUFFile, epsilons: dict[str, float]) -> None:
    """UserError for a recorded epsilon that is no bound, or of no DITTO3 tensor or one that --fallback-above replaced."""
    ditto3 = {t.name for t in file.tensors if t.type in (T.DITTO3, replacement_type(t, T.DITTO3))}
    for name, epsilon in epsilons.items():
        if name not in ditto3:
            raise UserError(f"{file.path} records an epsilon for {name}, which is no ditto3 tensor: quantize the model again")
        if not (np.isfinite(epsilon) and epsilon >= 0):
            raise UserError(
                f"tensor {name}: the recorded epsilon is {epsilon}, must be finite and not negative: quantize the model again"
            )


@dataclass
class Finding:
    """What there is to say of a tensor."""

    tensor: Tensor
    epsilon: float | None
    accuracy: Accuracy | None = None  # where there is an original
    is_changed: bool = False  # of another type than the original

    @property
    def bpw(self) -> float:
        return self.tensor.n_bytes * 8 / self.tensor.n_elements

    @property
    def fits(self) -> bool:
        """False if an error is larger than epsilon."""
        return self.epsilon is None or self.accuracy is None or self.accuracy.max_abs <= self.epsilon

    def record(self) -> dict:
        """For --json."""
        return {
            "name": self.tensor.name,
            "shape": list(self.tensor.ne),
            "type": self.tensor.type.name.lower(),
            "bytes": self.tensor.n_bytes,
            "bits_per_weight": self.bpw,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
            **({} if self.accuracy is None else {**error_record(self.accuracy), "within_epsilon": self.fits}),
        }


def find(
    file: GGUFFile,
    original: GGUFFile | None,
    tensors: list[Tensor],
    epsilons: dict[str, float],
    importance: Importance,
    n_threads: int,
) -> Iterator[Finding]:
    """Findings in the order of the tensors, as they are made."""
    others = {} if original is None else {t.name: t for t in original.tensors}
    pool = ThreadPoolExecutor(n_threads)
    try:
        codec = Codec(library.load())
        for tensor in tensors:
            finding = Finding(tensor, epsilons.get(tensor.name))
            if original is not None:
                other = others[tensor.name]
                finding.is_changed = tensor.type != other.type
                finding.accuracy = compare(pool, 2 * n_threads, codec, file, tensor, original, other, importance.guide(tensor))
                importance.release(tensor)
            yield finding
    finally:
        pool.shutdown(cancel_futures=True)


def row_writer(tensors: list[Tensor], weighted: bool) -> Callable[..., None]:
    """A function that prints the columns of the table, name, shape, type and numbers, in the widths that the tensors need."""
    width = max((len(t.name) for t in tensors), default=0)
    shape_width = max((len(shape_of(t)) for t in tensors), default=0)

    def show(*columns: str) -> None:
        name, shape, type_name, *numbers = columns
        line = f"{name:<{width}}  {shape:>{shape_width}}  {type_name:<8}"
        line += "".join(f" {n:>{w}}" for n, w in zip(numbers, (7, 12, 13, *([9] if weighted else []), 13, 8)))
        print_text(line.rstrip(), WAY_OUT)

    return show


def shape_of(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.ne))


def columns_of(finding: Finding, weighted: bool) -> list[str]:
    """The numbers of a row."""
    columns = [f"{finding.bpw:.4g}", "" if finding.epsilon is None else f"{finding.epsilon:.6g}"]
    if (accuracy := finding.accuracy) is not None:
        of_inputs = [] if not weighted else ["" if accuracy.weighted is None else f"{accuracy.weighted:.6f}"]
        columns += [f"{accuracy.relative:.6f}", *of_inputs, f"{accuracy.max_abs:.6g}", "ok" if finding.fits else "EXCEEDED"]
    return columns


def summary_lines(file: GGUFFile, findings: list[Finding], importance: Importance, total: Accuracy | None) -> list[str]:
    """Below the table. total: None without an original."""
    tensors = [f.tensor for f in findings]
    n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
    of_ditto3 = [f for f in findings if f.tensor.type == T.DITTO3]
    of_file = "" if len(tensors) == len(file.tensors) else f" of {len(file.tensors)}"
    lines = ["", f"{len(tensors)}{of_file} tensors, {n:,} weights, {n_bytes / MIB:,.2f} MiB, {n_bytes * 8 / max(n, 1):.4g} bpw"]
    if of_ditto3:
        n_recorded = sum(f.epsilon is not None for f in findings)
        lines.append(f"epsilon is recorded for {n_recorded} of {len(of_ditto3)} ditto3 tensors")
    if total is not None:
        lines.append(f"relative squared error of all weights: {total.relative:.6f}")
        if total.weighted is not None:
            lines.append(f"weighted with {importance.describe()}: {total.weighted:.6f}")
        elif (recorded := file.value("quantize.imatrix.file")) and importance.matrix is None:
            lines.append(f"made with the importance matrix {recorded}: --imatrix FILE shows the errors weighed with it")
    return lines


def count_codes(file: GGUFFile, tensors: list[Tensor]) -> dict[str, Histogram]:
    """By type, in the order of the first tensor of each; of our types alone."""
    histograms: dict[str, Histogram] = {}
    for tensor in tensors:
        if (name := tensor.type.name.lower()) in WEIGHT_TYPES:
            histograms.setdefault(name, Histogram()).add(file, tensor)
    return histograms


def histogram_lines(histograms: dict[str, Histogram]) -> list[str]:
    lines = [line for name, histogram in histograms.items() for line in histogram.lines(name)]
    return lines or ["", "no histogram: no tensor has a type of ggml-ext"]


def draw_picture(args: argparse.Namespace, findings: list[Finding]) -> None:
    """UserError if there is nothing to draw or the file cannot be written."""
    drawn = {f.tensor.name: f.accuracy for f in findings if f.is_changed}
    if not drawn:
        raise UserError(f"--picture: no tensor has another type than in {args.against}: there are no errors to draw")
    weighted = all(a.weighted is not None for a in drawn.values())
    errors = {name: a.weighted if weighted else a.relative for name, a in drawn.items()}
    what = f"{'weighted ' if weighted else ''}relative squared error"
    if not picture.draw(errors, what, args.file.name, args.picture, args.force):
        print("note: --picture: the font has no characters for some names, and boxes in their place: name a .svg", file=sys.stderr)


def check_options(args: argparse.Namespace) -> None:
    """UserError for options that do not go together or that name what may not be written."""
    check_threads(args.threads)
    if args.picture is not None and args.against is None:
        raise UserError("--picture draws errors, which takes --against ORIGINAL")
    if args.picture is not None:
        picture.check_picture(args.picture, args.force, [p for p in (args.file, args.against, args.imatrix) if p is not None])


@one_blas_thread()
def run(args: argparse.Namespace) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    check_options(args)
    file = open_model(args.file)
    epsilons = read_epsilons(file)
    check_epsilons(file, epsilons)
    original = None if args.against is None else open_model(args.against)
    if original is not None:
        check_same_tensors(file, original)
    tensors = choose_tensors(file, args.tensor)
    importance = load_importance(args, file)
    weighted = importance.matrix is not None
    show = None if args.json else row_writer(tensors, weighted)
    if show:
        errors = ["rel. sq. err.", *(["weighted"] if weighted else []), "largest error", "check"] if original else []
        show("tensor", "shape", "type", "bpw", "epsilon", *errors)
    findings: list[Finding] = []
    for finding in find(file, original, tensors, epsilons, importance, check_threads(args.threads)):
        findings.append(finding)
        if show:
            show(finding.tensor.name, shape_of(finding.tensor), finding.tensor.type.name.lower(), *columns_of(finding, weighted))
    total = None if original is None else sum((f.accuracy for f in findings), Accuracy())
    histograms = count_codes(file, tensors) if args.histograms else None
    if args.json:
        print_text(to_json(record(args, findings, importance, total, histograms), 1), WAY_OUT)
    else:
        lines = summary_lines(file, findings, importance, total)
        print_text("\n".join(lines + ([] if histograms is None else histogram_lines(histograms))), WAY_OUT)
    if args.picture is not None:
        draw_picture(args, findings)
    if exceeded := [f for f in findings if not f.fits]:
        more = f" (and {len(exceeded) - 1} more)" if len(exceeded) > 1 else ""
        first = exceeded[0]
        raise UserError(
            f"tensor {first.tensor.name}: its largest error is {first.accuracy.max_abs:.9g}, the recorded epsilon "
            f"{first.epsilon:.9g}{more}: {file.path} was not made from {args.against}, or was changed; quantize it again"
        )


def record(
    args: argparse.Namespace,
    findings: list[Finding],
    importance: Importance,
    total: Accuracy | None,
    histograms: dict[str, Histogram] | None,
) -> dict:
    """For --json."""
    tensors = [f.tensor for f in findings]
    n, n_bytes = sum(t.n_elements for t in tensors), sum(t.n_bytes for t in tensors)
    totals = {"tensors": len(tensors), "weights": n, "bytes": n_bytes, "bits_per_weight": n_bytes * 8 / max(n, 1)}
    out = {"file": str(args.file), "tensors": [f.record() for f in findings], "total": totals}
    if total is not None:
        out |= {"against": str(args.against), "importance": importance.describe()}
        totals |= error_record(total)
    if histograms is not None:
        out["histograms"] = {name: histogram.record() for name, histogram in histograms.items()}
    return out


def main(argv: list[str] | None = None) -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()
    return run_command(
        lambda: run(build_parser().parse_args(argv, args)), lambda: "nothing was changed", WAY_OUT, args=args
    )


if __name__ == "__main__":
    sys.exit(main())
