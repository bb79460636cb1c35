"""The quantizer's command line: its flags, in the order in which --help shows them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .._allocation.target import DEFAULT_TYPES, SENSITIVITIES
from .._allocation.target import STOCK_TYPES as STOCK_TARGET_TYPES
from .._base.errors import UserError
from .._base.types import WEIGHT_TYPES
from .._calibration.calibration import COST, DEFAULT_CHUNKS, MEMORY_SHARE
from .._calibration.importance import KINDS
from .._calibration.proxy import SOURCE
from .._calibration.proxy import TYPES as PROXY_TYPES
from .._commands.settings import TRELLIS_TYPES, QuantizeOptions
from .._encode.codec import CODEBOOKS, EFFORTS, ENCODERS
from .._formats.context import N_CONTEXT
from .._plan.file_types import STOCK_ALIASES, STOCK_FILES
from .._plan.recipes import RECIPES
from .._report.tables import WARN_ABOVE
from .cli import Parser, add_common_options, add_device_options, add_terminal_options, add_threads_option
from .terminal import FORMATS

DEFAULTS = QuantizeOptions()


def build_parser(prog: str = "ggml-ext quantize") -> argparse.ArgumentParser:
    embd_and_output = "\n".join(
        f"  {t.name}: {t.bpw:g} bpw; token embeddings {t.token_embd}, output matrix {t.output}; {t.fallback} where rows are no "
        f"multiple of {t.block_size}"
        for t in WEIGHT_TYPES.values()
    )
    mixtures = "\n".join(f"  {r.name}: {r.about}" for r in RECIPES.values())
    parser = Parser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Quantizes an F32, F16, BF16 or Q8_0 GGUF model or a Hugging Face checkpoint to a low-bit type of ggml-ext, or to "
        "llama.cpp's own types.",
        epilog=f"types:\n{embd_and_output}\nmixed files:\n{mixtures}\n"
        "Stock files, such as q4_k_m, have the types that llama-quantize gives them, with importances or without.\n"
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
    add_type_options(add)
    add_source_options(add)
    add_importance_options(add)
    add_device_options(parser, "to calibrate on: ")
    add_encoder_options(add)
    add_threads_option(parser)
    add_output_options(add)
    add("--log-format", choices=FORMATS, default=FORMATS[0], help="json: one object a line on both streams; default text")
    add("-f", "--force", action="store_true", help="replace OUT if it exists")
    add_terminal_options(parser)
    add_common_options(parser)
    return parser


def add_type_options(add: Callable) -> None:
    """Types, and targets that choose them. add: add_argument of the parser, here and below."""
    add(
        "--type",
        metavar="TYPE",
        help=f"type of the weights: {', '.join([*WEIGHT_TYPES, *RECIPES])}; a stock type or mixed file by llama-quantize's name: "
        f"{', '.join([*STOCK_FILES, *STOCK_ALIASES])}; auto, or nothing, with a target",
    )
    add(
        "--target-size",
        metavar="SIZE",
        help="choose the type of each tensor by its measured error so that OUT has at most this size: 10.5GiB, 700MB, bytes",
    )
    add("--target-bpw", metavar="BPW", help="the same for bits a weight, of all tensors, as the loader prints them")
    add("--target-kld", metavar="KLD", help="the smallest file whose predicted KL divergence from the input is at most this")
    add(
        "--target-types",
        metavar="LIST",
        help=f"types to choose from, with commas, or all; default: {','.join(DEFAULT_TYPES)} and that of the input",
    )
    add(
        "--stock",
        action="store_true",
        help=f"with a target: a file that every llama.cpp loads; default of the types then: {','.join(STOCK_TARGET_TYPES)} and that of the input",
    )
    add(
        "--sensitivity",
        metavar=f"{{{','.join(SENSITIVITIES)}}}",
        default=DEFAULTS.sensitivity,
        help="what errors cost, for a target: measured by running the model on a part of the calibration text, or as in another "
        "model",
    )
    add("--pure", action="store_true", help="the type of most matrices of the layers for embeddings and output too")
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
        help="refuse a model with rows that the types do not fit; itq3_t64 in place of itq3_t and the like, "
        "the same codes in blocks of 64, are not refused",
    )
    add("--leave-output-tensor", action="store_true", help="leave output.weight as it is")
    add(
        "--allow-requantize",
        action="store_true",
        help="accept tensors that are already quantized below 8 bits; costs quality",
    )


def add_source_options(add: Callable) -> None:
    """Where the model comes from."""
    add("--hf-repo", metavar="ORG/NAME", help="in place of IN: a model of the Hugging Face hub, kept in its client's cache")
    add(
        "--hf-file",
        metavar="FILE",
        help="GGUF file of --hf-repo to take, of a split one the first part; default: in BF16 or F16, else the safetensors",
    )
    add("--revision", metavar="NAME", help="branch, tag or commit of --hf-repo; default: main")
    add("--hf-token", metavar="TOKEN", help="access token for --hf-repo; default: HF_TOKEN, or that of the client's login")
    add("--keep-gguf", metavar="FILE", type=Path, help="keep the GGUF file that a checkpoint is converted to, as FILE")


def add_importance_options(add: Callable) -> None:
    """What is known of the inputs of the weights."""
    add(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="importance matrix of llama-imatrix (GGUF), with second moments or without: what errors of weights cost",
    )
    for flag, what in (("--include-weights", "use importances for"), ("--exclude-weights", "do not use importances for")):
        add(
            flag,
            metavar="NAME",
            action="append",
            default=[],
            help=f"{what} tensors whose name holds NAME; may be repeated, as in llama-quantize",
        )
    add("--imatrix-from", metavar="TEXT", type=Path, help="calibrate with this text in place of the built-in one")
    add(
        "--importance",
        metavar=f"{{{','.join(KINDS)}}}",
        help="what is used of the inputs: nothing, mean squares, or second moments of blocks of 256 columns or of whole inputs; "
        "default: the most that --imatrix holds, else full where memory, text and time suffice, else block",
    )
    add("--no-calibration", action="store_true", help=f"do not run the model for an importance matrix; costs quality: {COST}")
    add(
        "--calibration-chunks",
        metavar="N",
        type=int,
        help=f"chunks of {N_CONTEXT} tokens to calibrate with, or of what the model was trained with if that is less; default {DEFAULT_CHUNKS}, or as many tokens in shorter ones",
    )
    add(
        "--memory",
        metavar="GIB",
        type=float,
        help=f"limit for calibration, model and moments; default {MEMORY_SHARE:.0%} of what is available".replace("%", "%%"),
    )
    add(
        "--calibrate-with",
        metavar="TYPE|FILE",
        help=f"calibrate with the model in fewer bits: {', '.join(PROXY_TYPES)}, made for that time, or a GGUF file of it; {SOURCE}: with the model "
        "itself; default: itself where it fits into --memory, else q8_0 or q4_k",
    )
    add(
        "--propagate",
        action=argparse.BooleanOptionalAction,
        help="quantize the layers in order, each matrix for the inputs that those before it leave, so that it makes up for their errors; "
        "--effort best does so by itself where it can",
    )


def add_encoder_options(add: Callable) -> None:
    """How weights become codes."""
    add("--itq3-levels", metavar="{8,3}", type=int, default=DEFAULTS.itq3_levels, help="itq3_s: 8 levels (default) or the paper's ternary")
    add(
        "--ditto-codebook",
        metavar=f"{{{','.join(CODEBOOKS)}}}",
        default=DEFAULTS.ditto_codebook,
        help="ditto3: a codebook for each block (default) or the paper's one for each tensor; llama-quantize makes the former",
    )
    add(
        "--effort",
        metavar=f"{{{','.join(EFFORTS)}}}",
        default=DEFAULTS.effort,
        help=f"{', '.join(TRELLIS_TYPES)}: scales tried for each block: fast (1), normal (2 or 3, with a diagonal up to 6), "
        "best (6, and errors are fed back more finely); best adds --propagate for all types; default normal",
    )


def add_output_options(add: Callable) -> None:
    """Which program encodes, and what is written."""
    add(
        "--encoder",
        choices=ENCODERS,
        default=DEFAULTS.encoder,
        help="auto (default): the built library if there is one, else numpy; the bytes are the same",
    )
    add("--dry-run", action="store_true", help="show types and sizes, write nothing")
    add(
        "--split-max-size",
        metavar="N(M|G)",
        help="write OUT-00001-of-0000N.gguf and so on, each with at most so many bytes of tensors (M: millions), as "
        "llama-gguf-split does",
    )
    add("--verify", action="store_true", help="before it becomes OUT, read what was written from the disk again, compare it and run one token")
    add("--report", metavar="FILE", type=Path, help="write types, sizes, errors and checksums of all tensors to this JSON file")
    add("--upload", metavar="ORG/NAME", help="upload OUT with its card to this repository of the Hugging Face hub; --hf-token must be allowed to write")
    add("--model-card", metavar="FILE", type=Path, help="write a card for the Hugging Face hub to this file, such as README.md")


def asked_format(argv: list[str] | None) -> str:
    """--log-format of a command line that may be bad in all else; the default where it is bad itself. argv: None: the process's."""
    parser = Parser(add_help=False)
    parser.add_argument("--log-format", action="append", default=[])
    try:
        found = parser.parse_known_args(argv)[0].log_format
    except UserError:
        found = []
    return next((f for f in reversed(found) if f in FORMATS), FORMATS[0])
