"""Lists a GGUF file and checks it against its original: python -m ggml_ext.inspect FILE [--against ORIGINAL.gguf]"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from . import _lib
from ._accuracy import Accuracy, read_epsilons
from ._cli import Parser, add_threads_option, add_version_option, check_threads, print_text, run_command
from ._encode import Codec, Guide
from ._errors import UserError
from ._gguf_file import GGUFFile, Tensor
from ._imatrix import n_importances
from ._importance import KINDS, Importance, open_importance
from ._plan import ACTIVATION_TYPES, INTEGER_TYPES, replacement_type
from ._split import open_model
from ._writer import MIB, map_in_order, row_chunks

T = GGMLQuantizationType
NO_WEIGHTS = (T.F64, *INTEGER_TYPES, *ACTIVATION_TYPES)  # compared byte for byte
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
    add_threads_option(parser)
    add_version_option(parser)
    return parser


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


def compare(
    pool: ThreadPoolExecutor,
    n_ahead: int,
    codec: Codec,
    file: GGUFFile,
    tensor: Tensor,
    original: GGUFFile,
    other: Tensor,
    guide: Guide,
) -> Accuracy:
    """Differences of a tensor from its original, weighed with what the guide knows of its inputs; UserError where one of them is not finite or cannot be compared."""
    if tensor.type in NO_WEIGHTS or other.type in NO_WEIGHTS:
        if tensor.type != other.type:
            raise UserError(
                f"tensor {tensor.name} is {tensor.type.name.lower()} in {file.path} and {other.type.name.lower()} in "
                f"{original.path}, which cannot be compared: name the file it was made from"
            )

    def measure(chunk: tuple[int, int]) -> Accuracy:
        ours, theirs = file.rows(tensor, *chunk), original.rows(other, *chunk)
        if tensor.type in NO_WEIGHTS:
            if not np.array_equal(ours, theirs):
                raise UserError(f"tensor {tensor.name} differs from {original.path}: name the file it was made from")
            return Accuracy()
        expected, stored = codec.decode(theirs, other.type, other.ne[0]), codec.decode(ours, tensor.type, tensor.ne[0])
        accuracy = guide.measure(tensor, chunk[0], expected, stored)
        if not accuracy.is_finite:
            raise UserError(
                f"tensor {tensor.name}: rows {chunk[0]:,} to {sum(chunk) - 1:,} hold NaN or Inf in {file.path} or "
                f"{original.path}: the file is damaged; quantize the model again"
            )
        return accuracy

    total, done = Accuracy(), 0
    for chunk, accuracy in zip(row_chunks(tensor), map_in_order(pool, measure, row_chunks(tensor), n_ahead)):
        total += accuracy
        done += chunk[1]
        guide.written(tensor, done)
        file.release(tensor, done)
        original.release(other, done)
    return total


def run(args: argparse.Namespace) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    n_threads = check_threads(args.threads)
    file = open_model(args.file)
    epsilons = read_epsilons(file)
    check_epsilons(file, epsilons)
    original = None if args.against is None else open_model(args.against)
    others = {}
    if original is not None:
        check_same_tensors(file, original)
        others = {t.name: t for t in original.tensors}
    importance = load_importance(args, file)
    width = max((len(t.name) for t in file.tensors), default=0)
    shapes = {t.name: " x ".join(map(str, t.ne)) for t in file.tensors}
    shape_width = max((len(s) for s in shapes.values()), default=0)

    def weighted_column(text: str) -> list[str]:
        return [text] if importance.matrix else []

    def show(*columns: str) -> None:
        name, shape, type_name, *numbers = columns
        line = f"{name:<{width}}  {shape:>{shape_width}}  {type_name:<8}"
        line += "".join(f" {n:>{w}}" for n, w in zip(numbers, (7, 12, 13, *([9] if importance.matrix else []), 13, 8)))
        print_text(line.rstrip(), WAY_OUT)

    show("tensor", "shape", "type", "bpw", "epsilon", *(["rel. sq. err.", *weighted_column("weighted"), "largest error", "check"] if original else []))
    exceeded: list[str] = []
    total = Accuracy()
    pool = ThreadPoolExecutor(n_threads)
    try:
        codec = Codec(_lib.load())
        for tensor in file.tensors:
            epsilon = epsilons.get(tensor.name)
            columns = [f"{tensor.n_bytes * 8 / tensor.n_elements:.4g}", "" if epsilon is None else f"{epsilon:.6g}"]
            if original is not None:
                guide = importance.guide(tensor)
                accuracy = compare(pool, 2 * n_threads, codec, file, tensor, original, others[tensor.name], guide)
                importance.release(tensor)
                total += accuracy
                fits = epsilon is None or accuracy.max_abs <= epsilon
                if not fits:
                    exceeded.append(
                        f"tensor {tensor.name}: its largest error is {accuracy.max_abs:.9g}, the recorded epsilon {epsilon:.9g}"
                    )
                weighted = "" if accuracy.weighted is None else f"{accuracy.weighted:.6f}"
                columns += [f"{accuracy.relative:.6f}", *weighted_column(weighted), f"{accuracy.max_abs:.6g}", "ok" if fits else "EXCEEDED"]
            show(tensor.name, shapes[tensor.name], tensor.type.name.lower(), *columns)
    finally:
        pool.shutdown(cancel_futures=True)
    n, n_bytes = sum(t.n_elements for t in file.tensors), sum(t.n_bytes for t in file.tensors)
    n_ditto3 = sum(t.type == T.DITTO3 for t in file.tensors)
    lines = ["", f"{len(file.tensors)} tensors, {n:,} weights, {n_bytes / MIB:,.2f} MiB, {n_bytes * 8 / max(n, 1):.4g} bpw"]
    if n_ditto3:
        lines.append(f"epsilon is recorded for {len(epsilons)} of {n_ditto3} ditto3 tensors")
    if original is not None:
        lines.append(f"relative squared error of all weights: {total.relative:.6f}")
        if total.weighted is not None:
            lines.append(f"weighted with {importance.describe()}: {total.weighted:.6f}")
        elif (recorded := file.value("quantize.imatrix.file")) and importance.matrix is None:
            lines.append(f"made with the importance matrix {recorded}: --imatrix FILE shows the errors weighed with it")
    print_text("\n".join(lines), WAY_OUT)
    if exceeded:
        more = f" (and {len(exceeded) - 1} more)" if len(exceeded) > 1 else ""
        raise UserError(f"{exceeded[0]}{more}: {file.path} was not made from {args.against}, or was changed; quantize it again")


def main(argv: list[str] | None = None) -> int:
    """Entry point; see run_command() for the exit code."""
    return run_command(lambda: run(build_parser().parse_args(argv)), lambda: "nothing was changed", WAY_OUT)


if __name__ == "__main__":
    sys.exit(main())
