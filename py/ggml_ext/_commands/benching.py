"""Measure the speed of models against standard GGUF files of the same model, with llama-bench."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import check_free_space, temporary_directory
from .._base.option import option
from .._base.package import __version__
from .._base.text import format_table, shorten
from .._base.threads import check_threads, threads_option
from .._base.units import MIB
from .._evaluation.labels import disk_bytes, label_models, model_bpw
from .._evaluation.speed import WHAT, BenchRunner, Samples, measure_speed, summarize_speed
from .._formats.context import position_limit
from .._formats.gguf_file import GGUFFile
from .._formats.split import open_model
from .._native.devices import DeviceOptions
from .._native.programs import require_tool
from .._native.requantize import requantize

# Upstream file types that need no imatrix, with their bits per weight in an 8B model.
UPSTREAM_BPW = {
    "q2_k": 3.16, "q3_k_s": 3.64, "q3_k_m": 4.0, "q3_k_l": 4.3, "iq4_xs": 4.46, "q4_0": 4.66, "iq4_nl": 4.68, "q4_k_s": 4.67, "q4_k_m": 4.89,
    "q5_0": 5.59, "q5_k_s": 5.57, "q5_k_m": 5.7, "q6_k": 6.56, "q8_0": 8.5,
}
LADDER = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0")  # candidates for the default of --stock
TEMPORARY = ".bench-"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `ggml-ext bench`, except those of the terminal."""

    models: Sequence[Path] = option(is_positional=True, metavar="MODEL", help="GGUF models, of a split one any part")
    stock: str | None = option(
        None, metavar="LIST", help="standard types to compare with, with commas; none: the second MODEL (default: those next in size)"
    )
    n_prompt: int = option(128, short="-p", metavar="N", minimum=1, help="tokens of prompt processing (default: 128)")
    n_gen: int = option(32, short="-n", metavar="N", minimum=1, help="tokens to generate (default: 32)")
    rounds: int = option(5, short="-r", metavar="N", minimum=1, help="rounds per model (default: 5)")
    threads: int | None = threads_option()
    devices: DeviceOptions = field(default_factory=DeviceOptions)

    def check(self) -> int:
        """Return the number of threads. Raise UserError for an unknown type."""
        for name in self.stock_names() or ():
            if name not in UPSTREAM_BPW:
                raise UserError(f"--stock: unknown type '{name}': pass none, or a comma-separated list of {', '.join(UPSTREAM_BPW)}")
        return check_threads(self.threads)

    def stock_names(self) -> list[str] | None:
        """Parse --stock; None if the types follow from the size of the first model."""
        return None if self.stock is None else [] if self.stock == "none" else self.stock.lower().split(",")


@dataclass(frozen=True)
class Speeds:
    """The result of a benchmark. sizes: bytes by model; baselines: the models to compare with."""

    samples: Samples
    sizes: dict[str, int]
    baselines: list[str]
    options: BenchOptions
    n_threads: int

    def lines(self, width: int) -> list[str]:
        """Format the tables of token generation and prompt processing."""
        options, rows = self.options, summarize_speed(self.samples, self.baselines)
        width = max(width, max(map(len, self.samples)) + 20 + 11 * len(self.baselines) + 2)  # names are not shortened
        titles, lines = {"decode": f"tg{options.n_gen}", "prefill": f"pp{options.n_prompt}"}, []
        for what in WHAT:
            heading = f"{'MiB':>9} {'tokens/s':>9}" + "".join(f" {'x ' + short_label(b):>10}" for b in self.baselines)
            columns = [
                f"{self.sizes[row['type']] / MIB:9,.1f} {row[what]:9.2f}" + "".join(f" {row[f'{what}/{b}']:10.2f}" for b in self.baselines)
                for row in rows
            ]
            lines += format_table(titles[what], heading, [(row["type"], c) for row, c in zip(rows, columns, strict=True)], width)
        return [*lines, "", f"medians of {options.rounds} rounds, {self.n_threads} threads; x: ratio to a baseline, median over the rounds"]

    def record(self) -> dict:
        """Return what `ggml-ext bench --json` prints: tokens per second of each round, and the summary."""
        options = self.options
        return {
            "ggml_ext": __version__, "threads": self.n_threads, "n_prompt": options.n_prompt, "n_gen": options.n_gen, "bytes": self.sizes,
            "samples": self.samples, "summary": summarize_speed(self.samples, self.baselines),
        }


