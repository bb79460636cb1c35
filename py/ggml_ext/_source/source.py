"""What is quantized: a GGUF file, whole or in parts, a checkpoint folder that is converted first, or a repository of the hub."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile
from .._formats.split import open_model, part_names, stem_of
from .._output.parts import UNFINISHED
from .._output.paths import Taken, check_beside
from . import hub
from .checkpoint import converted


def add_options(add: Callable) -> None:
    """The quantizer's options about its input. add: add_argument of its parser."""
    add("--hf-repo", metavar="ORG/NAME", help="in place of IN: a model of the Hugging Face hub, kept in its client's cache")
    add(
        "--hf-file",
        metavar="FILE",
        help="GGUF file of --hf-repo to take, of a split one the first part; default: in BF16 or F16, else the safetensors",
    )
    add("--revision", metavar="NAME", help="branch, tag or commit of --hf-repo; default: main")
    add("--hf-token", metavar="TOKEN", help="access token for --hf-repo; default: HF_TOKEN, or that of the client's login")
    add("--keep-gguf", metavar="FILE", type=Path, help="keep the GGUF file that a checkpoint is converted to, as FILE")


def check_options(args: argparse.Namespace) -> None:
    """UserError naming what does not fit together. With --hf-repo the one file named is OUT."""
    if args.hf_repo is not None:
        if args.output is not None:
            raise UserError(f"--hf-repo takes the place of IN, and both {args.input} and {args.output} are given: pass OUT alone")
        args.input, args.output = None, args.input
        return
    for flag in ("hf_file", "revision", "hf_token"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')} belongs to --hf-repo ORG/NAME, which is not given")
    if args.input is None:
        raise UserError("the following arguments are required: IN, or --hf-repo ORG/NAME; see --help")
    if args.keep_gguf is not None and os.path.isfile(args.input):
        raise UserError(f"--keep-gguf: {args.input} is a file, and only the folder of a checkpoint is converted: leave it out")


def read_files(args: argparse.Namespace) -> dict[Path, str]:
    """All files that a run reads, as far as they are known before anything is read, and what each is called. Of both programs that
    write models; one may lack a flag."""
    flags = {flag: getattr(args, flag[2:].replace("-", "_"), None) for flag in ("--imatrix", "--imatrix-from")}
    return dict.fromkeys(_model_files(args.input), "IN") | {path: flag for flag, path in flags.items() if path is not None}


def _model_files(path: Path | None) -> list[Path]:
    if path is None:
        return []
    if os.path.isdir(path):
        with contextlib.suppress(OSError):  # said when it is read
            return [p for p in path.iterdir() if not re.fullmatch(UNFINISHED, p.name)]  # which may be those of OUT
    return [path.with_name(name) for name in part_names(path.name)]


def expected_stem(args: argparse.Namespace) -> str:
    """The model's name, by which results are kept, as far as it is known before anything is read: the hub may give another file."""
    if args.keep_gguf is not None:
        return args.keep_gguf.name.removesuffix(".gguf")
    if args.hf_repo is not None:
        return stem_of(args.hf_file.rpartition("/")[2]) if args.hf_file else _repo_name(args)
    return _folder_name(args.input) if os.path.isdir(args.input) else stem_of(args.input.name)


def _repo_name(args: argparse.Namespace) -> str:
    return args.hf_repo.rpartition("/")[2]


def _folder_name(path: Path) -> str:
    return Path(os.path.abspath(path)).name


def check_keep_gguf(args: argparse.Namespace, taken: Taken) -> Taken:
    """What is taken with the file of --keep-gguf too, if one is asked for; UserError if it may not be written."""
    kept = args.keep_gguf
    if kept is None:
        return taken
    if kept.exists() or not kept.absolute().parent.is_dir():
        what = "exists: pass it as IN, or name another file" if kept.exists() else "is in no folder that exists: create it first"
        raise UserError(f"--keep-gguf: {kept} {what}")
    return check_beside("--keep-gguf", kept, taken, force=False)


@contextlib.contextmanager
def open_source(args: argparse.Namespace, output: Path | None, say: Callable[[str], None], show_bar: bool) -> Iterator[GGUFFile]:
    """The model to quantize. output: None for a dry run. UserError for everything that the user can change."""
    path, name, kept = args.input, None, args.keep_gguf
    if args.hf_repo is not None:
        path = hub.fetch(hub.Repo(args.hf_repo, args.revision, args.hf_token), args.hf_file, args.quiet, say)
        name = _repo_name(args)
    if not os.path.isdir(path):
        if kept is not None:
            raise UserError(f"--keep-gguf: {path} is a GGUF file, nothing is converted: leave it out")
        yield open_model(path)
        return
    where = Path(tempfile.gettempdir()) if output is None else output.parent
    with converted(path, name or _folder_name(path), where, kept and kept.absolute(), say, show_bar) as file:
        yield open_model(file)
