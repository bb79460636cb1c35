"""Upload a finished file and its model card to the Hugging Face hub, with the hub's own client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.option import option
from .._evaluation.figures import KLD, PPL, SAME_TOP
from .._formats.quality import read_quality
from .._formats.split import open_model
from .._report.recorded_quality import QUALITY_TITLE, recorded_section
from .._source.checkpoint import require_extra
from .._source.hub import ConnectionBroken, describe_break, first_line, retry, status_of

CARD = "README.md"
TOKENS = "a token with write access with HF_TOKEN or --hf-token"


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """Options of `ggml-ext upload`, except those of the terminal."""

    file: Path = option(is_positional=True, metavar="FILE", help="GGUF model, of a split one any part")
    repo: str = option(is_positional=True, metavar="ORG/NAME", help="repository on the hub")
    model_card: Path | None = option(None, metavar="FILE", help="model card to upload as README.md; quantize --model-card writes one")
    quality: Path | None = option(None, metavar="FILE", help="output of evaluate --json, for a table in the model card")
    private: bool = option(False, help="create a private repository")
    revision: str | None = option(None, metavar="NAME", help="branch to upload to (default: main)")
    hf_token: str | None = option(None, metavar="TOKEN", help="access token that may write (default: HF_TOKEN, or the client's login)")


class Destination:
    """A repository on the hub. Raises UserError if the client is not installed."""

    def __init__(self, repo: str, token: str | None, private: bool, revision: str | None, console: Console):
        require_extra(("huggingface_hub",), "uploading", "upload")
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, logging

        logging.set_verbosity_error()  # the client would report each retry
        if console.quiet or not console.is_terminal:
            disable_progress_bars()
        self.repo, self._private, self._revision, self._console, self._api = repo, private, revision, console, HfApi(token=token)

    def prepare(self) -> None:
        """Create a missing repository. Raise UserError if the token may not write, before hours of work."""
        self._retry("the repository", lambda: self._api.create_repo(self.repo, private=self._private or None, exist_ok=True))

    def upload(self, paths: list[Path], card: str | None) -> str:
        """Upload files and return their address. Files that are complete on the hub are not sent again.

        paths: all parts of a split file; card: None keeps the card on the hub.
        """
        for path in paths:
            self._console.note(f"uploading {path.name} to {self.repo}")
            self._send(path.name, path)
        if card is not None:
            self._send(CARD, card.encode())
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}"

    def _send(self, name: str, content: Path | bytes) -> None:
        def send() -> None:
            self._api.upload_file(
                path_or_fileobj=content, path_in_repo=name, repo_id=self.repo, revision=self._revision, commit_message=f"Upload {name} with ggml-ext"
            )

        self._retry(name, send)

    def _retry(self, name: str, act: Callable[[], object]) -> None:
        """Retry after a broken connection."""

        def attempt() -> None:
            with explain_errors(self.repo):
                act()

        retry(attempt, name, f"for {name}", lambda: "files that are complete on the hub are not sent again", self._console.note)


@contextlib.contextmanager
def explain_errors(repo: str) -> Iterator[None]:
    """Convert the client's errors to UserError with a way out."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.HFValidationError as e:
        raise UserError(f"ORG/NAME: got {repo!r}, must be the name of a repository on the hub") from e
    except errors.OfflineModeIsEnabled as e:
        raise UserError(f"{repo}: HF_HUB_OFFLINE is set: unset it to write to the hub") from e
    except errors.LocalTokenNotFoundError as e:
        raise UserError(f"{repo}: writing to the hub needs a token: pass {TOKENS}") from e
    except errors.RevisionNotFoundError as e:
        raise UserError(f"{repo} has no such branch: create it on its page, or drop --revision") from e
    except errors.HfHubHTTPError as e:
        if reason := describe_break(e):
            raise ConnectionBroken(f"{repo}: {reason}") from e
        if (status := status_of(e)) in (401, 403, 404):  # the hub answers 404 for repositories that the token may not see
            raise UserError(f"{repo}: {constants.ENDPOINT} refuses to write there ({status}): pass {TOKENS}") from e
        raise UserError(f"{repo}: cannot be written: {first_line(e)}") from e
    except Exception as e:
        if reason := describe_break(e):
            raise ConnectionBroken(f"{repo}: {reason}") from e
        raise UserError(f"{repo}: cannot be written: {first_line(e)}") from e


def upload(options: UploadOptions, console: Console) -> str:
    """Upload a model and return its address. Raise UserError with a way out."""
    paths = [part.path for part in open_model(options.file).parts]
    card = read_card(options)
    destination = Destination(options.repo, options.hf_token, options.private, options.revision, console)
    destination.prepare()
    if card is None:
        console.note("uploading without a model card: write one with quantize --model-card README.md, and pass it with upload --model-card README.md")
    return destination.upload(paths, card)


def read_card(options: UploadOptions) -> str | None:
    """Read the card and add the table of --quality, or the figures that the file records unless the card has some.

    UserError for files that cannot be read.
    """
    if options.model_card is None:
        if options.quality is not None:
            raise UserError("--quality adds a table to the model card: pass --model-card too")
        return None
    try:
        card = options.model_card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--model-card: cannot read {options.model_card}: {getattr(e, 'strerror', None) or e}") from e
    if options.quality is not None:
        section = quality_section(options.quality)
    elif QUALITY_TITLE not in card and (recorded := read_quality(open_model(options.file))[0]):
        section = "\n".join(recorded_section(recorded))
    else:
        return card
    return f"{card.rstrip()}\n\n{section}\n"


def quality_section(path: Path) -> str:
    """Format the output of `ggml-ext evaluate --json` as Markdown. Raise UserError for another file."""
    try:
        quality = json.loads(path.read_text(encoding="utf-8"))
        rows = [*([quality["base"]] if quality["base"] else []), *quality["models"]]
        lines = ["| model | bits per weight | perplexity | KL divergence | top-1 agreement, % |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            figures = [_format_figure(row["statistics"].get(name), digits) for name, digits in ((PPL, 3), (KLD, 5), (SAME_TOP, 2))]
            lines.append(f"| {row['label']} | {row['bpw']:.2f} | {' | '.join(figures)} |")
        scored = f"{quality['chunks']} chunks of {quality['ctx_size']} tokens of {quality['text'].get('name', 'a text')}"
    except OSError as e:
        raise UserError(f"--quality: cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--quality: {path} is not the output of ggml-ext evaluate --json: run it again") from e
    if scored.endswith("built-in"):
        scored += " text of ggml-ext"
    return "\n".join([QUALITY_TITLE, "", *lines, "", f"Measured with `ggml-ext evaluate` on {scored}."])


def _format_figure(figure: list | None, digits: int) -> str:
    return "" if figure is None else f"{figure[0]:.{digits}f} ± {figure[1] or 0:.{digits}f}"
