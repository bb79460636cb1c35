"""Models of the Hugging Face hub, through its own client: its cache, tokens, resumed downloads and progress bars."""

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
from typing import TypeVar

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import NO_SPACE, free_space
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

# Kinds of GGUF files by the tag in their name, and where safetensors stand among them.
BEFORE_SAFETENSORS, AFTER_SAFETENSORS = ("bf16", "f16|fp16"), ("f32|fp32", "q8_0")
# Of a checkpoint: what the converter reads beside the weights. No .py: nothing of the repository is run.
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
N_TRIES = 5
PAUSE = 1.0  # seconds before the next one
PIECE = 8 * MIB
Done = TypeVar("Done")
TOKENS = "a token with HF_TOKEN or --hf-token"


@dataclass(frozen=True)
class Repo:
    """unreachable: why its copy in the cache is read, as an error says it; nothing where the hub was asked."""

    name: str
    revision: str | None
    token: str | None
    unreachable: str = ""

    def error(self, what: str) -> UserError:
        return UserError(f"{self.unreachable}, and its copy in the cache {what}" if self.unreachable else f"--hf-repo: {self.name} {what}")

    @property
    def way_to_whole(self) -> str:
        """What helps where files are missing."""
        return "download it while there is a connection" if self.unreachable else "choose another --revision"


def fetch_model(repo: Repo, file: str | None, allow_requantize: bool, console: Console) -> Path:
    """The GGUF file `file`, or the one that the rule below picks, or the folder of the checkpoint: in the client's cache.

    The rule: a BF16 GGUF file, else an F16 one, else the safetensors, else an F32 or Q8_0 GGUF file. UserError if there is none
    or more than one of a kind, and for what the hub refuses.
    """
    require_extra(("huggingface_hub",), "--hf-repo")
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # retries are its own affair
    if console.quiet or not console.is_terminal:
        disable_progress_bars()
    cache = _look_up(repo, console.note)
    names = choose_gguf(cache.repo, list(cache.files), file)
    if names:
        return cache.download(names)[0]
    require_extra(NEEDED, f"--hf-repo: {repo.name} has safetensors: converting them")
    check_bits(cache.download([CONFIG])[0], f"--hf-repo: {repo.name}", allow_requantize)
    return cache.download(checkpoint_files(cache))[0].parent


def choose_gguf(repo: Repo, files: list[str], wanted: str | None) -> list[str]:
    """Names of the parts of the GGUF model to take, nothing where it is the safetensors."""
    ggufs = [f for f in files if f.endswith(".gguf") and not re.search("(?i)mmproj|imatrix", f)]
    if wanted is not None:
        if wanted not in files:
            raise repo.error(f"has no file {wanted}: --hf-file must be {_some(ggufs) or 'left out, it has no GGUF files'}")
        if not wanted.endswith(".gguf"):
            raise repo.error(f"has {wanted}, which is no GGUF file: leave --hf-file out to take the whole checkpoint")
        return _with_parts(repo, files, wanted)
    firsts = [f for f in ggufs if _parts(f)[0] == f]

    def of_kinds(kinds: tuple[str, ...]) -> list[str]:
        for kind in kinds:
            found = [f for f in firsts if re.search(rf"(?i)(?:^|[-._/])(?:{kind})(?=[-._/])", f)]
            if len(found) > 1:
                in_kind = f"{len(found)} GGUF files in {kind.partition('|')[0].upper()}"
                raise repo.error(f"has {in_kind}: choose with --hf-file from {_some(found)}")
            if found:
                return _with_parts(repo, files, found[0])
        return []

    if found := of_kinds(BEFORE_SAFETENSORS):
        return found
    if CONFIG in files and any(_weights(files, weights) for weights in FORMATS):
        return []
    if found := of_kinds(AFTER_SAFETENSORS):
        return found
    if ADAPTER in files and not ggufs:
        raise repo.error(only_an_adapter("the model that it was made for"))
    others = f"; of its GGUF files, {_some(ggufs)}, one can be named with --hf-file" if ggufs else ""
    raise repo.error(f"has neither a GGUF file in BF16, F16, F32 or Q8_0 nor a {CONFIG} with safetensors{others}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def _parts(file: str) -> list[str]:
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(name)]


def _with_parts(repo: Repo, files: list[str], file: str) -> list[str]:
    parts = _parts(file)
    if missing := [p for p in parts if p not in files]:
        raise repo.error(f"lacks {_some(missing)}, of the {len(parts)} parts of {file}: {repo.way_to_whole}, or name another --hf-file")
    return parts


def _weights(files: list[str], weights: tuple[str, str]) -> list[str]:
    """The files with weights, of which an index says more."""
    return [f for f in files if "/" not in f and f.startswith(weights[0]) and f.endswith(weights[1])]


