"""Models of the Hugging Face hub, through its client library: cache, tokens, resumed downloads and progress bars.

Files are downloaded one by one at the commit that was listed, so that each can be checked against the listed hash, in a resumed run too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import NO_SPACE, check_free_space
from .._base.units import MIB
from .._formats.split import part_names
from .checkpoint import (
    ADAPTER,
    CONFIG,
    FORMATS,
    NEEDED,
    check_bits,
    index_name,
    indexed_files,
    only_an_adapter,
    require_extra,
    shards_by_name,
)

# tags in the names of GGUF files, in the order of preference, before and after safetensors
BEFORE_SAFETENSORS, AFTER_SAFETENSORS = ("bf16", "f16|fp16"), ("f32|fp32", "q8_0")
# files of a checkpoint that the converter reads besides the weights; no .py, because no code of the repository is run
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
N_TRIES = 5
PAUSE = 1.0  # seconds between two tries
PIECE = 8 * MIB
Result = TypeVar("Result")
TOKENS = "token with HF_TOKEN or --hf-token"


@dataclass(frozen=True)
class Repo:
    """A repository of the hub. unreachable: why the hub could not be asked and the cached copy is used; empty if it was asked."""

    name: str
    revision: str | None
    token: str | None
    unreachable: str = ""

    def error(self, problem: str) -> UserError:
        """Return an error whose sentence begins with the repository."""
        return UserError(f"{self.unreachable}, and its copy in the cache {problem}" if self.unreachable else f"--hf-repo: {self.name} {problem}")

    @property
    def missing_files_hint(self) -> str:
        """The way out if files are missing."""
        return "download it while there is a connection" if self.unreachable else "choose another --revision"


def fetch_model(repo: Repo, file: str | None, allow_requantize: bool, console: Console) -> Path:
    """Download a model and return its GGUF file, or its checkpoint's directory, in the client's cache.

    Without `file` the order of preference is BF16 GGUF, F16 GGUF, safetensors, F32 GGUF, Q8_0 GGUF. UserError if there is none or more
    than one of a kind, or if the hub refuses.
    """
    require_extra(("huggingface_hub",), "--hf-repo")
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # hides the client's messages about its own retries
    if console.quiet or not console.is_terminal:
        disable_progress_bars()
    cache = _look_up(repo, console.note)
    names = choose_gguf(cache.repo, list(cache.files), file)
    if names:
        return cache.download(names)[0]
    require_extra(NEEDED, f"--hf-repo: {repo.name} has safetensors: converting them")
    check_bits(cache.download([CONFIG])[0], f"--hf-repo: {repo.name}", allow_requantize)
    return cache.download(checkpoint_files(cache))[0].parent


def choose_gguf(repo: Repo, files: list[str], requested: str | None) -> list[str]:
    """Return the names of the parts of the GGUF model to download; none for the safetensors. requested: --hf-file."""
    ggufs = [f for f in files if f.endswith(".gguf") and not re.search("(?i)mmproj|imatrix", f)]
    if requested is not None:
        if requested not in files:
            raise repo.error(f"has no file {requested}: --hf-file must be {_list_some(ggufs) or 'left out, it has no GGUF files'}")
        if not requested.endswith(".gguf"):
            raise repo.error(f"has {requested}, which is not a GGUF file: drop --hf-file to take the complete checkpoint")
        return _require_parts(repo, files, requested)
    firsts = [f for f in ggufs if _parts(f)[0] == f]

    def find_kind(kinds: tuple[str, ...]) -> list[str]:
        for kind in kinds:
            matches = [f for f in firsts if re.search(rf"(?i)(?:^|[-._/])(?:{kind})(?=[-._/])", f)]
            if len(matches) > 1:
                in_kind = f"{len(matches)} GGUF files in {kind.partition('|')[0].upper()}"
                raise repo.error(f"has {in_kind}: choose with --hf-file from {_list_some(matches)}")
            if matches:
                return _require_parts(repo, files, matches[0])
        return []

    if parts := find_kind(BEFORE_SAFETENSORS):
        return parts
    if CONFIG in files and any(_weight_files(files, f) for f in FORMATS):
        return []
    if parts := find_kind(AFTER_SAFETENSORS):
        return parts
    if ADAPTER in files and not ggufs:
        raise repo.error(only_an_adapter("its base model"))
    others = f"; choose one of its GGUF files with --hf-file: {_list_some(ggufs)}" if ggufs else ""
    raise repo.error(f"has neither a GGUF file in BF16, F16, F32 or Q8_0 nor a {CONFIG} with safetensors{others}")


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def _parts(file: str) -> list[str]:
    directory, slash, name = file.rpartition("/")
    return [f"{directory}{slash}{part}" for part in part_names(name)]


def _require_parts(repo: Repo, files: list[str], file: str) -> list[str]:
    """Return all parts of a GGUF model. UserError if one is missing."""
    parts = _parts(file)
    if missing := [p for p in parts if p not in files]:
        raise repo.error(f"lacks {_list_some(missing)}, of the {len(parts)} parts of {file}: {repo.missing_files_hint}, or name another --hf-file")
    return parts


def _weight_files(files: list[str], weight_format: tuple[str, str]) -> list[str]:
    """Return the files with weights in one of FORMATS, whose names have its prefix and suffix."""
    prefix, suffix = weight_format
    return [f for f in files if "/" not in f and f.startswith(prefix) and f.endswith(suffix)]


def checkpoint_files(cache: _Cache) -> list[str]:
    """Return the names of a checkpoint's files, config.json first. UserError if a shard is missing."""
    files = list(cache.files)
    weight_format = next(f for f in FORMATS if _weight_files(files, f))
    index = index_name(weight_format)
    names = indexed_files(cache.download([index])[0]) if index in files else shards_by_name(_weight_files(files, weight_format))
    if missing := [n for n in names if n not in files]:
        raise cache.repo.error(f"lacks {_list_some(missing)}, of {len(names)} files with weights: {cache.repo.missing_files_hint}")
    others = [f for f in files if "/" not in f and (f.endswith(COMPANIONS) or f == "LICENSE")]
    return [CONFIG, *(f for f in others if f != CONFIG), *names]


