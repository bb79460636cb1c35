"""Measure perplexity, KL divergence from the original model, and accuracy on tasks, with llama-perplexity."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, fingerprint, temporary_directory
from .._base.option import option
from .._base.package import PACKAGE_DIR
from .._base.text import format_duration
from .._base.threads import check_threads, threads_option
from .._base.units import MIB
from .._evaluation.figures import BASE_PPL, PPL, TASKS, Figure, chunk_sums, kld_sums, mean_over_samples, top_sums
from .._evaluation.labels import disk_bytes, label_models, model_bpw
from .._evaluation.logits import BaseLogits, LogitsRecord, record_path
from .._evaluation.needle import N_NEEDLES, NeedleScores, NeedleTexts, list_letters, write_needle_texts
from .._evaluation.perplexity import PerplexityRunner, require_finite
from .._evaluation.positions import kld_by_position, position_ranges
from .._evaluation.samples import Samples
from .._formats.cache_names import logits_cache_name
from .._formats.context import N_CONTEXT, context_length, position_limit
from .._formats.gguf_file import GGUFFile, header_bytes
from .._formats.header_room import check_writable
from .._formats.language_model import describe_other_model
from .._formats.split import open_model
from .._native.devices import DeviceOptions
from .._native.programs import require_tool
from .._native.text_file import check_text, count_tokens, read_tokens
from .._report import picture
from .._report.quality import Evaluation, Pair, Quality, draw_quality
from .recording import make_recorded_quality

TEXT = PACKAGE_DIR / "data" / "evaluation.txt"
BUILT_IN = "built-in"
TEMPORARY = ".evaluation-"
TOKENS = "tokenizer.ggml.tokens"
MIN_SCORED = 100  # tokens; llama-perplexity prints no statistics for fewer


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `ggml-ext evaluate`, except those of the terminal."""

    models: Sequence[Path] = option(
        is_positional=True, metavar="MODEL", help="GGUF models, of a split one any part; differences are against the first"
    )
    against: Path | None = option(None, metavar="F16", help="the model that they were made from")
    file: Path | None = option(None, short="-f", metavar="TEXT", help="text to score (default: the built-in text)")
    ctx_size: int | None = option(
        None, short="-c", metavar="N", minimum=16, help=f"tokens per chunk; the second half is scored (default: {N_CONTEXT}, or what the models allow)"
    )
    chunks: int | None = option(None, metavar="N", minimum=2, help="chunks to score (default: the full text)")
    batch_size: int | None = option(None, short="-b", metavar="N", minimum=1, help="tokens to compute at once (default: a chunk)")
    base_logits: Path | None = option(
        None, metavar="FILE", help="cache of the logits of --against (default: next to it); without --against: read the logits from it"
    )
    hellaswag: Path | None = option(None, metavar="FILE", help="sentence completion tasks, in the format of llama-perplexity --hellaswag")
    winogrande: Path | None = option(None, metavar="FILE", help="word reference tasks, in the format of llama-perplexity --winogrande")
    multiple_choice: Path | None = option(
        None, metavar="FILE", help="multiple-choice questions, in the format of llama-perplexity --multiple-choice"
    )
    tasks: int | None = option(None, metavar="N", minimum=1, help="questions per file of tasks (default: 400 for --hellaswag, else all)")
    positions: int | None = option(
        None, metavar="N", minimum=1, help="show the KL divergence in N ranges of the scored positions too, which runs each MODEL twice; needs --against"
    )
    needle: int | None = option(
        None, metavar="N", minimum=2, help=f"hide {N_NEEDLES} facts at different depths in each of N texts of --ctx-size tokens, and score their retrieval"
    )
    write: bool = option(False, help="record the figures in the metadata of each MODEL, for inspect and model cards; needs --against")
    picture: Path | None = option(None, metavar="FILE", help="draw KL divergence or perplexity over size into this .svg or .png file")
    force: bool = option(False, help="replace the file of --picture if it exists")
    threads: int | None = threads_option()
    devices: DeviceOptions = field(default_factory=DeviceOptions)

    def task_files(self) -> dict[str, Path]:
        """The files of tasks, by key of TASKS."""
        paths = {kind: getattr(self, kind.replace("-", "_")) for kind in TASKS}
        return {kind: path for kind, path in paths.items() if path is not None}

    def scores_text(self) -> bool:
        """Whether a text is scored, that is, unless only tasks or needles are requested."""
        given = (self.against, self.base_logits) if self.needle else (self.against, self.file, self.base_logits)
        return not (self.task_files() or self.needle) or any(path is not None for path in given)

    def check(self) -> int:
        """Return the number of threads. Raise UserError for options that do not go together."""
        n_threads = check_threads(self.threads)
        if not self.models:
            raise UserError("MODEL is missing: name a GGUF file")
        if self.write and self.against is None:
            raise UserError("--write records the KL divergence from the original: pass --against")
        if self.positions is not None and self.against is None:
            raise UserError("--positions shows the KL divergence from the original: pass --against")
        if self.tasks is not None and not self.task_files():
            raise UserError(f"--tasks needs one of {', '.join('--' + kind for kind in TASKS)}")
        if self.base_logits is not None and self.against is None and (unused := self.file or self.chunks or self.ctx_size):
            raise UserError(f"--base-logits without --against: the file determines text, chunks and context; drop {unused}")
        if self.base_logits is not None and self.base_logits.exists() and not self.base_logits.is_file():
            raise UserError(f"--base-logits: {self.base_logits} is not a regular file")
        for kind, path in self.task_files().items():
            if not path.is_file():
                raise UserError(f"--{kind}: {path}: no such file; docs/using/evaluate.md names sources")
        if self.picture is not None:
            if not self.scores_text():
                raise UserError("--picture draws perplexity or KL divergence: pass --against or -f, or drop --picture")
            read = {"--against": self.against, "--file": self.file, "--base-logits": self.base_logits}
            inputs = {path: flag for flag, path in read.items() if path is not None} | {path: "MODEL" for path in self.models}
            picture.check_picture(self.picture, self.force, inputs)
        return n_threads


