"""Proxy models: the same model in fewer bits, which calibration runs if the model itself does not fit into memory.

A model in F16 that does not fit is read from the disk for every chunk. A proxy model costs little quality (docs/results/calibration.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, fingerprint, temporary_directory
from .._base.units import GIB
from .._formats.gguf_file import GGUFFile, header_bytes
from .._formats.split import open_model
from .._native.programs import find_tool
from .._native.requantize import requantize

FLAG = "--calibrate-with"
SOURCE = "source"  # the model itself, even where it does not fit
# type -> name of llama-quantize's file type, and bits a weight of that in large models
TYPES = {"q8_0": ("Q8_0", 8.5), "q6_k": ("Q6_K", 6.6), "q5_k": ("Q5_K_S", 5.6), "q4_k": ("Q4_K_S", 4.7), "q4_0": ("Q4_0", 4.7)}
BY_ITSELF = ("q8_0", "q4_k")  # the first that fits
TEMPORARY = ".stand-in-"


@dataclass(frozen=True)
class ProxyModel:
    """A model in fewer bits."""

    type: str
    n_bytes: int  # estimated if there is no file
    file: GGUFFile | None = None  # None: the model is quantized to the type

    @property
    def title(self) -> str:
        """Name it within a sentence."""
        return f"in {self.type}" if self.file is None else f"as {self.file.path}"

    def product_type(self) -> GGMLQuantizationType:
        """Return the type of most weights, as near as an estimate needs it."""
        if self.file is None:
            return GGMLQuantizationType[self.type.upper()]
        return max(self.file.tensors, key=lambda t: t.n_elements).type

    def list_dependencies(self) -> dict:
        """List what a calibration result depends on."""
        if self.file is None:
            return {"stand_in": self.type}
        return {"stand_in": [fingerprint(part.path, header_bytes(part)) for part in self.file.parts]}

    @contextlib.contextmanager
    def provide(self, source: Path, folder: Path, n_threads: int, console: Console) -> Iterator[Path]:
        """Provide the file, quantized in `folder` and removed at the end if there was none. OSError and UserError if that fails."""
        if self.file is not None:
            yield self.file.path
            return
        program = find_tool("llama-quantize")
        if program is None:
            raise UserError(f"{FLAG}: llama-quantize is not in the package: reinstall ggml-ext, or pass {FLAG} {SOURCE}")
        with temporary_directory(folder, TEMPORARY, console.note) as temporary:
            what, way_out = f"the model in {self.type}", f"pass {FLAG} {SOURCE}, which reads the model itself"
            check_free_space(folder, self.n_bytes, what, " for the calibration", way_out)
            out = temporary / f"{self.type}.gguf"
            with console.bar(f"model in {self.type}", 1, "file") as bar:
                if error := requantize(program, source, out, TYPES[self.type][0], n_threads):
                    raise UserError(f"{FLAG}: {error}; pass {FLAG} {SOURCE}")
                bar.update()
            yield out


def check_name(name: str) -> None:
    """Raise UserError for what is neither a type nor a file."""
    if name not in (SOURCE, *TYPES) and not Path(name).is_file():
        raise UserError(f"{FLAG}: got {name!r}, must be {', '.join(TYPES)}, {SOURCE} or a GGUF file of the same model in fewer bits")


def find_proxy(name: str | None, file: GGUFFile, memory: float, console: Console) -> ProxyModel | None:
    """Return the proxy model to calibrate with; None for the model itself.

    Args:
        name: of --calibrate-with. None: the largest proxy that fits into memory, if the model does not.
        file: the model.
        memory: bytes that may be used.
        console: told of a proxy that the user did not name.

    Raises:
        UserError: the file is of another model.
    """
    if name == SOURCE:
        return None
    if name in TYPES:
        return _of_type(file, name)
    if name is not None:
        return _of_file(Path(name), file)
    if file.n_bytes <= memory:
        return None
    candidates = [_of_type(file, name) for name in BY_ITSELF]
    proxy = next((c for c in candidates if c.n_bytes <= memory), candidates[-1])
    console.note(
        f"{file.n_bytes / GIB:.1f} GiB of the model do not fit into the {memory / GIB:.1f} GiB that may be used: calibrated with the model in "
        f"{proxy.type}, {proxy.n_bytes / GIB:.1f} GiB; {FLAG} {SOURCE} takes the model itself"
    )
    return proxy


def _of_type(file: GGUFFile, name: str) -> ProxyModel:
    return ProxyModel(name, sum(int(t.n_elements * TYPES[name][1] / 8) if t.n_dims > 1 else t.n_bytes for t in file.tensors))


def _of_file(path: Path, file: GGUFFile) -> ProxyModel:
    model = open_model(path)
    tensors = {t.name: t for t in model.tensors}
    for tensor in file.tensors:
        other = tensors.get(tensor.name)
        if other is None:
            raise UserError(f"{FLAG}: {path} has no tensor {tensor.name}: it is of another model than {file.path}; name one that was made from it")
        if tensor.ne != other.ne:
            raise UserError(
                f"{FLAG}: tensor {tensor.name} is {list(other.ne)} in {path} and {list(tensor.ne)} in {file.path}: it is of another model; "
                "name one that was made from it"
            )
    return ProxyModel(path.name, model.n_bytes, model)
