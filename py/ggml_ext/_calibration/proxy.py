"""What runs in place of the model while it is calibrated: the same model in fewer bits, made for that time or given.

A model in F16 that does not fit into memory is read from the disk for every chunk. What a calibration with one of these loses is small
(docs/results/calibration.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import fingerprint, free_space, temporary_directory
from .._base.units import GIB, MIB
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
    """file: given; None for one that is made of the model in a type, with a size that is reckoned."""

    type: str
    n_bytes: int
    file: GGUFFile | None = None

    @property
    def title(self) -> str:
        """Within a sentence."""
        return f"in {self.type}" if self.file is None else f"as {self.file.path}"

    def product_type(self) -> GGMLQuantizationType:
        """Of most weights, as near as an estimate needs it."""
        if self.file is None:
            return GGMLQuantizationType[self.type.upper()]
        return max(self.file.tensors, key=lambda t: t.n_elements).type

    def made_from(self) -> dict:
        """What makes a result another one."""
        if self.file is None:
            return {"stand_in": self.type}
        return {"stand_in": [fingerprint(part.path, header_bytes(part)) for part in self.file.parts]}

    @contextlib.contextmanager
    def made(self, source: Path, folder: Path, n_threads: int, console: Console) -> Iterator[Path]:
        """The file as long as this lasts. folder: where it is made. OSError and UserError where that fails."""
        if self.file is not None:
            yield self.file.path
            return
        program = find_tool("llama-quantize")
        if program is None:
            raise UserError(f"{FLAG}: llama-quantize is not in the package: reinstall ggml-ext, or pass {FLAG} {SOURCE}")
        with temporary_directory(folder, TEMPORARY, console.note) as temporary:
            if (free := free_space(folder)) < self.n_bytes:
                raise UserError(
                    f"no space left on device: the model in {self.type} needs {self.n_bytes / MIB:,.0f} MiB in {folder} for the calibration, "
                    f"{free / MIB:,.0f} MiB are free; free some space, or pass {FLAG} {SOURCE}, which reads the model itself"
                )
            out = temporary / f"{self.type}.gguf"
            with console.bar(f"model in {self.type}", 1, "file") as bar:
                if wrong := requantize(program, source, out, TYPES[self.type][0], n_threads):
                    raise UserError(f"{FLAG}: {wrong}; pass {FLAG} {SOURCE}")
                bar.update()
            yield out


def check_name(name: str) -> None:
    """UserError for what is no type and no file."""
    if name not in (SOURCE, *TYPES) and not Path(name).is_file():
        raise UserError(f"{FLAG}: got {name!r}, must be {', '.join(TYPES)}, {SOURCE} or a GGUF file of the same model in fewer bits")


def find(name: str | None, file: GGUFFile, memory: float, console: Console) -> ProxyModel | None:
    """What is asked for by name; without a name nothing where the model fits into so many bytes of memory, else the largest that
    does. UserError for a file of another model."""
    if name == SOURCE:
        return None
    if name in TYPES:
        return _of_type(file, name)
    if name is not None:
        return _of_file(Path(name), file)
    if file.n_bytes <= memory:
        return None
    tried = [_of_type(file, name) for name in BY_ITSELF]
    found = next((s for s in tried if s.n_bytes <= memory), tried[-1])
    console.note(
        f"{file.n_bytes / GIB:.1f} GiB of the model do not fit into the {memory / GIB:.1f} GiB that may be used: calibrated with the model in "
        f"{found.type}, {found.n_bytes / GIB:.1f} GiB; {FLAG} {SOURCE} takes the model itself"
    )
    return found


def _of_type(file: GGUFFile, name: str) -> ProxyModel:
    return ProxyModel(name, sum(int(t.n_elements * TYPES[name][1] / 8) if t.n_dims > 1 else t.n_bytes for t in file.tensors))


def _of_file(path: Path, file: GGUFFile) -> ProxyModel:
    given = open_model(path)
    theirs = {t.name: t for t in given.tensors}
    for tensor in file.tensors:
        other = theirs.get(tensor.name)
        if other is None:
            raise UserError(f"{FLAG}: {path} has no tensor {tensor.name}: it is of another model than {file.path}; name one that was made from it")
        if tensor.ne != other.ne:
            raise UserError(
                f"{FLAG}: tensor {tensor.name} is {list(other.ne)} in {path} and {list(tensor.ne)} in {file.path}: it is of another model; "
                "name one that was made from it"
            )
    return ProxyModel(path.name, given.n_bytes, given)
