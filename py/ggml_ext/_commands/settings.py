"""The settings of a quantize run: its options, checked and parsed, by section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from .._allocation.target import KINDS, PLACEHOLDER, Target, parse_target
from .._base.errors import UserError
from .._base.option import command_line, describe_record
from .._base.threads import check_threads
from .._base.types import TYPES
from .._calibration.importance import Importance
from .._calibration.options import CalibrationOptions
from .._encode.options import EncoderOptions
from .._formats.names import unknown_type_message
from .._formats.tensor_types import FLOAT_TYPES, TARGET_TYPES, parse_type, type_info
from .._plan.file_types import FILE_TYPES, FileType
from .._plan.plan import Choices, Override, QuantizationPlan
from .._source.checkpoint import AS_STORED
from .._source.source import SourceOptions
from .options import OutputOptions, QuantizeOptions, TypeOptions

# Options that exclude sequential quantization as a side effect, which a note reports. Options of the calibration need no note.
NOTED_FLAGS = ("--include-weights", "--exclude-weights", "--fallback-above")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked options of a run, by section.

    Attributes:
        choices: the types that options name.
        target: the limit that allocation observes; None without one.
        command: the command line, for a model card.
        excludes_propagate: the option because of which --propagate is not the default, where that deserves a note.
    """

    types: TypeOptions
    source: SourceOptions
    choices: Choices
    target: Target | None
    calibration: CalibrationOptions
    encoder: EncoderOptions
    output: OutputOptions
    n_threads: int
    command: str
    excludes_propagate: str = ""
    cache_path: Path | None = None  # of the directory for caches, if not that of OUT
    n_compared_metrics: int = 0  # of the target that this fixed type is compared with, so that both get the same Hessians

    @classmethod
    def parse(cls, options: QuantizeOptions) -> Settings:
        """Check and parse options. Raise UserError naming the flag for an invalid value or combination."""
        types = options.types
        target = choose_target(types)
        options = options.resolve_files()
        file_type = parse_file_type(types.type, target)
        outtype = file_type.name if file_type.type in FLOAT_TYPES else AS_STORED
        source = replace(options.source, outtype=outtype, allow_requantize=types.allow_requantize)
        source.check(is_uploading=options.output.upload is not None)
        if types.fallback_above is not None and options.calibration.propagate:
            raise UserError("--propagate and --fallback-above: pass one of them")
        types.check()
        check_part(options)
        n_threads = check_threads(options.threads)
        is_default = options.calibration.propagate is None and options.encoder.effort != "fast"
        excludes = options.calibration.excludes_propagate or ("--fallback-above" if types.fallback_above is not None else "")
        calibration = replace(options.calibration, propagates_by_default=is_default and not excludes and options.output.part is None)
        calibration.check()
        options.output.check()
        return cls(
            types=types, source=source, choices=parse_choices(types, file_type, target), target=target, calibration=calibration,
            encoder=options.encoder, output=options.output, n_threads=n_threads,
            command=command_line(["ggml-ext", "quantize"], options), excludes_propagate=excludes if is_default and excludes in NOTED_FLAGS else "",
        )

    def without_propagation(self) -> Settings:
        return replace(self, calibration=replace(self.calibration, propagate=False, propagates_by_default=False))

    def describe_options(self, types: Iterable[GGMLQuantizationType], propagates: bool) -> str:
        """Describe the options that determine the output's bytes, for its metadata.

        Args:
            types: the types in the output; encoder options of other types are omitted.
            propagates: --propagate is in effect, by the option or by default.
        """
        calibration = replace(self.calibration, propagate=propagates)
        options = QuantizeOptions(types=self.types, calibration=calibration, encoder=self.encoder)
        return describe_record(options, {qtype.name.lower() for qtype in types})

    def uses_column_scales(self, plan: QuantizationPlan, importance: Importance) -> bool:
        """Whether the run chooses column scales: by the option, else for ggml-ext's types with Hessians.

        With the diagonal alone they can lose (docs/results/column-scales.md). With files of llama.cpp's types, an unmodified llama.cpp would
        apply LoRA adapters wrongly in silence.
        """
        if self.calibration.column_scales is not None:
            return self.calibration.column_scales
        if self.target is not None:
            types = [] if self.target.upstream_only else self.target.types
        else:
            types = [] if self.choices.file_type.is_upstream else [t.type for t in plan.changed]
        return importance.kind in ("block", "full") and self.calibration.runs_model and any(map(type_info, types))


