"""How good files are: perplexity, KL divergence from the model they were made from, and tasks, by llama-perplexity."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import fingerprint, free_space, temporary_directory
from .._base.package import FOLDER
from .._base.text import format_duration
from .._base.threads import check_threads
from .._base.units import MIB
from .._evaluation.figures import BASE_PPL, PPL, TASKS, Figure, chunk_sums, compare_paired
from .._evaluation.labels import disk_bytes, label_models, model_bpw
from .._evaluation.logits import BaseLogits, LogitsRecord, record_path
from .._evaluation.perplexity import PerplexityRunner, require_finite
from .._formats.context import context_length, position_limit
from .._formats.gguf_file import GGUFFile, header_bytes
from .._formats.language_model import describe_other_model
from .._formats.split import open_model
from .._native.programs import device_options, require_tool
from .._native.text_file import check_text, count_tokens
from .._report import picture
from .._report.quality import Evaluation, Pair, Quality, draw_quality

TEXT = FOLDER / "data" / "evaluation.txt"
BUILT_IN = "built-in"
TEMPORARY = ".evaluation-"
TOKENS = "tokenizer.ggml.tokens"
MIN_SCORED = 100  # tokens: below, llama-perplexity gives no statistics


@dataclass(frozen=True)
class EvaluateOptions:
    """The flags of `ggml-ext evaluate` that are no matter of its terminal, by name; docs/reference/options.md says what each does."""

    models: Sequence[Path]
    against: Path | None = None
    file: Path | None = None
    ctx_size: int | None = None
    chunks: int | None = None
    batch_size: int | None = None
    threads: int | None = None
    n_gpu_layers: str | None = None
    device: str | None = None
    rpc: str | None = None
    base_logits: Path | None = None
    hellaswag: Path | None = None
    winogrande: Path | None = None
    multiple_choice: Path | None = None
    tasks: int | None = None
    picture: Path | None = None
    force: bool = False

    def task_files(self) -> dict[str, Path]:
        """By key of TASKS."""
        given = {kind: getattr(self, kind.replace("-", "_")) for kind in TASKS}
        return {kind: path for kind, path in given.items() if path is not None}

    def scores_text(self) -> bool:
        """False where nothing but tasks is asked for."""
        return not self.task_files() or any(given is not None for given in (self.against, self.file, self.base_logits))

    def check(self) -> int:
        """The number of threads; UserError for values that are wrong or do not go together."""
        n_threads = check_threads(self.threads)
        if not self.models:
            raise UserError("MODEL is missing: name a GGUF file")
        for flag, value, least in (
            ("--ctx-size", self.ctx_size, 16), ("--chunks", self.chunks, 2), ("--tasks", self.tasks, 1), ("--batch-size", self.batch_size, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{flag}: got {value}, must be at least {least}")
        if self.tasks is not None and not self.task_files():
            raise UserError(f"--tasks: is the number of questions of {', '.join('--' + kind for kind in TASKS)}: pass one of them")
        if self.base_logits is not None and self.against is None and (given := self.file or self.chunks or self.ctx_size):
            raise UserError(f"--base-logits without --against: text, chunks and context are those of the file; leave {given} out")
        if self.base_logits is not None and self.base_logits.exists() and not self.base_logits.is_file():
            raise UserError(f"--base-logits: {self.base_logits} is not a regular file: name one")
        for kind, path in self.task_files().items():
            if not path.is_file():
                raise UserError(f"--{kind}: {path}: no such file; docs/using/evaluate.md says where such files come from")
        if self.picture is not None:
            if not self.scores_text():
                raise UserError("--picture draws perplexity or KL divergence over size: leave it out, or pass --against or -f")
            read = {"--against": self.against, "--file": self.file, "--base-logits": self.base_logits}
            taken = {path: flag for flag, path in read.items() if path is not None} | {path: "MODEL" for path in self.models}
            picture.check_picture(self.picture, self.force, taken)
        return n_threads


@dataclass(frozen=True)
class Scored:
    """The text that is scored."""

    path: Path
    n_ctx: int
    n_chunks: int

    @property
    def name(self) -> str:
        return BUILT_IN if self.path == TEXT else str(self.path)

    def record(self) -> dict:
        return {"name": self.name, **fingerprint(self.path)}


def evaluate(asked: EvaluateOptions, console: Console) -> Evaluation:
    """Everything after the command line; UserError for what the user can change."""
    n_threads = asked.check()
    models = [open_model(path) for path in asked.models]
    base = None if asked.against is None else open_model(asked.against)
    files = [*([base] if base else []), *models]
    check_language_models(files)
    check_vocabularies(files)
    found = _Runs(asked, models, base, require_tool("llama-perplexity"), n_threads, console).all()
    if asked.picture is not None and not draw_quality(found, asked.picture, asked.force):
        console.note("--picture: the font has no characters for some names, and boxes in their place: name a .svg")
    return found


def check_language_models(files: Sequence[GGUFFile]) -> None:
    """UserError for a file that predicts no next token."""
    for file in files:
        if other := describe_other_model(file):
            raise UserError(
                f"{file.path} is not a language model but {other}, without the predictions of a next token that perplexity, KL divergence and "
                "tasks are computed from; ggml-ext inspect FILE --against ORIGINAL compares its weights"
            )


def check_vocabularies(files: Sequence[GGUFFile]) -> None:
    """UserError for a file without tokens, or that has other tokens than the first."""
    first, tokens = files[0], files[0].strings(TOKENS)
    for file in files:
        theirs = tokens if file is first else file.strings(TOKENS)
        if not theirs:
            raise UserError(f"{file.path} has no vocabulary: it is no language model, or a part of one; pass a whole model")
        if theirs != tokens:
            raise UserError(
                f"{file.path} has another vocabulary than {first.path} ({len(theirs):,} and {len(tokens):,} tokens): figures of two models "
                "compare only with the same tokens; evaluate it alone"
            )


def describe(file: GGUFFile, path: Path, label: str) -> Quality:
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        types[tensor.type.name.lower()] += tensor.n_bytes
    return Quality(path, label, disk_bytes(file), model_bpw(file), dict(types))


class _Runs:
    """All runs of llama-perplexity for one call."""

    def __init__(self, asked: EvaluateOptions, models: list[GGUFFile], base: GGUFFile | None, program: Path, n_threads: int, console: Console):
        self._asked, self._models, self._base, self._console = asked, models, base, console
        self._names = label_models([*([asked.against] if base else []), *asked.models])
        self._is_told = False
        self._all = [*models, *([base] if base else [])]
        n_ctx = self._context()
        self._check_positions(n_ctx)
        self._runner = PerplexityRunner(program, n_ctx, asked.batch_size or n_ctx, n_threads, device_options(asked.n_gpu_layers, asked.device, asked.rpc), console, self._estimated)

    def all(self) -> Evaluation:
        base_row, rows, sums, text, logits = None, [], {}, None, None
        asked = self._asked
        if self._base is not None:
            base_row = describe(self._base, asked.against, self._names[0])
        if asked.scores_text():
            text, logits = self._prepare()
        for file, path, label in zip(self._models, asked.models, self._names[-len(self._models):], strict=True):
            row = describe(file, path, label)
            if asked.scores_text():
                statistics, log = self._score(file, text, logits)
                sums[label] = chunk_sums(log)
                row = replace(row, statistics=statistics)
                if base_row is not None and BASE_PPL in statistics:
                    base_row = replace(base_row, statistics={PPL: statistics[BASE_PPL]})
            rows.append(replace(row, scores=self._tasks(file)))
            self._console.event("model", rows[-1].record())
        if base_row is not None:
            base_row = replace(base_row, scores=self._tasks(self._base))
        first = self._names[-len(self._models)]
        pairs = [Pair(label, first, found) for label in list(sums)[1:] if (found := compare_paired(sums[label], sums[first]))]
        scored = logits or text
        return Evaluation(
            {} if text is None else text.record(), scored.n_ctx if scored else 0, scored.n_chunks if scored else 0, base_row, rows, pairs
        )

    def _context(self) -> int:
        """Tokens of a chunk: no more than a model was trained with, or its perplexity says nothing."""
        if self._asked.ctx_size is not None:
            return self._asked.ctx_size
        if self._asked.base_logits is not None and self._base is None:
            return BaseLogits.read(self._asked.base_logits).n_ctx
        return min(map(context_length, self._all))

    def _check_positions(self, n_ctx: int) -> None:
        for file in self._all:
            if (n := position_limit(file)) is not None and n < n_ctx:
                flag, way_out = ("--ctx-size", "pass") if self._asked.ctx_size else ("--base-logits", "make the file again with")
                raise UserError(f"{flag}: got chunks of {n_ctx:,} tokens, {file.path} has positions for {n:,}: {way_out} --ctx-size {n}")

    def _prepare(self) -> tuple[Scored | None, BaseLogits | None]:
        """The text, and what the models are compared with."""
        asked = self._asked
        if asked.base_logits is not None and self._base is None:
            logits = BaseLogits.read(asked.base_logits)
            self._check_logits(logits)
            return None, logits
        text = self._text()
        if self._base is None:
            self._console.note(f"{text.n_chunks} chunks of {text.n_ctx} tokens of {self._title(text)}")
            return text, None
        n_scored = text.n_chunks * (text.n_ctx - 1 - text.n_ctx // 2)
        if 0 < n_scored < MIN_SCORED:
            raise UserError(
                f"{text.n_chunks} chunks of {text.n_ctx} tokens score {n_scored} tokens, a KL divergence needs {MIN_SCORED}: pass a larger "
                "--chunks or --ctx-size, or a longer text"
            )
        return text, self._base_logits(text)

    def _text(self) -> Scored:
        path, n_ctx = self._asked.file or TEXT, self._runner.n_ctx
        if self._asked.file is None and not TEXT.is_file():
            raise UserError("-f: the built-in text was not installed with this package: name a text")
        check_text(path, "-f")
        n_tokens = count_tokens(self._models[0].path, path, (self._asked.chunks or 1 << 20) * n_ctx)
        if n_tokens is None:
            return Scored(path, n_ctx, self._asked.chunks or -1)
        if n_tokens < 2 * n_ctx:
            raise UserError(
                f"-f: {path} has {n_tokens:,} tokens, two chunks of {n_ctx} need {2 * n_ctx:,}: pass a longer text, or a smaller --ctx-size"
            )
        return Scored(path, n_ctx, min(self._asked.chunks or n_tokens, n_tokens // n_ctx))

    def _title(self, text: Scored) -> str:
        return "the built-in text" if text.name == BUILT_IN else text.name

    def _base_logits(self, text: Scored) -> BaseLogits:
        """Those of an earlier run that serve, others made and kept."""
        base, given = self._base, self._asked.base_logits
        kept = Path(os.path.realpath(given or base.path.with_name(f"{base.stem}.logits.bin")))
        made_from = {
            "model": [fingerprint(part.path, header_bytes(part)) for part in base.parts], "text": fingerprint(text.path),
            "ctx_size": text.n_ctx, "chunks": text.n_chunks,
        }
        record = LogitsRecord.read(kept)
        if record and record.made_from == made_from:
            self._console.note(f"{kept} is of this model and text: used again")
            return BaseLogits.read(kept)
        if kept.exists() and record is None:
            raise UserError(
                f"{kept} exists and was not made by this program, or was changed: pass it as --base-logits without --against, or move it away"
            )
        n_vocab = len(base.strings(TOKENS))
        needed = BaseLogits(kept, text.n_ctx, n_vocab, text.n_chunks).n_bytes()
        self._console.note(
            f"{text.n_chunks} chunks of {text.n_ctx} tokens of {self._title(text)}; the logits of {base.path.name} take {needed / MIB:,.0f} MiB, kept in "
            f"{kept} for the next evaluation; --chunks makes it less"
        )
        try:
            return self._make_logits(text, kept, needed, made_from)
        except OSError as e:
            raise UserError(f"cannot write {kept}: {e.strerror}; name another file with --base-logits") from e

    def _make_logits(self, text: Scored, kept: Path, needed: int, made_from: dict) -> BaseLogits:
        """OSError where it cannot be written."""
        with temporary_directory(kept.parent, TEMPORARY, self._console.note) as folder:
            if (free := free_space(kept.parent)) < needed:
                raise UserError(
                    f"no space left on device: {kept} needs {needed / MIB:,.0f} MiB, {free / MIB:,.0f} MiB are free: free some space, name "
                    "another file with --base-logits, or pass a smaller --chunks"
                )
            made, described = folder / "logits.bin", folder / "logits.json"
            figure, _ = self._runner.save_logits(self._base.path, text.path, text.n_chunks, made)
            require_finite(self._base.path, {PPL: figure})
            described.write_text(LogitsRecord(made_from, fingerprint(made)).text())
            os.replace(described, record_path(kept))
            os.replace(made, kept)
        return BaseLogits.read(kept)

    def _check_logits(self, logits: BaseLogits) -> None:
        n_tokens = len(self._models[0].strings(TOKENS))
        if logits.n_vocab != n_tokens:
            raise UserError(
                f"--base-logits: {logits.path} has logits of {logits.n_vocab:,} tokens, {self._models[0].path} has {n_tokens:,}: they are of "
                "another model"
            )

    def _score(self, file: GGUFFile, text: Scored | None, logits: BaseLogits | None) -> tuple[Mapping[str, Figure], str]:
        if logits is not None:
            return self._runner.compare(file.path, logits)
        figure, log = self._runner.perplexity(file.path, text.path, text.n_chunks)
        return require_finite(file.path, {PPL: figure}), log

    def _tasks(self, file: GGUFFile) -> dict[str, Figure]:
        return {
            kind: self._runner.score(file.path, kind, path, self._asked.tasks) for kind, path in self._asked.task_files().items()
        }

    def _estimated(self, seconds: float) -> None:
        """Said once, for all runs: a prefill takes about as long in each type."""
        if self._is_told:
            return
        self._is_told = True
        n = len(self._models) + (self._base is not None)
        self._console.note(f"about {format_duration(seconds)} a model" + (f", {format_duration(n * seconds)} in all" if n > 1 else ""))
