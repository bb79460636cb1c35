"""The GGUF file of a checkpoint, whose tensors are converted when they are read: the disk holds a few of them at a time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .._base.console import Console
from .._base.errors import UserError
from .._base.file_reader import FileChanged, FileReader
from .._base.files import check_free_space, fingerprint, identify_file
from .._base.units import MIB
from .._formats.gguf_file import GGUFFile, Tensor
from .._native.process import log_file, read_lines, require_pipe, start_program

SERVER = Path(__file__).with_name("serve_tensors.py")
KEPT_BYTES, KEPT_TENSORS = 1 << 28, 2  # converted tensors that stay on the disk: those that threads read at a time


@dataclass
class Converter:
    """The running converter, which answers one request at a time. explain: return the error of its log and exit code."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    explain: Callable[[int, str], UserError]
    lines: Iterator[bytes]  # of its output

    def read_line(self) -> str | None:
        """Return the next line of its output; None at the end, if it has succeeded. UserError if it has failed."""
        if (line := next(self.lines, None)) is not None:
            return line.decode()
        if code := self.process.wait():
            raise self.explain(code, Path(self.log.name).read_bytes().decode(errors="replace"))
        return None

    def request(self, line: str) -> None:
        """Send a request. An error shows when the answer is read."""
        with contextlib.suppress(BrokenPipeError):
            require_pipe(self.process.stdin).write(f"{line}\n".encode(errors="surrogateescape"))

    def read_size(self) -> int:
        """Read the answer to a request, the bytes written. UserError if the converter has ended."""
        if (line := self.read_line()) is None:
            raise self.explain(0, "the converter ended early")
        return int(line)


class ConvertedFile(GGUFFile):
    """The file of a running converter, which has the header and a hole for the data. Tensors that are read are converted to files next to it."""

    def __init__(self, path: Path, converter: Converter, sources: Mapping[str, Path], console: Console):
        super().__init__(path)
        self._converter, self._sources, self._console = converter, sources, console
        self._index = {t.name: i for i, t in enumerate(self.tensors)}  # in the order of the header
        self._converted: OrderedDict[str, FileReader] = OrderedDict()  # the most recent one last
        self._identities = {name: identify_file(path) for name, path in sources.items()}
        self._lock = threading.Lock()
        self._is_complete = False

    def pieces(self, tensor: Tensor, size: int, first: int, count: int) -> np.ndarray:
        if self._is_complete:
            return super().pieces(tensor, size, first, count)
        with self._lock:
            reader = self._convert(tensor)
        return np.frombuffer(reader.read(first * size, count * size), np.uint8).reshape(count, size)

    def is_hole(self, tensor: Tensor) -> bool:
        return False

    def fingerprints(self) -> list[dict[str, Any]]:
        """Return those of the checkpoint's files."""
        return [{name: fingerprint(path) for name, path in self._sources.items()}]

    def check_unchanged(self) -> None:
        """Raise FileChanged if the checkpoint changed since its tensors were first read."""
        for name, path in self._sources.items():
            try:
                is_unchanged = identify_file(path) == self._identities[name]
            except OSError:
                is_unchanged = False
            if not is_unchanged:
                raise FileChanged(f"{path} changed while it was read: run it again once nothing writes to the checkpoint")

    def _convert(self, tensor: Tensor) -> FileReader:
        """Return the open file of a converted tensor; remove those that have not been read for long."""
        if tensor.name not in self._converted:
            index = self._index[tensor.name]
            path = self.path.parent / f"{index}.tensor"
            self._converter.request(f"{index} {path.absolute()}")
            self._converter.read_size()
            self._converted[tensor.name] = FileReader(path)
        self._converted.move_to_end(tensor.name)
        while len(self._converted) > KEPT_TENSORS and sum(r.n_bytes for r in self._converted.values()) > KEPT_BYTES:
            self._converted.popitem(last=False)[1].path.unlink()
        return self._converted[tensor.name]

    def complete(self, reader: str) -> None:
        """Write all tensors, for programs that read the file. UserError if there is no room. reader: what reads it, for the note."""
        if self._is_complete:
            return
        n_bytes = sum(t.n_bytes for t in self.tensors)
        with self._lock:
            while self._converted:
                self._converted.popitem()[1].path.unlink()
            check_free_space(self.path.parent, n_bytes, "the GGUF file of the checkpoint", f", which {reader} reads", "write OUT to another disk")
            self._console.note(f"writing the GGUF file of the checkpoint, {n_bytes / MIB:,.0f} MiB, which {reader} reads; removed afterwards")
            self._converter.request("all")
            with self._console.bar("converting", n_bytes, "B", is_scaled=True) as bar:
                for _ in self.tensors:
                    bar.update(self._converter.read_size())
            self._source, self._is_complete = FileReader(self.path), True


@contextlib.contextmanager
def start_converter(
    command: list[str], path: Path, env: Mapping[str, str], sources: Mapping[str, Path], explain: Callable[[int, str], UserError], *, console: Console
) -> Iterator[GGUFFile]:
    """Run the converter during the block and yield its file. A converter that ends has written the file.

    Args:
        command: the converter and its arguments.
        path: the file that it writes, in a temporary directory.
        env: its environment.
        sources: the checkpoint's files, by name.
        explain: as in Converter.
        console: for notes and progress.

    Raises:
        UserError: the converter fails, or writes no file.
    """
    with log_file() as log:
        command = [sys.executable, str(SERVER), *command]
        with start_program(command, path.parent, dict(env), subprocess.PIPE, log) as process:
            converter = Converter(process, log, explain, read_lines(require_pipe(process.stdout)))
            if converter.read_line() is not None:
                yield ConvertedFile(path, converter, sources, console)
                return
            text = Path(log.name).read_bytes().decode(errors="replace")
        if not path.is_file():
            raise explain(0, text)
        yield GGUFFile(path)
