"""Options of the calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._base.errors import UserError
from .._base.option import option
from .._formats.context import N_CONTEXT
from .._formats.imatrix import ImportanceMatrix
from .._formats.names import list_tensors
from .._native.devices import DeviceOptions
from . import proxy
from .importance import KINDS, Importance

DEFAULT_CHUNKS = 100  # of N_CONTEXT tokens; more if the model's context is shorter
MEMORY_SHARE = 0.7  # of the available memory
COST = "SmolLM2-135M-Instruct in 3 bits has perplexity 33.8 without and 20.2 with it"


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The calibration statistics to use, and how to collect them."""

    imatrix: Path | None = option(None, metavar="FILE", help="imatrix file of llama-imatrix (GGUF), with or without Hessians")
    included: Sequence[str] = option(
        (), flag="--include-weights", metavar="NAME", record=14,
        help="use calibration only for tensors whose name contains NAME; may be repeated",
    )
    excluded: Sequence[str] = option(
        (), flag="--exclude-weights", metavar="NAME", record=15,
        help="use no calibration for tensors whose name contains NAME; may be repeated",
    )
    text: Path | None = option(None, flag="--imatrix-from", metavar="TEXT", help="text to calibrate with (default: the built-in text)")
    kind: str | None = option(
        None, flag="--importance", choices=KINDS,
        help="calibration statistics to use: none, diagonal (imatrix), block-diagonal or full Hessian (default: the best that fits)",
    )
    no_calibration: bool = option(False, help="do not run the model to calibrate; this costs quality")
    n_chunks: int | None = option(
        None, flag="--calibration-chunks", metavar="N", minimum=2, help=f"chunks of {N_CONTEXT} tokens to calibrate with (default: {DEFAULT_CHUNKS})"
    )
    memory: float | None = option(
        None, metavar="GIB", in_command=False, help=f"memory limit for model and Hessians (default: {MEMORY_SHARE:.0%} of what is available)"
    )
    proxy_model: str | None = option(
        None, flag="--calibrate-with", metavar="TYPE|FILE",
        help=f"proxy model: {', '.join(proxy.TYPES)}, a GGUF file, or {proxy.SOURCE}: the model itself (default: what fits in --memory)",
    )
    propagate: bool | None = option(
        None, record=9, help="let each layer correct the errors of those before it (default: up to 5 bits per weight, except with --effort fast)"
    )
    column_scales: bool | None = option(
        None, help="scale columns, and fold the inverse into the tensors before them (default: for ggml-ext's types with Hessians)"
    )
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    propagates_by_default: bool = False  # --propagate is the default with the other options

    @property
    def runs_model(self) -> bool:
        return not self.no_calibration

    @property
    def propagates(self) -> bool:
        return bool(self.propagate) or self.propagates_by_default

    @property
    def may_do_without(self) -> bool:
        """Whether --propagate, if it is the default, is skipped where the model does not support it."""
        return self.propagate is None

    def check(self) -> None:
        """Raise UserError for options that exclude each other."""
        if self.memory is not None and not 0 < self.memory < float("inf"):
            raise UserError(f"--memory: got {self.memory:g}, must be a number of GiB above 0")
        for flag, is_given in (("--imatrix", self.imatrix is not None), ("--no-calibration", self.no_calibration)):
            if is_given and self.text is not None:
                raise UserError(f"{flag} and --imatrix-from: pass one of them")
        if self.proxy_model is not None:
            proxy.check_name(self.proxy_model)
            if self.imatrix is not None or self.no_calibration:
                raise UserError(f"{proxy.FLAG}: does not go with {'--imatrix' if self.imatrix else '--no-calibration'}: leave one of them out")
        if self.included and self.excluded:
            raise UserError("--include-weights and --exclude-weights: pass one of them")
        if self.selects and (self.kind == "none" or (self.no_calibration and self.imatrix is None)):
            unused = "--importance none" if self.kind == "none" else "--no-calibration"
            raise UserError(f"{self.selects}: does not go with {unused}: leave one of them out")
        if self.propagates and (messages := self._conflicts_with_propagate()):
            raise UserError(next(iter(messages.values())))
        if self.kind == "none" and (file := self.imatrix or self.text):
            raise UserError(f"--importance none: {file} would not be used; leave one of them out")

    def _conflicts_with_propagate(self) -> dict[str, str]:
        """Return the given options that exclude --propagate, with the message for each."""
        messages = {}
        if self.selects:
            messages[self.selects] = f"--propagate and {self.selects}: pass one of them; the former uses the inputs of all matrices"
        if self.imatrix is not None:
            messages["--imatrix"] = (
                f"--propagate: collects the inputs from quantized layers, {self.imatrix} has those of the original model: "
                "pass its text with --imatrix-from instead of --imatrix"
            )
        if self.no_calibration:
            messages["--no-calibration"] = "--propagate and --no-calibration: pass one of them; the former runs the model"
        if self.kind in ("none", "diagonal"):
            messages[f"--importance {self.kind}"] = f"--propagate: needs Hessians: pass --importance block or full, not {self.kind}"
        return messages

    @property
    def excludes_propagate(self) -> str:
        """The option that excludes --propagate, or an empty string."""
        return next(iter(self._conflicts_with_propagate()), "")

    @property
    def ignored_by_propagate(self) -> list[str]:
        """The given flags that have no effect on sequential quantization, which runs the model itself, without them."""
        devices = self.devices.arguments()[::2]
        return [*devices, *([proxy.FLAG] if self.proxy_model not in (None, proxy.SOURCE) else [])]

    @property
    def selects(self) -> str:
        """The flag that selects tensors by name, or an empty string."""
        return "--include-weights" if self.included else "--exclude-weights" if self.excluded else ""

    def imatrix_names(self) -> frozenset[str]:
        """Return the names of the tensors in --imatrix."""
        return frozenset() if self.imatrix is None else frozenset(ImportanceMatrix(self.imatrix).names())

    def select(self, importance: Importance) -> None:
        """Select imatrix entries by name, as llama-quantize does. Raise UserError if a name matches none, or none remains."""
        matrix = importance.matrix
        if matrix is None or not self.selects:
            return
        names, parts = matrix.names(), [*self.included, *self.excluded]
        for part in parts:
            if not any(part in name for name in names):
                raise UserError(f"{self.selects} {part}: {matrix.path} has no entry of such a tensor, but of {list_tensors(names)}")
        matrix.exclude(name for name in names if any(part in name for part in parts) != bool(self.included))
        if not len(matrix):
            raise UserError(f"{self.selects} leaves no entry of {matrix.path}: pass --importance none instead")
