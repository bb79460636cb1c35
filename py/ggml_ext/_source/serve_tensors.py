"""Run llama.cpp's convert_hf_to_gguf.py, and write the tensors of its GGUF file one at a time, when they are asked for.

    python serve_tensors.py CONVERTER ARGUMENT...

The converter's tensors are lazy: each is read from the checkpoint, dequantized and converted when it is written. This program writes the header,
extends the file to its final size, prints "ready" and obeys the lines of its standard input:

    INDEX PATH    write the data of tensor number INDEX to a file of its own
    all           write all tensors to the GGUF file

It prints the number of bytes written after each tensor. Everything else goes to standard error.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def copy_lazy(value: Any, lazy_type: type) -> Any:
    """Copy the lazy tensors in a value: evaluating one keeps all intermediate results, and replaces its arguments."""
    if isinstance(value, (list, tuple)):
        return type(value)(copy_lazy(item, lazy_type) for item in value)
    if not isinstance(value, lazy_type) or value._func is None:  # type: ignore[attr-defined]
        return value
    lazy: Any = value
    return type(lazy)(meta=lazy._meta, args=copy_lazy(lazy._args, lazy_type), kwargs=lazy._kwargs, func=lazy._func)


def serve(writer: Any, lazy_type: type, requests: Any, answers: Any) -> None:
    """Write the header of a GGUFWriter's file, and its tensors on request; in place of GGUFWriter.write_tensors_to_file()."""
    writer.write_ti_data_to_file()
    (file,), (infos,) = writer.fout, writer.tensors
    writer.write_padding(file, file.tell())
    infos, start = list(infos.values()), file.tell()
    ends = [0]
    for info in infos:
        ends.append(ends[-1] + writer.ggml_pad(info.nbytes, writer.data_alignment))
    file.truncate(start + ends[-1])
    file.flush()

    def answer(text: object) -> None:
        answers.write(f"{text}\n")
        answers.flush()

    def write(info: Any, out: Any) -> None:
        before = out.tell()
        copy_lazy(info.tensor, lazy_type).tofile(out)
        if out.tell() - before != info.nbytes:
            raise ValueError(f"a tensor has {out.tell() - before} bytes, expected {info.nbytes}")

    answer("ready")
    for line in requests:
        index, _, path = line.rstrip("\n").partition(" ")
        if index != "all":
            with open(path, "wb") as out:
                write(infos[int(index)], out)
            answer(infos[int(index)].nbytes)
            continue
        for info, end in zip(infos, ends[:-1], strict=True):
            file.seek(start + end)
            write(info, file)
            file.flush()
            answer(info.nbytes)


def main() -> None:
    """Run the converter named by the first argument with the other arguments."""
    converter = Path(sys.argv[1])
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what prints
    sys.argv = sys.argv[1:]
    sys.path[0] = str(converter.parent)  # as if it had been started
    sys.path.insert(1, str(converter.parent / "gguf-py"))
    import gguf

    def write_tensors_to_file(self: Any, *, progress: bool = False) -> None:
        serve(self, gguf.lazy.LazyBase, requests, answers)

    gguf.GGUFWriter.write_tensors_to_file = write_tensors_to_file  # type: ignore[method-assign]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    main()
