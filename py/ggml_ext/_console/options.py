"""The quantizer's command line: its flags, what they say of types, and which of them decide the bytes of the output."""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import WEIGHT_TYPES
from .._budget import target as _target
from .._budget.target import STAND_IN, Target
from .._encode.codec import EFFORTS
from .._formats.names import unknown_type
from .._importance import calibration
from .._plan.plan import TARGET_TYPES, Choices, Override, Plan, parse_type
from .._plan.recipes import RECIPES
from .._source import source
from .cli import Parser, add_common_options, add_threads_option, check_threads
from .log import FORMATS
from .report import WARN_ABOVE

T = GGMLQuantizationType
CODEBOOKS = ("block", "tensor")
TRELLIS_TYPES = [name for name, info in WEIGHT_TYPES.items() if info.trellis_mix]


def build_parser() -> argparse.ArgumentParser:
    embd_and_output = "\n".join(
        f"  {t.name}: {t.bpw:g} bpw; token embeddings {t.token_embd}, output matrix {t.output}; {t.fallback} where rows are no "
        f"multiple of {t.block_size}"
        for t in WEIGHT_TYPES.values()
    )
    mixtures = "\n".join(f"  {r.name}: {r.about}" for r in RECIPES.values())
    parser = Parser(
        prog="ggml-ext-quantize",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Quantizes an F32, F16, BF16 or Q8_0 GGUF model or a Hugging Face checkpoint to a low-bit type of ggml-ext.",
        epilog=f"types:\n{embd_and_output}\nmixed files:\n{mixtures}\n"
        "A model without output.weight computes its output with the token embeddings: they get the output's type.\n"
        "Vectors, norms, expert routing and other small tensors keep their type, as with llama-quantize.",
    )
    add = parser.add_argument
    add(
        "input",
        metavar="IN",
        type=Path,
        nargs="?",
        help="GGUF model in F32, F16, BF16 or Q8_0, of a split one any part; or the folder of a Hugging Face checkpoint",
    )
    add("output", metavar="OUT", type=Path, nargs="?", help="file to write; not needed with --dry-run")
    add(
        "--type",
        metavar="TYPE",
        help=f"type of the weights: {', '.join([*WEIGHT_TYPES, *RECIPES])}; auto, or nothing, with a target",
    )
    _target.add_options(add)
    add("--pure", action="store_true", help="the type of most matrices of the blocks for embeddings and output too")
    add(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="type for tensors whose name matches; may be repeated, the first match counts; stock types too, such as attn_v=q8_0",
    )
    add("--token-embedding-type", metavar="TYPE", help="type of the token embeddings")
    add(
        "--output-tensor-type", metavar="TYPE", help="type of the output matrix (or of the embeddings that serve as it)"
    )
    add(
        "--fallback-above",
        metavar="X",
        type=float,
        help="store tensors whose relative squared error is more than X times what is usual for their type in a stock type, "
        f"iq4_nl (ditto5: q5_0); without it errors above {WARN_ABOVE} times the usual are a warning",
    )
    add(
        "--no-fallback",
        action="store_true",
        help="refuse a model with rows that the types do not fit; itq3_t64 in place of itq3_t and itq2_t64 in place of itq2_t, "
        "the same codes in blocks of 64, are not refused",
    )
    add("--leave-output-tensor", action="store_true", help="leave output.weight as it is")
    add(
        "--allow-requantize",
        action="store_true",
        help="accept tensors that are already quantized below 8 bits; costs quality",
    )
    source.add_options(add)
    calibration.add_options(add)
    add("--itq3-levels", metavar="{8,3}", type=int, default=8, help="itq3_s: 8 levels (default) or the paper's ternary")
    add(
        "--ditto-codebook",
        metavar="{block,tensor}",
        default="block",
        help="ditto3: a codebook for each block (default) or the paper's one for each tensor; llama-quantize makes the former",
    )
    add(
        "--effort",
        metavar=f"{{{','.join(EFFORTS)}}}",
        default="normal",
        help=f"{', '.join(TRELLIS_TYPES)}: scales tried for each block: fast (1), normal (2 or 3, with a diagonal up to 6), "
        "best (6, and errors are fed back more finely); default normal",
    )
    add_threads_option(parser)
    add(
        "--encoder",
        choices=("auto", "c", "numpy"),
        default="auto",
        help="auto (default): the built library if there is one, else numpy; the bytes are the same",
    )
    add("--dry-run", action="store_true", help="show types and sizes, write nothing")
    add(
        "--split-max-size",
        metavar="N(M|G)",
        help="write OUT-00001-of-0000N.gguf and so on, each with at most so many bytes of tensors (M: millions), as "
        "llama-gguf-split does",
    )
    add("--verify", action="store_true", help="read what was written from the disk again and compare it before it becomes OUT")
    add("--report", metavar="FILE", type=Path, help="write types, sizes, errors and checksums of all tensors to this JSON file")
    add("--model-card", metavar="FILE", type=Path, help="write a card for the Hugging Face hub to this file, such as README.md")
    add("--log-format", choices=FORMATS, default="text", help="json: one object a line on both streams; default text")
    add("-f", "--force", action="store_true", help="replace OUT if it exists")
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    add("--summary", action="store_true", help="print no line for each tensor, only warnings and the summary")
    add("-q", "--quiet", action="store_true", help="print errors and warnings only, and nothing about fallbacks")
    add_common_options(parser)
    return parser