def check_part(options: QuantizeOptions) -> None:
    """Raise UserError if --part would depend on what one machine calibrates."""
    calibration = options.calibration
    if options.output.part is None:
        return
    if calibration.propagate:
        raise UserError("--part and --propagate: pass one of them; sequential quantization takes the layers in order, on one machine")
    if calibration.imatrix is None and calibration.runs_model and calibration.kind != "none":
        raise UserError(
            "--part: all parts need the same calibration: make its file once with llama-imatrix --moments full and pass it with --imatrix, or pass "
            "--no-calibration"
        )


def choose_target(types: TypeOptions) -> Target | None:
    """Parse the options of a target; return None without one."""
    limits = {kind: getattr(types, f"target_{kind}") for kind in KINDS}
    conflicts = [flag for flag, value in (("--pure", types.pure), ("--fallback-above", types.fallback_above)) if value]
    return parse_target(types.type, limits, types.target_types, conflicts, types.stock)


def parse_file_type(type_name: str | None, target: Target | None) -> FileType:
    """Parse --type; return a placeholder with a target. Raise UserError for an unknown type."""
    name = PLACEHOLDER if target or type_name is None else type_name.lower()
    if name not in FILE_TYPES:
        remark = " (a type of single tensors, which --tensor-type takes)" if name in TARGET_TYPES else ""
        raise UserError(unknown_type_message("--type", str(type_name), FILE_TYPES, remark))
    return FILE_TYPES[name]


def parse_choices(types: TypeOptions, file_type: FileType, target: Target | None) -> Choices:
    """Parse the options that name types. Raise UserError naming the flag."""

    def parse(name: str | None, flag: str) -> GGMLQuantizationType | None:
        return None if name is None else parse_type(name, flag)

    if types.leave_output_tensor and types.output_tensor_type is not None:
        raise UserError("--leave-output-tensor and --output-tensor-type: pass one of them; the former keeps the type of output.weight")
    choices = Choices(
        file_type,
        pure=types.pure or target is not None,
        overrides=tuple(map(Override.parse, types.tensor_type)),
        token_embd=parse(types.token_embedding_type, "--token-embedding-type"),
        output=parse(types.output_tensor_type, "--output-tensor-type"),
        leave_output=types.leave_output_tensor,
        allow_requantize=types.allow_requantize,
        no_fallback=types.no_fallback,
        fallback_above=types.fallback_above,
        target_option=None if target is None else target.option,
    )
    if file_type.is_upstream or types.stock:
        check_upstream_only(choices, "--stock" if types.stock else f"--type {file_type.name}")
    return choices


def check_upstream_only(choices: Choices, flag: str) -> None:
    """Raise UserError for options that a standard GGUF file rules out. flag: the option that requests such a file."""
    if choices.fallback_above is not None:
        raise UserError(f"--fallback-above: {choices.file_type.name} is a standard type, whose usual NMSE is unknown: drop the option")
    named = [(f"--tensor-type {o.pattern.pattern}=", o.type) for o in choices.overrides]
    optional = [("--token-embedding-type ", choices.token_embd), ("--output-tensor-type ", choices.output)]
    for beginning, qtype in named + [(text, qtype) for text, qtype in optional if qtype is not None]:
        if (name := qtype.name.lower()) in TYPES:
            raise UserError(
                f"{beginning}{name}: {flag} writes a standard GGUF file, and {name} is a ggml-ext type: pass a standard type "
                f"here, or {'drop the option' if choices.target_option else f'--type {name} and standard types for other tensors'}"
            )