def short_label(name: str) -> str:
    """Shorten the name of a baseline for a column heading."""
    return name.removeprefix("stock ").upper() if name.startswith("stock ") else shorten(name, 8)


def bench(options: BenchOptions, console: Console) -> Speeds:
    """Measure the speed of models. Raise UserError with a way out."""
    n_threads = options.check()
    files = [open_model(path) for path in options.models]
    options = limit_to_positions(options, files, console)
    names = options.stock_names()
    types = choose_neighbours(files[0]) if names is None else names
    llama_bench, llama_quantize = map(require_tool, ("llama-bench", "llama-quantize"))
    models = dict(zip(label_models(options.models), (file.path for file in files), strict=True))
    with make_standard_files(files[0], types, llama_quantize, n_threads, console) as standard:
        models |= standard
        sizes = {name: disk_bytes(open_model(path)) for name, path in models.items()}
        run = BenchRunner(llama_bench, options.n_prompt, options.n_gen, n_threads, options.devices.arguments())
        with console.bar("llama-bench", options.rounds, "round") as bar:

            def advance(_: int) -> None:
                bar.update()

            samples = measure_speed(models, run, options.rounds, advance, warn=console.warn)
    return Speeds(samples, sizes, list(standard) or list(models)[1:2], options, n_threads)


def limit_to_positions(options: BenchOptions, files: Sequence[GGUFFile], console: Console) -> BenchOptions:
    """Reduce the numbers of tokens to the context length of the models."""
    n = min((limit for file in files if (limit := position_limit(file)) is not None), default=max(options.n_prompt, options.n_gen))
    if n < max(options.n_prompt, options.n_gen):
        console.note(f"using {n:,} tokens: the context length of a model")
    return replace(options, n_prompt=min(options.n_prompt, n), n_gen=min(options.n_gen, n))


def choose_neighbours(file: GGUFFile) -> list[str]:
    """Choose the next smaller and the next larger standard type than a model; only one at an end of the list."""
    smaller, larger = ([name for name in LADDER if (UPSTREAM_BPW[name] <= model_bpw(file)) == is_smaller] for is_smaller in (True, False))
    return [*smaller[-1:], *larger[:1]]


@contextlib.contextmanager
def make_standard_files(file: GGUFFile, names: Sequence[str], program: Path, n_threads: int, console: Console) -> Iterator[dict[str, Path]]:
    """Requantize a model to temporary standard files next to it; yield their paths by name. Their quality does not matter for speed."""
    if not names:
        yield {}
        return
    directory = file.path.parent
    needed = sum(t.n_elements for t in file.tensors) * sum(UPSTREAM_BPW[name] for name in names) / 8
    try:
        with temporary_directory(directory, TEMPORARY, console.note) as temporary:
            check_free_space(directory, needed, str(directory), f" for {', '.join(names)}", "pass --stock none, or existing files as MODEL")
            paths = {}
            with console.bar("llama-quantize", len(names), "file") as bar:
                for name in names:
                    paths[f"stock {name}"] = out = temporary / f"{name}.gguf"
                    if problem := requantize(program, file.path, out, name.upper(), n_threads):
                        raise UserError(problem)
                    bar.update()
            yield paths
    except OSError as e:
        raise UserError(f"cannot write in {directory}: {e.strerror}; pass --stock none, or existing files as MODEL") from e