def _look_up(repo: Repo, log: Callable[[str], None]) -> _Cache:
    """List the files of a repository: on the hub or, if that is unreachable, in the cache. UserError if there are none."""
    from huggingface_hub import HfApi

    try:
        with explain_errors(repo):
            info = HfApi().model_info(repo.name, revision=repo.revision, files_metadata=True, token=repo.token)
        return _Cache(repo, info.sha or "", {f.rfilename: f for f in info.siblings or ()}, log)
    except Unreachable as e:
        directory = _cached_dir(repo, e)
        log(f"{str(e).removeprefix('--hf-repo: ')}: its copy in the cache is used, commit {directory.name[:12]}")
        files = [p.relative_to(directory).as_posix() for p in sorted(directory.rglob("*")) if p.is_file()]
        return _Cache(replace(repo, unreachable=str(e)), directory.name, dict.fromkeys(files), log)


def _cached_dir(repo: Repo, reason: Unreachable) -> Path:
    """Return the cache's directory for the revision. UserError if it has none."""
    from huggingface_hub import constants, errors, snapshot_download

    try:  # newer clients refuse a directory that lacks files of the patterns
        return Path(snapshot_download(repo.name, revision=repo.revision, local_files_only=True, allow_patterns=[]))
    except errors.LocalEntryNotFoundError as e:
        copy = f"{constants.HF_HUB_CACHE} has no copy of {'it' if repo.revision is None else f'revision {repo.revision}'}"
        raise UserError(f"{reason}, and {copy}: {reason.hint}, or pass a GGUF file or the directory of a checkpoint as IN") from e


