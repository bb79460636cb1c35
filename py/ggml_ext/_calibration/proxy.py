"""Proxy models: calibration with the model in fewer bits, if the model itself does not fit into memory.

A model that does not fit is read from the disk for every chunk. A proxy model costs little quality (docs/results/calibration.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, temporary_directory
from .._base.units import GIB
from .._formats.column_scales import KEY
from .._formats.gguf_file import GGUFFile
from .._formats.split import open_model
from .._native.programs import find_tool
from .._native.requantize import requantize
from .cost import CalibrationCost

FLAG = "--calibrate-with"
SOURCE = "source"  # the model itself, even if it does not fit
# type -> llama-quantize's file type, and its bits per weight in large models
TYPES = {"q8_0": ("Q8_0", 8.5), "q6_k": ("Q6_K", 6.6), "q5_k": ("Q5_K_S", 5.6), "q4_k": ("Q4_K_S", 4.7), "q4_0": ("Q4_0", 4.7)}
DEFAULT_TYPES = ("q8_0", "q4_k")  # the first that fits into memory is used, else the last
TEMPORARY = ".proxy-"


@dataclass(frozen=True)
class ProxyModel:
    """A model in fewer bits, from a file or to be quantized."""

    type: str
    n_bytes: int  # estimate without a file
    file: GGUFFile | None = None  # None: the model is quantized to the type

    @property
    def title(self) -> str:
        """The name of the proxy in a sentence."""
        return self.type if self.file is None else str(self.file.path)

    def product_type(self) -> GGMLQuantizationType:
        """Return the type of most weights in the layers."""
        return GGMLQuantizationType[self.type.upper()] if self.file is None else CalibrationCost.read(self.file).type

    def list_dependencies(self) -> dict:
        """List what a calibration result depends on."""
        if self.file is None:
            return {"proxy": self.type}
        return {"proxy": self.file.fingerprints()}

    @contextlib.contextmanager
    def provide(self, source: Path, directory: Path, n_threads: int, console: Console) -> Iterator[Path]:
        """Provide the file. If there is none, quantize the model in `directory`, and remove the file at the end.

        Raises:
            OSError, UserError: the file cannot be made.
        """
        if self.file is not None:
            yield self.file.path
            return
        program = find_tool("llama-quantize")
        if program is None:
            raise UserError(f"{FLAG}: llama-quantize is not in the package: reinstall ggml-ext, or pass {FLAG} {SOURCE}")
        with temporary_directory(directory, TEMPORARY, console.note) as temporary:
            description, hint = f"the model in {self.type}", f"pass {FLAG} {SOURCE}, which reads the model itself"
            check_free_space(directory, self.n_bytes, description, " for the calibration", hint)
            out = temporary / f"{self.type}.gguf"
            with console.bar(f"model in {self.type}", 1, "file") as bar:
                if error := requantize(program, source, out, TYPES[self.type][0], n_threads):
                    raise UserError(f"{FLAG}: {error}; pass {FLAG} {SOURCE}")
                bar.update()
            yield out


def check_name(name: str) -> None:
    """Raise UserError if the name is neither a type nor a file."""
    if name not in (SOURCE, *TYPES) and not Path(name).is_file():
        raise UserError(f"{FLAG}: got {name!r}, must be {', '.join(TYPES)}, {SOURCE} or a GGUF file of the same model in fewer bits")


def find_proxy(name: str | None, file: GGUFFile, memory: float, console: Console) -> ProxyModel | None:
    """Return the proxy model to calibrate with; None for the model itself.

    Args:
        name: value of --calibrate-with; None: the model if it fits into memory, else the first of DEFAULT_TYPES that does, else the last.
        file: the model.
        memory: limit in bytes.
        console: gets a note if a proxy is used by default, and another if it does not fit either.

    Raises:
        UserError: the file is of another model.
    """
    if name == SOURCE:
        return None
    if name in TYPES:
        return _make_proxy(file, name)
    if name is not None:
        return _open_proxy(Path(name), file)
    if file.n_bytes <= memory:
        return None
    candidates = [_make_proxy(file, name) for name in DEFAULT_TYPES]
    proxy = next((c for c in candidates if c.n_bytes <= memory), candidates[-1])
    console.note(
        f"the model has {file.n_bytes / GIB:.1f} GiB, the limit is {memory / GIB:.1f} GiB: calibrating with the proxy model {proxy.type}, "
        f"{proxy.n_bytes / GIB:.1f} GiB; {FLAG} {SOURCE} uses the model itself"
    )
    if proxy.n_bytes > memory:
        console.note(f"the proxy model {proxy.type} does not fit into memory either: this may be slow")
    return proxy


def _make_proxy(file: GGUFFile, name: str) -> ProxyModel:
    return ProxyModel(name, sum(int(t.n_elements * TYPES[name][1] / 8) if t.n_dims > 1 else t.n_bytes for t in file.tensors))


def _open_proxy(path: Path, file: GGUFFile) -> ProxyModel:
    model = open_model(path)
    if model.value(KEY) != file.value(KEY):
        raise UserError(f"{FLAG}: {path} and {file.path} have different column scales: quantize the proxy model with --no-column-scales")
    tensors = {t.name: t for t in model.tensors}
    for tensor in file.tensors:
        other = tensors.get(tensor.name)
        if other is None:
            raise UserError(
                f"{FLAG}: {path} has no tensor {tensor.name}: it is for another model than {file.path}; name a file that was quantized from it"
            )
        if tensor.ne != other.ne:
            raise UserError(
                f"{FLAG}: tensor {tensor.name} is {list(other.ne)} in {path} and {list(tensor.ne)} in {file.path}: it is for another model; "
                "name a file that was quantized from it"
            )
    return ProxyModel(path.name, model.n_bytes, model)