@dataclass(frozen=True)
class ScoredText:
    """The text that is scored."""

    path: Path
    n_ctx: int
    n_chunks: int

    @property
    def name(self) -> str:
        return BUILT_IN if self.path == TEXT else str(self.path)

    def record(self) -> dict:
        return {"name": self.name, **fingerprint(self.path)}


def evaluate(options: EvaluateOptions, console: Console) -> Evaluation:
    """Evaluate models. Raise UserError with a way out."""
    n_threads = options.check()
    models = [open_model(path) for path in options.models]
    base = None if options.against is None else open_model(options.against)
    files = [*([base] if base else []), *models]
    check_language_models(files)
    check_vocabularies(files)
    for file in models if options.write else []:
        check_writable(file.parts[0])
    runs = _Runs(options, models, base, n_threads, console)
    result = runs.all()
    if options.picture is not None and not draw_quality(result, options.picture, options.force):
        console.note("--picture: the font lacks characters of some names and shows boxes: name a .svg file")
    return result


def check_language_models(files: Sequence[GGUFFile]) -> None:
    """Raise UserError for a model that does not predict a next token."""
    for file in files:
        if other := describe_other_model(file):
            raise UserError(
                f"{file.path} is not a language model but {other}, and predicts no tokens to score; "
                "ggml-ext inspect FILE --against ORIGINAL compares its weights"
            )


def check_vocabularies(files: Sequence[GGUFFile]) -> None:
    """Raise UserError unless all files have the vocabulary of the first."""
    first, tokens = files[0], files[0].strings(TOKENS) or []
    for file in files:
        file_tokens = tokens if file is first else file.strings(TOKENS) or []
        if not file_tokens:
            raise UserError(f"{file.path} has no vocabulary: pass a complete language model")
        if file_tokens != tokens:
            raise UserError(
                f"{file.path} has another vocabulary than {first.path} ({len(file_tokens):,} and {len(tokens):,} tokens), so their figures do not "
                "compare; evaluate it alone"
            )


def describe(file: GGUFFile, path: Path, label: str) -> Quality:
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        types[tensor.type.name.lower()] += tensor.n_bytes
    return Quality(path, label, disk_bytes(file), model_bpw(file), dict(types))


