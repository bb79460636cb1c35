"""Options of quantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._allocation.target import MEASURED, SENSITIVITIES
from .._base.errors import UserError
from .._base.option import option
from .._base.threads import threads_option
from .._calibration.options import CalibrationOptions
from .._encode.options import EncoderOptions
from .._output.parts import PartNumber, parse_split_size
from .._report.tables import WARN_ABOVE
from .._source.source import SourceOptions


@dataclass(frozen=True, kw_only=True)
class TypeOptions:
    """Types of the tensors, and targets that choose them."""

    type: str | None = option(None, metavar="TYPE", help="type of the weights, one of those below; with a target: auto, or leave it out")
    target_size: str | None = option(
        None, metavar="SIZE", record=0, help="choose the type of each tensor by its error; OUT has at most this size: 10.5GiB, 700MB, bytes"
    )
    target_bpw: str | None = option(
        None, metavar="BPW", record=0, is_number=True, help="the same, with at most this many bits per weight over all tensors"
    )
    target_kld: str | None = option(
        None, metavar="KLD", record=0, is_number=True, help="choose the types of the smallest file whose predicted KL divergence from the input is at most KLD"
    )
    target_types: str | None = option(
        None, metavar="LIST", record=12, help="types that a target chooses from, in place of the default ones below: a list with commas, or all"
    )
    stock: bool = option(False, record=6, help="with a target: write a standard GGUF file, which every llama.cpp loads")
    sensitivity: str = option(
        MEASURED, choices=SENSITIVITIES, help="sensitivity of tensors, for a target: measured on this model, or usual values of another (default: measured)"
    )
    no_target_check: bool = option(
        False, help="do not compare the types of a target with the best fixed type of that size: one more encoding, two with --propagate"
    )
    pure: bool = option(False, record=5, help="use the base type of --type for embeddings and output matrix too")
    tensor_type: Sequence[str] = option(
        (), metavar="REGEX=TYPE", record=13,
        help="type of tensors whose name matches, such as attn_v=q8_0; may be repeated, the first match counts",
    )
    token_embedding_type: str | None = option(None, metavar="TYPE", record=10, help="type of the token embeddings")
    output_tensor_type: str | None = option(
        None, metavar="TYPE", record=11, help="type of the output matrix, or of the embeddings that serve as it"
    )
    fallback_above: float | None = option(
        None, metavar="X", record=4,
        help=f"store tensors with more than X times the usual NMSE of their type as iq4_nl or q5_0 (default: warn above {WARN_ABOVE})",
    )
    no_fallback: bool = option(
        False, help="fail if a tensor's rows fit neither the type nor its variants in blocks of 64 and 32, instead of choosing another type"
    )
    leave_output_tensor: bool = option(False, record=7, help="keep the type of output.weight")
    allow_requantize: bool = option(False, record=8, help="accept tensors that are already below 8 bits; this costs quality")

    def check(self) -> None:
        """Raise UserError for a threshold of --fallback-above that is out of range."""
        if self.fallback_above is not None and not 1 <= self.fallback_above < float("inf"):
            raise UserError(f"--fallback-above: got {self.fallback_above:g}, must be at least 1, such as {WARN_ABOVE}")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The output files."""

    path: Path | None = option(None, flag="output", is_positional=True, metavar="OUT", help="file to write; optional with --dry-run")
    is_dry: bool = option(False, flag="--dry-run", in_command=False, help="show types and sizes, write nothing")
    split_max_size: str | None = option(
        None, metavar="N(M|G)", help="split OUT into parts with at most so many bytes of tensors (M: millions), as llama-gguf-split does"
    )
    part: str | None = option(
        None, metavar="I/N", help="write only part I of the N parts of OUT; N runs, on any machines, write a split model"
    )
    verify: bool = option(False, in_command=False, help="read the output back, compare it and run one token before renaming it to OUT")
    evaluate: bool = option(
        False, in_command=False, help="measure perplexity and KL divergence of OUT against IN, and record them in OUT's metadata"
    )
    evaluation_chunks: int | None = option(
        None, metavar="N", minimum=2, in_command=False, help="with --evaluate: chunks of the built-in text to score (default: all)"
    )
    report: Path | None = option(
        None, metavar="FILE", in_command=False, help="write types, sizes, errors and checksums of all tensors to this JSON file"
    )
    upload: str | None = option(
        None, metavar="ORG/NAME", in_command=False, help="upload OUT and its model card to this repository of the Hugging Face hub"
    )
    model_card: Path | None = option(
        None, metavar="FILE", in_command=False, help="write a model card for the Hugging Face hub to this file, such as README.md"
    )
    force: bool = option(False, short="-f", in_command=False, help="replace OUT and the files of --report and --model-card if they exist")

    @property
    def is_split(self) -> bool:
        return self.split_max_size is not None or self.part is not None

    @property
    def part_number(self) -> PartNumber | None:
        return None if self.part is None else PartNumber.parse(self.part)

    @property
    def max_bytes(self) -> int | None:
        """The maximum size of a part; None for one file."""
        return None if self.split_max_size is None else parse_split_size(self.split_max_size)

    def check(self) -> None:
        """Raise UserError for options that do not go together."""
        complete = {"split-max-size": self.split_max_size, "evaluate": self.evaluate or None, "model-card": self.model_card, "upload": self.upload}
        for flag, value in complete.items():
            if self.part_number is not None and value is not None:
                raise UserError(f"--{flag}: --part writes one part, and this is for the complete model; drop one of them")
        if self.evaluation_chunks is not None and not self.evaluate:
            raise UserError("--evaluation-chunks: pass --evaluate too")
        for flag, is_given in (("verify", self.verify), ("evaluate", self.evaluate), ("report", self.report), ("model-card", self.model_card), ("upload", self.upload)):
            if self.is_dry and is_given:
                raise UserError(f"--{flag}: --dry-run writes nothing; drop one of them")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of `ggml-ext quantize`, except those of the terminal."""

    types: TypeOptions = field(default_factory=TypeOptions)
    source: SourceOptions = field(default_factory=SourceOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    threads: int | None = threads_option()
    output: OutputOptions = field(default_factory=OutputOptions)

    def resolve_files(self) -> QuantizeOptions:
        """Take the single file argument as OUT with --hf-repo. Raise UserError if there are two."""
        source, output = self.source, self.output
        if source.hf_repo is None:
            return self
        if output.path is not None:
            raise UserError(f"--hf-repo replaces IN, but got both {source.path} and {output.path}: pass OUT alone")
        return replace(self, source=replace(source, path=None), output=replace(output, path=source.path))