def checkpoint_files(cache: _Cache) -> list[str]:
    """Names of all files of the checkpoint, config.json first. UserError if a shard is missing."""
    files = list(cache.files)
    weights = next(w for w in FORMATS if _weights(files, w))
    index = index_name(weights)
    names = indexed_files(cache.download([index])[0]) if index in files else shards_by_name(_weights(files, weights))
    if missing := [n for n in names if n not in files]:
        raise cache.repo.error(f"lacks {_some(missing)}, of {len(names)} files with weights: {cache.repo.way_to_whole}")
    others = [f for f in files if "/" not in f and (f.endswith(COMPANIONS) or f == "LICENSE")]
    return [CONFIG, *(f for f in others if f != CONFIG), *names]


def _look_up(repo: Repo, say: Callable[[str], None]) -> _Cache:
    """What the hub has, or where it cannot be asked, what the cache has of it. UserError if that is nothing."""
    from huggingface_hub import HfApi

    try:
        with explain_errors(repo):
            info = HfApi().model_info(repo.name, revision=repo.revision, files_metadata=True, token=repo.token)
        return _Cache(repo, info.sha, {f.rfilename: f for f in info.siblings}, say)
    except Unreachable as e:
        folder = _cached_folder(repo, e)
        say(f"{str(e).removeprefix('--hf-repo: ')}: its copy in the cache is used, commit {folder.name[:12]}")
        files = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
        return _Cache(replace(repo, unreachable=str(e)), folder.name, dict.fromkeys(files), say)


def _cached_folder(repo: Repo, why: Unreachable) -> Path:
    """Of the files that the cache has of the revision. UserError if it has none."""
    from huggingface_hub import constants, errors, snapshot_download

    try:  # newer clients refuse a folder without all files that the patterns name
        return Path(snapshot_download(repo.name, revision=repo.revision, local_files_only=True, allow_patterns=[]))
    except errors.LocalEntryNotFoundError as e:
        what = f"{constants.HF_HUB_CACHE} has no copy of {'it' if repo.revision is None else f'revision {repo.revision}'}"
        raise UserError(f"{why}, and {what}: {why.way_out}, or pass a GGUF file or the folder of a checkpoint as IN") from e


class _Cache:
    """The files of one commit of a repository, in the client's cache once they are downloaded. files: by name what the hub says of
    them, None of a copy in the cache."""

    def __init__(self, repo: Repo, commit: str, files: dict, say: Callable[[str], None]):
        self.repo, self.commit, self.files, self.say = repo, commit, files, say

    def download(self, names: list[str]) -> list[Path]:
        """Their paths, in that order; what is not there yet is downloaded, resumed and checked."""
        import huggingface_hub as hub

        def cached(name: str):
            return hub.try_to_load_from_cache(self.repo.name, name, revision=self.commit)

        if missing := [n for n in names if not isinstance(cached(n), str)]:
            self._announce(missing)
        for name in missing:
            path = self._download(name)
            self._check(name, path)
        self._keep_commit()
        return [Path(cached(n)) for n in names]

    def _announce(self, names: list[str]) -> None:
        from huggingface_hub.constants import HF_HUB_CACHE

        size = max(sum(self.files[n].size or 0 for n in names) - self._begun(), 0)
        folder = next(p for p in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).absolute().parents) if p.exists())
        free = free_space(folder)
        if free < size:
            raise self.repo.error(
                f"needs {size / MIB:,.0f} MiB in {HF_HUB_CACHE}, which has {free / MIB:,.0f} MiB free: free some space, or point "
                "HF_HUB_CACHE to another disk"
            )
        self.say(f"{self.repo.name}: downloading {len(names)} files, {size / MIB:,.0f} MiB, into {HF_HUB_CACHE}")

    @property
    def _folder(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name

        return Path(HF_HUB_CACHE, repo_folder_name(repo_id=self.repo.name, repo_type="model"))

    def _begun(self) -> int:
        """Bytes of unfinished files that the next run goes on with. Newer clients' files are of one run, with a dot in their stem."""
        return sum(p.stat().st_size for p in (self._folder / "blobs").glob("*.incomplete") if "." not in p.stem)

    def _keep_commit(self) -> None:
        """Which one the revision is, for runs without a connection: the client keeps it of what it downloads by a revision alone."""
        revision = self.repo.revision or "main"
        if revision == self.commit or self.repo.unreachable:
            return
        with contextlib.suppress(OSError):  # a cache that others fill may be read-only
            ref = self._folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)

    def _download(self, name: str) -> Path:
        """Its path; a connection that breaks is tried again, and the client goes on where it broke."""
        import huggingface_hub as hub

        def download() -> Path:
            with explain_errors(self.repo):
                return Path(hub.hf_hub_download(self.repo.name, name, revision=self.commit, token=self.repo.token))

        def then() -> str:
            return "it goes on where it was" if self._begun() else "it keeps the files that are whole"

        return retry(download, name, f"to get the rest of {name}", then, self.say)

    def _check(self, name: str, path: Path) -> None:
        """UserError, and the file is removed, if it is not the one that the hub's list describes."""
        file = self.files[name]
        if file.lfs is not None:
            expected, digest = file.lfs.sha256, hashlib.sha256()
        elif file.blob_id is not None:  # as git names it
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
                f"sent a damaged {name}: its checksum is {digest.hexdigest()}, must be {expected}; it was removed, run it again "
                "to download it"
            )