def asked_format(argv: list[str] | None) -> str:
    """--log-format of a command line that may be bad in all else; the default where it is bad itself. argv: None: the process's."""
    parser = Parser(add_help=False)
    parser.add_argument("--log-format", action="append", default=[])
    try:
        found = parser.parse_known_args(argv)[0].log_format
    except UserError:
        found = []
    return next((f for f in reversed(found) if f in FORMATS), FORMATS[0])


def parse_choices(args: argparse.Namespace, target: Target | None) -> Choices:
    """The type-related options; UserError naming the flag."""
    name = STAND_IN if target else args.type.lower()
    recipe = RECIPES.get(name)
    info = WEIGHT_TYPES.get(recipe.base if recipe else name)
    if info is None:
        remark = " (for stock types use llama-quantize)" if name in TARGET_TYPES else ""
        raise UserError(unknown_type("--type", args.type, [*WEIGHT_TYPES, *RECIPES], remark))
    if args.itq3_levels not in (3, 8):
        raise UserError(f"--itq3-levels: got {args.itq3_levels}, must be 8 or 3")
    if args.ditto_codebook not in CODEBOOKS:
        raise UserError(f"--ditto-codebook: got {args.ditto_codebook!r}, must be {' or '.join(CODEBOOKS)}")
    if args.effort not in EFFORTS:
        raise UserError(f"--effort: got {args.effort!r}, must be {', '.join(EFFORTS)}")
    if args.fallback_above is not None and not 1 <= args.fallback_above < float("inf"):
        raise UserError(f"--fallback-above: got {args.fallback_above:g}, must be at least 1, such as {WARN_ABOVE}")
    check_threads(args.threads)
    calibration.check_options(args)
    for flag in ("verify", "report", "model-card"):
        if args.dry_run and getattr(args, flag.replace("-", "_")):
            raise UserError(f"--{flag}: --dry-run writes nothing; leave one of them out")

    def optional(name: str | None, flag: str) -> GGMLQuantizationType | None:
        return None if name is None else parse_type(name, flag)

    return Choices(
        info=info,
        recipe=recipe,
        pure=args.pure or target is not None,
        overrides=tuple(map(Override.parse, args.tensor_type)),
        token_embd=optional(args.token_embedding_type, "--token-embedding-type"),
        output=optional(args.output_tensor_type, "--output-tensor-type"),
        leave_output=args.leave_output_tensor,
        allow_requantize=args.allow_requantize,
        target=target and target.option,
    )


def describe_options(args: argparse.Namespace, choices: Choices, plan: Plan) -> str:
    """The options that decide the bytes of the output, for the file's record."""
    of_types = {T.ITQ3_S: f"itq3-levels={args.itq3_levels}", T.DITTO3: f"ditto-codebook={args.ditto_codebook}"}
    of_types |= {T[name.upper()]: f"effort={args.effort}" for name in TRELLIS_TYPES}
    options = [] if choices.target is None else [choices.target]
    options += list(dict.fromkeys(text for qtype, text in of_types.items() if qtype in plan.types))
    if args.fallback_above is not None:
        options.append(f"fallback-above={args.fallback_above:g}")
    options += [
        flag for flag in ("pure", "leave-output-tensor", "allow-requantize") if getattr(args, flag.replace("-", "_"))
    ]
    for flag in ("token-embedding-type", "output-tensor-type", "target-types"):
        if value := getattr(args, flag.replace("-", "_")):
            options.append(f"{flag}={value}")
    return " ".join([*options, *(f"tensor-type={text}" for text in args.tensor_type)])
