"""Split models (NAME-00001-of-00003.gguf, ...), read as one file with the names, keys and checks of llama.cpp's loader."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from .._base.errors import UserError
from .gguf_file import GGUFFile, Tensor

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
PARTS_KEY = "ggml_ext.parts"  # what a part of --part was made from
NUMBER_KEY, COUNT_KEY, TENSORS_KEY, _ = SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count", PARTS_KEY)
MAX_PARTS = 65535  # split.count has 16 bits


def part_name(prefix: str, n: int, count: int) -> str:
    """Return the name of part n, counted from 1, as llama_split_path() does."""
    return f"{prefix}-{n:05}-of-{count:05}.gguf"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model that `name` is a part of, or [name]."""
    match = PART_NAME.fullmatch(name)
    return [part_name(match[1], n, int(match[3])) for n in range(1, int(match[3]) + 1)] if match else [name]


def model_stem(name: str) -> str:
    """Return the model's name for that of a file or of a part."""
    match = PART_NAME.fullmatch(name)
    return match[1] if match else name.removesuffix(".gguf")


class SplitGGUF(GGUFFile):
    """The parts of a model as one file, with the metadata of the first part. UserError if they do not belong together."""

    def __init__(self, files: list[GGUFFile]):
        first = files[0]
        self.path, self.metadata, self.alignment = first.path, first.metadata, first.alignment
        self._files = files
        self.n_bytes = sum(f.n_bytes for f in files)
        self.tensors = [t for f in files for t in f.tensors]
        self._file_of: dict[str, GGUFFile] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor.name in self._file_of:
                    raise UserError(
                        f"{file.path}: tensor {tensor.name} is in {self._file_of[tensor.name].path.name} too: one of them is "
                        "of another model; download or split it again"
                    )
                self._file_of[tensor.name] = file
        needed = first.value(TENSORS_KEY)
        if len(self.tensors) != needed:
            raise UserError(
                f"{first.path} and the {len(files) - 1} parts after it have {len(self.tensors):,} tensors, {TENSORS_KEY} is "
                f"{needed}: one of them is of another model; download or split it again"
            )

    @property
    def parts(self) -> list[GGUFFile]:
        return self._files

    @property
    def stem(self) -> str:
        return model_stem(self.path.name)

    def rows(self, tensor: Tensor, first: int, count: int) -> np.ndarray:
        return self._file_of[tensor.name].rows(tensor, first, count)

    def pieces(self, tensor: Tensor, size: int, first: int, count: int) -> np.ndarray:
        return self._file_of[tensor.name].pieces(tensor, size, first, count)

    def is_hole(self, tensor: Tensor) -> bool:
        return self._file_of[tensor.name].is_hole(tensor)

    def check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()


def open_model(path: Path) -> GGUFFile:
    """Open a GGUF file, or all parts of the split model that it belongs to. UserError if a part is missing or of another model."""
    file = GGUFFile(path)
    count, number = file.value(COUNT_KEY), file.value(NUMBER_KEY)
    if type(count) is not int or count < 2:
        return file
    match = PART_NAME.fullmatch(path.name)
    if not match or number != int(match[2]) - 1 or count != int(match[3]):
        which = f"part {number + 1}" if isinstance(number, int) else "one"
        what = f"{path} is {which} of {count} parts of a split model ({NUMBER_KEY}, {COUNT_KEY})"
        if file.has_more:
            raise UserError(f"{what}, and other parts are appended to it: join parts with llama-gguf-split --merge, not with cat")
        raise UserError(f"{what}, its name must end in {_required_ending(number, count)}: give all parts their original names")
    paths = [path.with_name(name) for name in part_names(path.name)]
    if missing := [p.name for p in paths if not p.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{path} is one of {count} parts of a split model, {missing[0]}{more} is missing: put all parts into {path.parent}"
        )
    return SplitGGUF([_open_part(p, i, count) for i, p in enumerate(paths)])


def _open_part(path: Path, number: int, count: int) -> GGUFFile:
    file = GGUFFile(path)
    keys = file.value(NUMBER_KEY), file.value(COUNT_KEY)
    if keys != (number, count):
        actual = "none" if keys == (None, None) else f"{NUMBER_KEY} {keys[0]} and {COUNT_KEY} {keys[1]}"
        raise UserError(
            f"{path} must have {NUMBER_KEY} {number} and {COUNT_KEY} {count}, it has {actual}: it is of another model; download or "
            "split it again"
        )
    return file


def _required_ending(number: object, count: int) -> str:
    return f"-{number + 1:05}-of-{count:05}.gguf" if isinstance(number, int) else f"-NUMBER-of-{count:05}.gguf"