class _Runs:
    """The runs of llama-perplexity for one evaluation."""

    def __init__(self, options: EvaluateOptions, models: list[GGUFFile], base: GGUFFile | None, n_threads: int, console: Console):
        program = require_tool("llama-perplexity")
        self._options, self._models, self._base, self._console = options, models, base, console
        self._names = label_models([*([options.against] if options.against is not None else []), *options.models])
        self._has_estimated = False
        self._all = [*models, *([base] if base else [])]
        n_ctx = self._context()
        self._check_positions(n_ctx)
        self._ranges = position_ranges(n_ctx, options.positions) if options.positions else []
        self._runner = PerplexityRunner(
            program=program, n_ctx=n_ctx, n_batch=options.batch_size or n_ctx, n_threads=n_threads,
            options=options.devices.arguments(), console=console, on_estimate=self._note_estimate,
        )

    def all(self) -> Evaluation:
        options, base, text, logits = self._options, None, None, None
        rows: list[Quality] = []
        samples: dict[str, Samples] = {}
        base_row: Quality | None = None
        if self._base is not None and options.against is not None:
            base, base_row = self._base, describe(self._base, options.against, self._names[0])
        if options.scores_text():
            text, logits = self._prepare()
        needles = self._write_needles() if options.needle else None
        for file, path, label in zip(self._models, options.models, self._names[-len(self._models):], strict=True):
            row, sample = describe(file, path, label), Samples()
            if options.scores_text():
                statistics, log = self._score(file, text, logits)
                sample = Samples(chunk_sums(log), kld_sums(log), top_sums(log), self._measure_positions(file, text, logits))
                row = replace(row, statistics=dict(statistics), positions=mean_over_samples(sample.positions))
                self._record(file, statistics, log, text, logits)
                if base_row is not None and BASE_PPL in statistics:
                    base_row = replace(base_row, statistics={PPL: statistics[BASE_PPL]})
            samples[label] = sample = replace(sample, answers=self._answers(file), needles=self._score_needles(file, needles))
            rows.append(replace(row, scores=sample.scores(), needles=sample.needles))
            self._console.event("model", rows[-1].record())
        labels, references = list(samples), []
        if base is not None and base_row is not None and (options.task_files() or needles):
            if base_row.label not in samples:
                samples[base_row.label] = Samples(answers=self._answers(base), needles=self._score_needles(base, needles))
            sample = samples[base_row.label]
            base_row = replace(base_row, scores=sample.scores(), needles=sample.needles)
            references.append(base_row.label)
        compared = dict.fromkeys((label, other) for other in (*references, labels[0]) for label in labels if label != other)
        scored = logits or text
        return Evaluation(
            text={} if text is None else text.record(), n_ctx=scored.n_ctx if scored else needles.n_ctx if needles else 0, n_chunks=scored.n_chunks if scored else 0,
            base=base_row, models=rows, pairs=[Pair.compare(*pair, samples) for pair in compared], ranges=self._ranges,
        )

    def _measure_positions(self, file: GGUFFile, text: ScoredText | None, logits: BaseLogits | None) -> np.ndarray:
        """Measure the KL divergence in the ranges of --positions: (n_chunks, n_ranges); without the option there are none."""
        if text is None or logits is None or not self._ranges:
            return np.empty((2, 0))
        with temporary_directory(logits.path.parent, TEMPORARY, self._console.note) as directory:
            hint = "put --base-logits on another disk, or pass a smaller --chunks"
            check_free_space(directory, logits.n_bytes(), f"the logits of {file.path}", "", hint)
            self._runner.save_logits(file.path, text.path, logits.n_chunks, directory / "logits.bin")
            return kld_by_position(logits, BaseLogits.read(directory / "logits.bin"), self._ranges)

    def _record(self, file: GGUFFile, statistics: Mapping[str, Figure], log: str, text: ScoredText | None, logits: BaseLogits | None) -> None:
        """Write the figures into the file with --write, which needs --against and so has text and logits."""
        if not self._options.write or self._base is None or text is None or logits is None:
            return
        name = text.name if text.name == BUILT_IN else text.path.name
        quality = make_recorded_quality(statistics, log, source=self._base, text=text.path, text_name=name, logits=logits)
        file.check_unchanged()
        quality.write(file)
        self._console.note(f"{file.parts[0].path}: figures recorded in its metadata")

    def _context(self) -> int:
        """Return the tokens per chunk: at most the context length of every model."""
        if self._options.ctx_size is not None:
            return self._options.ctx_size
        if self._options.base_logits is not None and self._base is None:
            return BaseLogits.read(self._options.base_logits).n_ctx
        return min(map(context_length, self._all))

    def _check_positions(self, n_ctx: int) -> None:
        for file in self._all:
            if (n := position_limit(file)) is not None and n < n_ctx:
                flag, hint = ("--ctx-size", "pass") if self._options.ctx_size else ("--base-logits", "recompute the file with")
                raise UserError(f"{flag}: got chunks of {n_ctx:,} tokens, {file.path} has a context of {n:,}: {hint} --ctx-size {n}")

    def _prepare(self) -> tuple[ScoredText | None, BaseLogits | None]:
        """Return the text to score, and the logits of the base if there is one."""
        options = self._options
        if options.base_logits is not None and self._base is None:
            logits = BaseLogits.read(options.base_logits)
            self._check_logits(logits)
            return None, logits
        text = self._text()
        if self._base is None:
            self._console.note(f"{text.n_chunks} chunks of {text.n_ctx} tokens of {self._title(text)}")
            return text, None
        n_scored = text.n_chunks * (text.n_ctx - 1 - text.n_ctx // 2)
        if 0 < n_scored < MIN_SCORED:
            raise UserError(
                f"{text.n_chunks} chunks of {text.n_ctx} tokens score {n_scored} tokens, KL divergence needs {MIN_SCORED}: pass a larger "
                "--chunks or --ctx-size, or a longer text"
            )
        return text, self._base_logits(text, self._base)

    def _text(self) -> ScoredText:
        path, n_ctx = self._options.file or TEXT, self._runner.n_ctx
        if self._options.file is None and not TEXT.is_file():
            raise UserError("-f: the built-in text is not installed: pass a text")
        check_text(path, "-f")
        n_tokens = count_tokens(self._models[0].path, path, (self._options.chunks or 1 << 20) * n_ctx)
        if n_tokens is None:
            return ScoredText(path, n_ctx, self._options.chunks or -1)
        if n_tokens < 2 * n_ctx:
            raise UserError(
                f"-f: {path} has {n_tokens:,} tokens, two chunks of {n_ctx} need {2 * n_ctx:,}: pass a longer text, or a smaller --ctx-size"
            )
        return ScoredText(path, n_ctx, min(self._options.chunks or n_tokens, n_tokens // n_ctx))

    def _title(self, text: ScoredText) -> str:
        return "the built-in text" if text.name == BUILT_IN else text.name

    def _base_logits(self, text: ScoredText, base: GGUFFile) -> BaseLogits:
        """Return the cached logits of the base if they match, else compute and cache them."""
        cache = Path(os.path.realpath(self._options.base_logits or base.path.with_name(logits_cache_name(base.stem))))
        made_from = {
            "model": [fingerprint(part.path, header_bytes(part)) for part in base.parts], "text": fingerprint(text.path),
            "ctx_size": text.n_ctx, "chunks": text.n_chunks,
        }
        record = LogitsRecord.read(cache)
        if record and record.made_from == made_from:
            self._console.note(f"reusing cached logits {cache}")
            return BaseLogits.read(cache)
        if cache.exists() and record is None:
            raise UserError(
                f"{cache} exists and is not an intact file of ggml-ext: pass it as --base-logits without --against, or move it away"
            )
        n_vocab = len(base.strings(TOKENS) or [])
        needed = BaseLogits(cache, text.n_ctx, n_vocab, text.n_chunks).n_bytes()
        self._console.note(
            f"{text.n_chunks} chunks of {text.n_ctx} tokens of {self._title(text)}; caching {needed / MIB:,.0f} MiB of logits in "
            f"{cache}; --chunks N reduces this"
        )
        try:
            return self._compute_logits(text, base, cache, needed, made_from)
        except OSError as e:
            raise UserError(f"cannot write {cache}: {e.strerror}; name another file with --base-logits") from e

    def _compute_logits(self, text: ScoredText, base: GGUFFile, cache: Path, needed: int, made_from: dict) -> BaseLogits:
        """Compute and cache the logits of the base. Raise OSError if they cannot be written."""
        with temporary_directory(cache.parent, TEMPORARY, self._console.note) as directory:
            check_free_space(cache.parent, needed, str(cache), "", "name another file with --base-logits, or pass a smaller --chunks")
            logits, description = directory / "logits.bin", directory / "logits.json"
            figure, _ = self._runner.save_logits(base.path, text.path, text.n_chunks, logits)
            require_finite(base.path, {PPL: figure})
            description.write_text(LogitsRecord(made_from, fingerprint(logits)).text())
            os.replace(description, record_path(cache))
            os.replace(logits, cache)
        return BaseLogits.read(cache)

    def _check_logits(self, logits: BaseLogits) -> None:
        n_tokens = len(self._models[0].strings(TOKENS) or [])
        if logits.n_vocab != n_tokens:
            raise UserError(
                f"--base-logits: {logits.path} has logits of {logits.n_vocab:,} tokens, {self._models[0].path} has {n_tokens:,}: pass the logits "
                "of its original"
            )

    def _score(self, file: GGUFFile, text: ScoredText | None, logits: BaseLogits | None) -> tuple[Mapping[str, Figure], str]:
        if logits is not None:
            return self._runner.compare(file.path, logits)
        assert text is not None  # without logits there is a text
        figure, log = self._runner.perplexity(file.path, text.path, text.n_chunks)
        return require_finite(file.path, {PPL: figure}), log

    def _answers(self, file: GGUFFile) -> dict[str, np.ndarray]:
        return {
            kind: self._runner.score(file.path, kind, path, self._options.tasks) for kind, path in self._options.task_files().items()
        }

    def _write_needles(self) -> NeedleTexts:
        """Hide needles in the text. UserError if it is too short, or the context."""
        path, model = self._options.file or TEXT, self._models[0]
        check_text(path, "-f")
        letters = list_letters(model)

        def tokenize(text: str) -> list[str]:
            with self._needle_directory() as directory:
                (directory / "text").write_text(text, encoding="utf-8", newline="\n")
                return [letters[token] for token in read_tokens(model.path, directory / "text")]

        return write_needle_texts(path.read_text(encoding="utf-8"), self._runner.n_ctx, self._options.needle or 0, tokenize)

    def _score_needles(self, file: GGUFFile, needles: NeedleTexts | None) -> NeedleScores | None:
        """Run a model on the texts with needles. The logits need as much space as those of another text."""
        if needles is None:
            return None
        n_texts, letters = len(needles.answers), list_letters(file)
        with self._needle_directory() as directory:
            text, out = directory / "text", directory / "logits.bin"
            n_bytes = BaseLogits(out, needles.n_ctx, len(letters), n_texts).n_bytes()
            hint = "put --base-logits on another disk, or pass a smaller --needle or --ctx-size"
            check_free_space(directory, n_bytes, f"--needle: the logits of {file.path}", "", hint)
            text.write_text(needles.text, encoding="utf-8", newline="\n")
            figure, _ = self._runner.save_logits(file.path, text, n_texts, out)
            require_finite(file.path, {PPL: figure})
            return needles.score(BaseLogits.read(out), letters)

    def _needle_directory(self) -> AbstractContextManager[Path]:
        """Return a temporary directory next to the logits of the base, or to the first model."""
        logits = self._options.base_logits
        return temporary_directory((logits or (self._base or self._models[0]).path).parent, TEMPORARY, self._console.note)

    def _note_estimate(self, seconds: float) -> None:
        """Print an estimate after the first run; prompt processing takes about as long in each type."""
        if self._has_estimated:
            return
        self._has_estimated = True
        n = len(self._models) + (self._base is not None)
        self._console.note(f"estimate: {format_duration(seconds)} per model" + (f", {format_duration(n * seconds)} in total" if n > 1 else ""))
