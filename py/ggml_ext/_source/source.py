"""What is quantized: a GGUF file, whole or in parts, a checkpoint folder that is converted first, or a repository of the hub."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile
from .._formats.split import model_stem, open_model, part_names
from .._output.parts import UNFINISHED
from .._output.paths import Taken, check_beside
from . import hub
from .checkpoint import AS_STORED, convert_checkpoint


@dataclass(frozen=True)
class Source:
    """Where the model comes from. path: a GGUF file or the folder of a checkpoint, None with hf_repo; keep_gguf: the name that the
    GGUF file of a checkpoint gets; outtype: the type that the converter gives it."""

    path: Path | None
    hf_repo: str | None = None
    hf_file: str | None = None
    revision: str | None = None
    hf_token: str | None = None
    keep_gguf: Path | None = None
    outtype: str = AS_STORED
    allow_requantize: bool = False

    def check(self) -> None:
        """UserError naming what does not fit together."""
        if self.hf_repo is not None:
            return
        for flag in ("hf_file", "revision", "hf_token"):
            if getattr(self, flag) is not None:
                raise UserError(f"--{flag.replace('_', '-')} belongs to --hf-repo ORG/NAME, which is not given")
        if self.path is None:
            raise UserError("the following arguments are required: IN, or --hf-repo ORG/NAME; see --help")
        if self.keep_gguf is not None and os.path.isfile(self.path):
            raise UserError(f"--keep-gguf: {self.path} is a file, and only the folder of a checkpoint is converted: leave it out")

    @property
    def expected_stem(self) -> str:
        """The model's name, by which results are kept, as far as it is known before anything is read: the hub may give another
        file."""
        if self.keep_gguf is not None:
            return self.keep_gguf.name.removesuffix(".gguf")
        if self.hf_repo is not None:
            return model_stem(self.hf_file.rpartition("/")[2]) if self.hf_file else self.repo_name
        return _folder_name(self.path) if os.path.isdir(self.path) else model_stem(self.path.name)

    @property
    def repo_name(self) -> str:
        """NAME of ORG/NAME."""
        return self.hf_repo.rpartition("/")[2]


def list_input_files(path: Path | None, by_flag: Mapping[str, Path | None]) -> dict[Path, str]:
    """All files that a run reads, as far as they are known before anything is read, and what each is called. path: IN, None with
    --hf-repo; by_flag: those of flags, None where one is not given."""
    return dict.fromkeys(_model_files(path), "IN") | {given: flag for flag, given in by_flag.items() if given is not None}


def _model_files(path: Path | None) -> list[Path]:
    if path is None:
        return []
    if os.path.isdir(path):
        with contextlib.suppress(OSError):  # said when it is read
            return [p for p in path.iterdir() if not re.fullmatch(UNFINISHED, p.name)]  # which may be those of OUT
    return [path.with_name(name) for name in part_names(path.name)]


def _folder_name(path: Path) -> str:
    return Path(os.path.abspath(path)).name


def check_keep_gguf(kept: Path | None, taken: Taken) -> Taken:
    """What is taken with the file of --keep-gguf too, if one is asked for; UserError if it may not be written."""
    if kept is None:
        return taken
    if kept.is_file() or not kept.absolute().parent.is_dir():
        what = "exists: pass it as IN, or name another file" if kept.is_file() else "is in no folder that exists: create it first"
        raise UserError(f"--keep-gguf: {kept} {what}")
    return check_beside("--keep-gguf", kept, taken, force=False)


@contextlib.contextmanager
def open_source(source: Source, output: Path | None, console: Console) -> Iterator[GGUFFile]:
    """The model to quantize. output: None for a dry run. UserError for everything that the user can change."""
    path, name, kept = source.path, None, source.keep_gguf
    if source.hf_repo is not None:
        path = hub.fetch_model(hub.Repo(source.hf_repo, source.revision, source.hf_token), source.hf_file, source.allow_requantize, console)
        name = source.repo_name
    if not os.path.isdir(path):
        if kept is not None:
            raise UserError(f"--keep-gguf: {path} is a GGUF file, nothing is converted: leave it out")
        yield open_model(path)
        return
    where = Path(tempfile.gettempdir()) if output is None else output.parent
    kept = kept and kept.absolute()
    with convert_checkpoint(path, name or _folder_name(path), where, kept, console, source.outtype, source.allow_requantize) as file:
        yield open_model(file)
