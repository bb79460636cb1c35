"""Split models, NAME-00001-of-00003.gguf and its neighbours, read as one: the names, keys and checks of llama.cpp's loader."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from .._base.errors import UserError
from .gguf_file import GGUFFile, Tensor

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
NUMBER_KEY, COUNT_KEY, TENSORS_KEY = SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def part_name(prefix: str, n: int, count: int) -> str:
    """Name of part n, from 1 on, as llama.cpp's llama_split_path() makes it."""
    return f"{prefix}-{n:05}-of-{count:05}.gguf"


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that the name says it is a part of, in order; the name alone where it says nothing."""
    found = PART_NAME.fullmatch(name)
    return [part_name(found[1], n, int(found[3])) for n in range(1, int(found[3]) + 1)] if found else [name]


def model_stem(name: str) -> str:
    """The model's name in that of a file, whole or a part."""
    found = PART_NAME.fullmatch(name)
    return found[1] if found else name.removesuffix(".gguf")


class SplitGGUF(GGUFFile):
    """The parts of a model as one file, with the metadata of the first. UserError if they are no parts of one model."""

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
        return PART_NAME.fullmatch(self.path.name)[1]

    def rows(self, tensor: Tensor, first: int, count: int) -> np.ndarray:
        return self._file_of[tensor.name].rows(tensor, first, count)

    def pieces(self, tensor: Tensor, size: int, first: int, count: int) -> np.ndarray:
        return self._file_of[tensor.name].pieces(tensor, size, first, count)

    def is_hole(self, tensor: Tensor) -> bool:
        return self._file_of[tensor.name].is_hole(tensor)

    def check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def open_model(path: Path) -> GGUFFile:
    """A GGUF file, or all parts of the split model that it is one of. UserError if one is missing or does not belong to it."""
    file = GGUFFile(path)
    count, number = file.value(COUNT_KEY), file.value(NUMBER_KEY)
    if not _is_count(count):
        return file
    found = PART_NAME.fullmatch(path.name)
    if not found or number != int(found[2]) - 1 or count != int(found[3]):
        which = f"part {number + 1}" if isinstance(number, int) else "one"
        what = f"{path} is {which} of {count} parts of a split model ({NUMBER_KEY}, {COUNT_KEY})"
        if file.has_more:
            raise UserError(f"{what}, with others behind it: parts are not joined by cat, join them with llama-gguf-split --merge")
        raise UserError(f"{what}, its name must end in {_ending(number, count)}: give all parts the names that they had")
    paths = [path.with_name(name) for name in part_names(path.name)]
    if missing := [p.name for p in paths if not p.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{path} is one of {count} parts of a split model, {missing[0]}{more} is missing: put all parts into {path.parent}"
        )
    return SplitGGUF([_open_part(p, i, count) for i, p in enumerate(paths)])


def _open_part(path: Path, number: int, count: int) -> GGUFFile:
    file = GGUFFile(path)
    found = file.value(NUMBER_KEY), file.value(COUNT_KEY)
    if found != (number, count):
        said = "none" if found == (None, None) else f"{NUMBER_KEY} {found[0]} and {COUNT_KEY} {found[1]}"
        raise UserError(
            f"{path} must have {NUMBER_KEY} {number} and {COUNT_KEY} {count}, it has {said}: it is of another model; download or "
            "split it again"
        )
    return file


def _ending(number, count: int) -> str:
    return f"-{number + 1:05}-of-{count:05}.gguf" if isinstance(number, int) else f"-NUMBER-of-{count:05}.gguf"