class Unreachable(UserError):
    """The hub cannot be asked."""

    way_out = "unset it"  # of HF_HUB_OFFLINE


class ConnectionBroken(Unreachable):
    """Another try may help."""

    way_out = "check the network, and HTTPS_PROXY where it needs a proxy"


def retry(act: Callable[[], Done], what: str, purpose: str, then: Callable[[], str], say: Callable[[str], None]) -> Done:
    """act(), tried again where a connection breaks. UserError after N_TRIES. purpose: of another try; then: what running it again
    does."""
    for left in reversed(range(N_TRIES)):
        try:
            return act()
        except ConnectionBroken as e:
            if not left:
                raise UserError(f"{e}, {N_TRIES} times for {what}: run it again, {then()}") from e
            say(f"{e}: trying again {purpose}")
            time.sleep(PAUSE)


@contextlib.contextmanager
def explain_errors(repo: Repo) -> Iterator[None]:
    """Within it the client's errors become a UserError that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as e:
        given = repo.token or os.environ.get("HF_TOKEN")
        how = "with the account of this token" if given else f"and pass {TOKENS}"
        raise repo.error(f"is gated: accept its conditions on its page, {how}") from e
    except errors.RepositoryNotFoundError as e:
        raise repo.error(f"does not exist at {constants.ENDPOINT}, or is private: check the name, or pass {TOKENS}") from e
    except errors.RevisionNotFoundError as e:
        raise repo.error(f"has no revision {repo.revision}: --revision must be a branch, a tag or a commit of it") from e
    except errors.OfflineModeIsEnabled as e:
        raise Unreachable(f"--hf-repo: {repo.name}: HF_HUB_OFFLINE is set") from e
    except errors.HFValidationError as e:
        raise UserError(f"--hf-repo: got {repo.name!r}, must be ORG/NAME as in the address of its page") from e
    except errors.HfHubHTTPError as e:
        if why := describe_break(e):
            raise ConnectionBroken(f"--hf-repo: {repo.name}: {why}") from e
        status = status_of(e)
        if status == 401:
            raise repo.error(f"cannot be read, {constants.ENDPOINT} refuses the token: pass {TOKENS} that is valid") from e
        if status == 416:
            where = f"its *.incomplete files in {constants.HF_HUB_CACHE}"
            raise repo.error(f"has a file that is shorter than what was downloaded of it: remove {where}") from e
        raise repo.error(f"cannot be read: {first_line(e)}") from e
    except Exception as e:
        if why := describe_write_error(e):
            raise UserError(f"--hf-repo: cannot write to {constants.HF_HUB_CACHE}: {why}; point HF_HUB_CACHE to another folder") from e
        if why := describe_break(e):
            raise ConnectionBroken(f"--hf-repo: {repo.name}: {why}") from e
        raise repo.error(f"cannot be downloaded: {first_line(e)}") from e


def status_of(e: Exception) -> int | None:
    """Of an error that the hub answered with."""
    return getattr(getattr(e, "response", None), "status_code", None)


def describe_break(e: Exception) -> str:
    """What broke where another try may help, else nothing."""
    from huggingface_hub import constants

    status = status_of(e)
    if status is not None:
        return f"{constants.ENDPOINT} answered {status}" if status >= 500 or status in (408, 429) else ""
    if type(e) in (ConnectionError, RuntimeError):  # of the client's library for the xet protocol, which has tried for some minutes
        return f"hf_xet: {first_line(e)} (with HF_HUB_DISABLE_XET=1 set it is done without hf_xet)"
    return f"the connection to {constants.ENDPOINT} failed ({cause(e)})" if is_connection_error(e) else ""


def cause(e: BaseException) -> str:
    """Why a connection failed, in the system's words where it said some: what the client raises wraps that, some layers deep."""
    chain = [e]
    for found in chain:
        inner = (found.__cause__, getattr(found, "reason", None), *found.args)
        chain += [x for x in inner if isinstance(x, BaseException) and x not in chain]
    said = [x.strerror for x in chain if isinstance(x, OSError) and x.strerror]
    return said[-1] if said else first_line(chain[-1])


def describe_write_error(e: Exception) -> str:
    """What the system said to a file that could not be written, else nothing. hf_xet passes it on in its text alone."""
    for text in map(os.strerror, NO_SPACE):
        if text in str(e):
            return text
    return e.strerror or "" if isinstance(e, OSError) and not is_connection_error(e) else ""


def is_connection_error(e: BaseException | None) -> bool:
    """True for errors of the client's HTTP library (requests or httpx, by its version), and for what was raised from one."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return e is not None and (
        isinstance(e, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
        or type(e).__module__.startswith(("requests", "urllib3", "httpx", "httpcore"))  # httpx2 too
        or "Consistency check failed" in str(e)
        or is_connection_error(e.__cause__)
    )


def first_line(e: BaseException) -> str:
    return textwrap.shorten((str(e).strip().splitlines() or [type(e).__name__])[0], 300, placeholder=" ...")