class _Cache:
    """The files of one commit, which are downloaded into the client's cache. files: by name the hub's description (RepoSibling), None
    if the hub was not asked."""

    def __init__(self, repo: Repo, commit: str, files: dict[str, Any], log: Callable[[str], None]):
        self.repo, self.commit, self.files, self.log = repo, commit, files, log

    def download(self, names: list[str]) -> list[Path]:
        """Return the paths of files, after downloading and checking those that are missing."""
        import huggingface_hub as hub

        cached = {name: hub.try_to_load_from_cache(self.repo.name, name, revision=self.commit) for name in names}
        paths = {name: Path(path) for name, path in cached.items() if isinstance(path, str)}
        if missing := [name for name in names if name not in paths]:
            self._announce(missing)
        for name in missing:
            paths[name] = self._download(name)
            self._check(name, paths[name])
        self._write_ref()
        return [paths[name] for name in names]

    def _announce(self, names: list[str]) -> None:
        """Log the size of a download. UserError if there is no space."""
        from huggingface_hub.constants import HF_HUB_CACHE

        size = max(sum(self.files[n].size or 0 for n in names) - self._partial_bytes(), 0)
        directory = next(p for p in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).absolute().parents) if p.exists())
        check_free_space(directory, size, f"--hf-repo: {self.repo.name}", f" in {HF_HUB_CACHE}", "point HF_HUB_CACHE to another disk")
        self.log(f"{self.repo.name}: downloading {len(names)} files, {size / MIB:,.0f} MiB, into {HF_HUB_CACHE}")

    @property
    def _dir(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name

        return Path(HF_HUB_CACHE, repo_folder_name(repo_id=self.repo.name, repo_type="model"))

    def _partial_bytes(self) -> int:
        """Return the bytes of partial files that the next run resumes: not those of clients from 1.18 on, whose stems contain a dot."""
        return sum(p.stat().st_size for p in (self._dir / "blobs").glob("*.incomplete") if "." not in p.stem)

    def _write_ref(self) -> None:
        """Record the revision's commit for offline runs; the client does so only for downloads by revision."""
        revision = self.repo.revision or "main"
        if revision == self.commit or self.repo.unreachable:
            return
        with contextlib.suppress(OSError):  # a shared cache may be read-only
            ref = self._dir / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)

    def _download(self, name: str) -> Path:
        """Download a file and return its path. A broken connection is retried, and the client resumes the download."""
        import huggingface_hub as hub

        def download() -> Path:
            with explain_errors(self.repo):
                return Path(hub.hf_hub_download(self.repo.name, name, revision=self.commit, token=self.repo.token))

        def describe_resume() -> str:
            return "the download resumes" if self._partial_bytes() else "complete files are kept"

        return retry(download, name, f"to get the rest of {name}", describe_resume, self.log)

    def _check(self, name: str, path: Path) -> None:
        """Check a file against the hub's list. UserError if it differs, after removing it."""
        file = self.files[name]
        if file.lfs is not None:
            expected, digest = file.lfs.sha256, hashlib.sha256()
        elif file.blob_id is not None:  # git's hash
            expected, digest = file.blob_id, hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        else:
            return
        with open(path, "rb") as f:
            while piece := f.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != expected:
            with contextlib.suppress(OSError):
                Path(os.path.realpath(path)).unlink()
            raise self.repo.error(
                f"sent a damaged {name}: its checksum is {digest.hexdigest()}, must be {expected}; the file was removed, run "
                "the command again to download it"
            )


class Unreachable(UserError):
    """The hub was not asked, because HF_HUB_OFFLINE is set, or it does not answer."""

    hint = "unset HF_HUB_OFFLINE"


class ConnectionBroken(Unreachable):
    """The connection broke; a retry may help."""

    hint = "check the network, and HTTPS_PROXY where it needs a proxy"


def retry(act: Callable[[], Result], name: str, purpose: str, describe_resume: Callable[[], str], log: Callable[[str], None]) -> Result:
    """Call act(), up to N_TRIES times if the connection breaks.

    Args:
        act: the transfer.
        name: what it transfers.
        purpose: what a retry is for, in the log.
        describe_resume: returns what running the command again does.
        log: logs a line.

    Raises:
        UserError: the connection broke N_TRIES times.
    """
    for i in range(N_TRIES):
        try:
            return act()
        except ConnectionBroken as e:
            error = e
            if i + 1 < N_TRIES:
                log(f"{e}: trying again {purpose}")
                time.sleep(PAUSE)
    raise UserError(f"{error}, {N_TRIES} times for {name}: run the command again; {describe_resume()}") from error


