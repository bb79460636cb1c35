"""What quantize is asked: options as they are given, and settings as they are understood, a section for each room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from .._allocation.target import KINDS, PLACEHOLDER, SENSITIVITIES, Target, parse_target
from .._base.errors import UserError
from .._base.threads import check_threads
from .._base.types import TYPES, WEIGHT_TYPES
from .._calibration.calibration import Wanted
from .._encode.codec import CODEBOOKS, Encoder
from .._formats.names import unknown_type_message
from .._native.programs import device_options
from .._output.parts import parse_split_size
from .._plan.file_types import FILE_TYPES, FLOAT_TYPES, FileType
from .._plan.plan import TARGET_TYPES, Choices, Override, Plan, parse_type
from .._report.tables import WARN_ABOVE
from .._source.checkpoint import AS_STORED
from .._source.source import Source

T = GGMLQuantizationType
TRELLIS_TYPES = [name for name, info in WEIGHT_TYPES.items() if info.trellis_values]


@dataclass(frozen=True)
class QuantizeOptions:
    """The flags of ggml-ext quantize that are no matter of its terminal, by name; docs/reference/options.md says what each does.

    input: a GGUF file or the folder of a checkpoint; with hf_repo it may be OUT, as on the command line.
    """

    input: Path | None = None
    output: Path | None = None
    type: str | None = None
    target_size: str | None = None
    target_bpw: str | None = None
    target_kld: str | None = None
    target_types: str | None = None
    stock: bool = False
    sensitivity: str = SENSITIVITIES[0]
    pure: bool = False
    tensor_type: Sequence[str] = ()
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None
    fallback_above: float | None = None
    no_fallback: bool = False
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    hf_repo: str | None = None
    hf_file: str | None = None
    revision: str | None = None
    hf_token: str | None = None
    keep_gguf: Path | None = None
    imatrix: Path | None = None
    imatrix_from: Path | None = None
    include_weights: Sequence[str] = ()
    exclude_weights: Sequence[str] = ()
    importance: str | None = None
    no_calibration: bool = False
    calibration_chunks: int | None = None
    memory: float | None = None
    calibrate_with: str | None = None
    n_gpu_layers: str | None = None
    device: str | None = None
    rpc: str | None = None
    propagate: bool | None = None
    itq3_levels: int = 8
    ditto_codebook: str = CODEBOOKS[0]
    effort: str = "normal"
    threads: int | None = None
    encoder: str = "auto"
    dry_run: bool = False
    split_max_size: str | None = None
    verify: bool = False
    report: Path | None = None
    model_card: Path | None = None
    upload: str | None = None
    force: bool = False

    def with_files_in_place(self) -> QuantizeOptions:
        """With --hf-repo the one file named is OUT. UserError if there are two."""
        if self.hf_repo is None:
            return self
        if self.output is not None:
            raise UserError(f"--hf-repo takes the place of IN, and both {self.input} and {self.output} are given: pass OUT alone")
        return replace(self, input=None, output=self.input)


@dataclass(frozen=True)
class OutputWanted:
    """What is written. path: OUT, None for a dry run that names none; max_bytes: of a part of a split model, None for one file."""

    path: Path | None
    force: bool = False
    is_dry: bool = False
    max_bytes: int | None = None
    verify: bool = False
    report: Path | None = None
    model_card: Path | None = None
    upload: str | None = None

    @property
    def is_split(self) -> bool:
        return self.max_bytes is not None

    def check(self) -> None:
        """UserError naming the flag."""
        for flag, is_given in (("verify", self.verify), ("report", self.report), ("model-card", self.model_card), ("upload", self.upload)):
            if self.is_dry and is_given:
                raise UserError(f"--{flag}: --dry-run writes nothing; leave one of them out")


@dataclass(frozen=True)
class Settings:
    """All that a run of quantize is told; each function gets the section that it needs."""

    asked: QuantizeOptions
    source: Source
    choices: Choices
    target: Target | None
    sensitivity: str
    importance: Wanted
    encoder: Encoder
    output: OutputWanted
    n_threads: int

    @classmethod
    def parse(cls, asked: QuantizeOptions) -> Settings:
        """UserError naming the flag that is wrong, or those that do not go together."""
        if asked.sensitivity not in SENSITIVITIES:
            raise UserError(f"--sensitivity: got {asked.sensitivity!r}, must be {' or '.join(SENSITIVITIES)}")
        limits = {kind: getattr(asked, f"target_{kind}") for kind in KINDS}
        others = [flag for flag, given in (("--pure", asked.pure), ("--fallback-above", asked.fallback_above)) if given]
        target = parse_target(asked.type, limits, asked.target_types, others, asked.stock)
        asked = asked.with_files_in_place()
        file_type = parse_file_type(asked, target)
        source = Source(
            asked.input, asked.hf_repo, asked.hf_file, asked.revision, None if asked.upload and not asked.hf_repo else asked.hf_token, asked.keep_gguf,
            file_type.name if file_type.type in FLOAT_TYPES else AS_STORED, asked.allow_requantize,
        )
        source.check()
        encoder = Encoder(asked.encoder, asked.itq3_levels, asked.ditto_codebook, asked.effort)
        encoder.check()
        if asked.fallback_above is not None and asked.propagate:
            raise UserError("--propagate and --fallback-above: pass one of them")
        if asked.fallback_above is not None and not 1 <= asked.fallback_above < float("inf"):
            raise UserError(f"--fallback-above: got {asked.fallback_above:g}, must be at least 1, such as {WARN_ABOVE}")
        n_threads = check_threads(asked.threads)
        importance = Wanted(
            asked.imatrix, asked.imatrix_from, asked.importance, not asked.no_calibration, asked.calibration_chunks, asked.memory,
            asked.calibrate_with, device_options(asked.n_gpu_layers, asked.device, asked.rpc), asked.propagate or propagates_by_itself(asked), asked.propagate is None,
            tuple(asked.include_weights), tuple(asked.exclude_weights),
        )
        importance.check()
        output = OutputWanted(
            asked.output, asked.force, asked.dry_run, None, asked.verify, asked.report, asked.model_card, asked.upload
        )
        output.check()
        choices = parse_choices(asked, target)
        if asked.split_max_size is not None:
            output = replace(output, max_bytes=parse_split_size(asked.split_max_size))
        return cls(asked, source, choices, target, asked.sensitivity, importance, encoder, output, n_threads)


def propagates_by_itself(asked: QuantizeOptions) -> bool:
    """Whether --effort best adds --propagate: nothing that is asked for contradicts it."""
    calibrates = asked.imatrix is None and not asked.no_calibration and asked.importance not in ("none", "diagonal")
    calibrates = calibrates and not (asked.include_weights or asked.exclude_weights)
    return asked.propagate is None and asked.effort == "best" and calibrates and asked.fallback_above is None


def parse_file_type(asked: QuantizeOptions, target: Target | None) -> FileType:
    """Of --type; UserError if there is no such type."""
    name = PLACEHOLDER if target else asked.type.lower()
    if name not in FILE_TYPES:
        remark = " (a type of single tensors, which --tensor-type takes)" if name in TARGET_TYPES else ""
        raise UserError(unknown_type_message("--type", asked.type, FILE_TYPES, remark))
    return FILE_TYPES[name]


def check_stock(choices: Choices, asked: str) -> None:
    """UserError naming the flag for what has no place in a stock file. asked: the option that asks for one."""
    if choices.fallback_above is not None:
        raise UserError(f"--fallback-above: {choices.file_type.name} is a stock type, of which no usual error is known: leave the option out")
    named = [(f"--tensor-type {o.pattern.pattern}=", o.type) for o in choices.overrides]
    named += [("--token-embedding-type ", choices.token_embd), ("--output-tensor-type ", choices.output)]
    for flag, qtype in named:
        if qtype is not None and qtype.name.lower() in TYPES:
            ours = qtype.name.lower()
            raise UserError(
                f"{flag}{ours}: {asked} makes a file that every llama.cpp loads, and {ours} is a type of ggml-ext: pass a stock type "
                f"there, or {'leave it out' if choices.target else f'--type {ours} and stock types for other tensors'}"
            )


def parse_choices(asked: QuantizeOptions, target: Target | None) -> Choices:
    """The options about types; UserError naming the flag."""

    def optional(name: str | None, flag: str) -> GGMLQuantizationType | None:
        return None if name is None else parse_type(name, flag)

    if asked.leave_output_tensor and asked.output_tensor_type is not None:
        raise UserError("--leave-output-tensor and --output-tensor-type: pass one of them; the former keeps output.weight as it is")
    choices = Choices(
        parse_file_type(asked, target),
        pure=asked.pure or target is not None,
        overrides=tuple(map(Override.parse, asked.tensor_type)),
        token_embd=optional(asked.token_embedding_type, "--token-embedding-type"),
        output=optional(asked.output_tensor_type, "--output-tensor-type"),
        leave_output=asked.leave_output_tensor,
        allow_requantize=asked.allow_requantize,
        no_fallback=asked.no_fallback,
        fallback_above=asked.fallback_above,
        target=target and target.option,
    )
    if choices.file_type.is_stock or asked.stock:
        check_stock(choices, "--stock" if asked.stock else f"--type {choices.file_type.name}")
    return choices


def describe_options(asked: QuantizeOptions, choices: Choices, plan: Plan, propagates: bool) -> str:
    """The options that decide the bytes of the output, for the file's record."""
    of_types = {T.ITQ3_S: f"itq3-levels={asked.itq3_levels}", T.DITTO3: f"ditto-codebook={asked.ditto_codebook}"}
    of_types |= {T[name.upper()]: f"effort={asked.effort}" for name in TRELLIS_TYPES}
    options = [] if choices.target is None else [choices.target]
    options += list(dict.fromkeys(text for qtype, text in of_types.items() if qtype in plan.types))
    if asked.fallback_above is not None:
        options.append(f"fallback-above={asked.fallback_above:g}")
    flags = ("pure", "stock", "leave-output-tensor", "allow-requantize")
    options += [flag for flag in flags if getattr(asked, flag.replace("-", "_"))] + ["propagate"] * propagates
    for flag in ("token-embedding-type", "output-tensor-type", "target-types"):
        if value := getattr(asked, flag.replace("-", "_")):
            options.append(f"{flag}={value}")
    for flag in ("tensor-type", "include-weights", "exclude-weights"):
        options += [f"{flag}={text}" for text in getattr(asked, flag.replace("-", "_"))]
    return " ".join(options)
