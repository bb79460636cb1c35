"""The model to quantize: a GGUF file or split model, a checkpoint that is converted first, or a repository of the hub."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.console import Console
from .._base.errors import UserError
from .._base.option import option
from .._formats.gguf_file import GGUFFile
from .._formats.reserved_paths import UNFINISHED, ReservedPaths, reserve_file
from .._formats.split import model_stem, open_model, part_names
from . import hub
from .checkpoint import AS_STORED, convert_checkpoint, identify_checkpoint


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The source of the model. outtype: the type that a checkpoint is converted to; allow_requantize: as in TypeOptions."""

    path: Path | None = option(
        None, flag="input", is_positional=True, metavar="IN", help="GGUF model in F32, F16, BF16 or Q8_0, or the directory of a Hugging Face checkpoint"
    )
    hf_repo: str | None = option(None, metavar="ORG/NAME", help="model on the Hugging Face hub, in place of IN")
    hf_file: str | None = option(
        None, metavar="FILE", help="GGUF file of --hf-repo, or its first part (default: BF16 or F16, else the safetensors)"
    )
    revision: str | None = option(None, metavar="NAME", help="branch, tag or commit of --hf-repo (default: main)")
    hf_token: str | None = option(
        None, metavar="TOKEN", in_command=False, help="access token for --hf-repo and --upload (default: HF_TOKEN, or the client's login)"
    )
    keep_gguf: Path | None = option(None, metavar="FILE", in_command=False, help="save the GGUF file that a checkpoint is converted to")
    outtype: str = AS_STORED
    allow_requantize: bool = False

    def check(self, is_uploading: bool) -> None:
        """Raise UserError for an invalid combination. is_uploading: the token is for --upload."""
        if self.hf_repo is not None:
            return
        for flag, value in (("--hf-file", self.hf_file), ("--revision", self.revision), ("--hf-token", None if is_uploading else self.hf_token)):
            if value is not None:
                raise UserError(f"{flag} needs --hf-repo ORG/NAME")
        if self.path is None:
            raise UserError("the following arguments are required: IN, or --hf-repo ORG/NAME; see --help")
        if self.keep_gguf is not None and os.path.isfile(self.path):
            raise UserError(f"--keep-gguf: {self.path} is a file, and only a checkpoint's directory is converted: drop the option")

    @property
    def local_path(self) -> Path:
        """IN, which check() requires without hf_repo."""
        assert self.path is not None
        return self.path

    @property
    def expected_stem(self) -> str:
        """The model's name before anything is read, under which results are cached. --hf-repo may yield another."""
        if self.keep_gguf is not None:
            return self.keep_gguf.name.removesuffix(".gguf")
        if self.hf_repo is not None:
            return model_stem(self.hf_file.rpartition("/")[2]) if self.hf_file else self.repo_name
        path = self.local_path
        return _directory_name(path) if os.path.isdir(path) else model_stem(path.name)

    @property
    def repo_name(self) -> str:
        """NAME of ORG/NAME."""
        return (self.hf_repo or "").rpartition("/")[2]


def list_input_files(path: Path | None, by_flag: Mapping[str, Path | None]) -> dict[Path, str]:
    """Return the input files known before the run, with their names in messages. path: IN, None with --hf-repo. by_flag: files of flags."""
    return dict.fromkeys(_model_files(path), "IN") | {file: flag for flag, file in by_flag.items() if file is not None}


def _model_files(path: Path | None) -> list[Path]:
    if path is None:
        return []
    if os.path.isdir(path):
        with contextlib.suppress(OSError):  # reported when it is read
            return [p for p in path.iterdir() if not re.fullmatch(UNFINISHED, p.name)]  # unfinished files may belong to OUT
    return [path.with_name(name) for name in part_names(path.name)]


def _directory_name(path: Path) -> str:
    return Path(os.path.abspath(path)).name


def reserve_kept_gguf(kept: Path | None, paths: ReservedPaths) -> ReservedPaths:
    """Return the reserved paths with that of --keep-gguf, if there is one. UserError if it cannot be written."""
    if kept is None:
        return paths
    if kept.is_file() or not kept.absolute().parent.is_dir():
        problem = "exists: pass it as IN, or name another file" if kept.is_file() else "is in a directory that does not exist: create it first"
        raise UserError(f"--keep-gguf: {kept} {problem}")
    return reserve_file("--keep-gguf", kept, paths, force=False)


@dataclass(frozen=True)
class OpenedSource:
    """The model to quantize. checkpoint: identify_checkpoint(), if `file` is a temporary conversion of one."""

    file: GGUFFile
    checkpoint: dict[str, Any] | None = None


@contextlib.contextmanager
def open_source(source: SourceOptions, output: Path | None, console: Console) -> Iterator[OpenedSource]:
    """Open the model to quantize, after downloading and converting it if needed. output: None for a dry run."""
    path, name, kept = source.path, None, source.keep_gguf
    if source.hf_repo is not None:
        path = hub.fetch_model(hub.Repo(source.hf_repo, source.revision, source.hf_token), source.hf_file, source.allow_requantize, console)
        name = source.repo_name
    else:
        path = source.local_path
        name = _directory_name(path)
    if not os.path.isdir(path):
        if kept is not None:
            raise UserError(f"--keep-gguf: {path} is a GGUF file, nothing is converted: drop the option")
        yield OpenedSource(open_model(path))
        return
    parent = Path(tempfile.gettempdir()) if output is None else output.parent
    kept = kept and kept.absolute()
    checkpoint = None if kept else identify_checkpoint(path)  # before it is converted: it may change later
    with convert_checkpoint(path, name, parent, kept, console, outtype=source.outtype, allow_requantize=source.allow_requantize) as file:
        yield OpenedSource(file, checkpoint)