@contextlib.contextmanager
def explain_errors(repo: Repo) -> Iterator[None]:
    """Convert the client's errors into a UserError with a way out."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as e:
        token = repo.token or os.environ.get("HF_TOKEN")
        how = "with the account of this token" if token else f"and pass a {TOKENS}"
        raise repo.error(f"is gated: accept its conditions on its page, {how}") from e
    except errors.RepositoryNotFoundError as e:
        raise repo.error(f"does not exist at {constants.ENDPOINT}, or is private: check the name, or pass a {TOKENS}") from e
    except errors.RevisionNotFoundError as e:
        raise repo.error(f"has no revision {repo.revision}: --revision must be a branch, a tag or a commit of it") from e
    except errors.OfflineModeIsEnabled as e:
        raise Unreachable(f"--hf-repo: {repo.name}: HF_HUB_OFFLINE is set") from e
    except errors.HFValidationError as e:
        raise UserError(f"--hf-repo: got {repo.name!r}, must be ORG/NAME as in the address of its page") from e
    except errors.HfHubHTTPError as e:
        if problem := describe_break(e):
            raise ConnectionBroken(f"--hf-repo: {repo.name}: {problem}") from e
        status = status_of(e)
        if status == 401:
            raise repo.error(f"cannot be read, {constants.ENDPOINT} refuses the token: pass a valid {TOKENS}") from e
        if status == 416:
            where = f"its *.incomplete files in {constants.HF_HUB_CACHE}"
            raise repo.error(f"has a file that is shorter than its partial download: remove {where}") from e
        raise repo.error(f"cannot be read: {first_line(e)}") from e
    except Exception as e:
        if problem := describe_write_error(e):
            raise UserError(f"--hf-repo: cannot write to {constants.HF_HUB_CACHE}: {problem}; point HF_HUB_CACHE to another directory") from e
        if problem := describe_break(e):
            raise ConnectionBroken(f"--hf-repo: {repo.name}: {problem}") from e
        raise repo.error(f"cannot be downloaded: {first_line(e)}") from e


def status_of(e: Exception) -> int | None:
    """Return the HTTP status of the hub's answer, if there was one."""
    return getattr(getattr(e, "response", None), "status_code", None)


def describe_break(e: Exception) -> str:
    """Describe an error of the connection or the server, after which a retry may help; empty for other errors."""
    from huggingface_hub import constants

    status = status_of(e)
    if status is not None:
        return f"{constants.ENDPOINT} answered {status}" if status >= 500 or status in (408, 429) else ""
    if type(e) in (ConnectionError, RuntimeError):  # from hf_xet, after its own retries
        return f"hf_xet: {first_line(e)} (set HF_HUB_DISABLE_XET=1 to download without hf_xet)"
    return f"the connection to {constants.ENDPOINT} failed ({cause(e)})" if is_connection_error(e) else ""


def cause(e: BaseException) -> str:
    """Return why a connection failed: the innermost system error that the client's exceptions wrap, else the innermost exception."""
    chain = [e]
    for error in chain:
        inner = (error.__cause__, getattr(error, "reason", None), *error.args)
        chain += [x for x in inner if isinstance(x, BaseException) and x not in chain]
    messages = [x.strerror for x in chain if isinstance(x, OSError) and x.strerror]
    return messages[-1] if messages else first_line(chain[-1])


def describe_write_error(e: Exception) -> str:
    """Return the system's message if a file could not be written; empty for other errors.

    hf_xet raises exceptions of its own, which have the message only in their text; of these, only full disks are recognized.
    """
    for text in map(os.strerror, NO_SPACE):
        if text in str(e):
            return text
    return (e.strerror or "") if isinstance(e, OSError) and not is_connection_error(e) else ""


def is_connection_error(e: BaseException | None) -> bool:
    """Whether an error, or one of its causes, comes from the connection. The client's HTTP library is requests or httpx."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return e is not None and (
        isinstance(e, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
        or type(e).__module__.startswith(("requests", "urllib3", "httpx", "httpcore"))  # httpx2 too
        or "Consistency check failed" in str(e)
        or is_connection_error(e.__cause__)
    )


def first_line(e: BaseException) -> str:
    return textwrap.shorten((str(e).strip().splitlines() or [type(e).__name__])[0], 300, placeholder=" ...")
