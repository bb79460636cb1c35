"""How fast models are beside stock files of the same model, by llama-bench."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._base.console import Console
from .._base.errors import UserError
from .._base.files import free_space, temporary_directory
from .._base.package import __version__
from .._base.text import format_table, shorten
from .._base.threads import check_threads
from .._base.units import MIB
from .._evaluation.labels import disk_bytes, label_models, model_bpw
from .._evaluation.speed import WHAT, BenchRunner, Samples, measure_speed, summarize_speed
from .._formats.context import position_limit
from .._formats.gguf_file import GGUFFile
from .._formats.split import open_model
from .._native.programs import device_options, require_tool
from .._native.requantize import requantize

# File types of llama-quantize that need no importance matrix, and their bits a weight in a model of 8B.
STOCK = {
    "q2_k": 3.16, "q3_k_s": 3.64, "q3_k_m": 4.0, "q3_k_l": 4.3, "iq4_xs": 4.46, "q4_0": 4.66, "iq4_nl": 4.68, "q4_k_s": 4.67, "q4_k_m": 4.89,
    "q5_0": 5.59, "q5_k_s": 5.57, "q5_k_m": 5.7, "q6_k": 6.56, "q8_0": 8.5,
}
LADDER = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0")  # by default two neighbours of these
TEMPORARY = ".bench-"


@dataclass(frozen=True)
class BenchOptions:
    """The flags of `ggml-ext bench` that are no matter of its terminal, by name; docs/reference/options.md says what each does."""

    models: Sequence[Path]
    stock: str | None = None
    n_prompt: int = 128
    n_gen: int = 32
    rounds: int = 5
    threads: int | None = None
    n_gpu_layers: str | None = None
    device: str | None = None
    rpc: str | None = None

    def check(self) -> int:
        """The number of threads; UserError for values that are wrong."""
        for flag, value in (("--n-prompt", self.n_prompt), ("--n-gen", self.n_gen), ("--rounds", self.rounds)):
            if value < 1:
                raise UserError(f"{flag}: got {value}, must be at least 1")
        for name in self.stock_names() or ():
            if name not in STOCK:
                raise UserError(f"--stock: unknown type '{name}': pass none, or some of {', '.join(STOCK)} with commas")
        return check_threads(self.threads)

    def stock_names(self) -> list[str] | None:
        """None where it is chosen by the size of the first model."""
        return None if self.stock is None else [] if self.stock == "none" else self.stock.lower().split(",")


@dataclass(frozen=True)
class Speeds:
    """sizes: bytes by name; baselines: names of what the others are compared with."""

    samples: Samples
    sizes: dict[str, int]
    baselines: list[str]
    asked: BenchOptions
    n_threads: int

    def lines(self, width: int) -> list[str]:
        """A table for each of WHAT."""
        asked, rows = self.asked, summarize_speed(self.samples, self.baselines)
        width = max(width, max(map(len, self.samples)) + 20 + 11 * len(self.baselines) + 2)  # names of files must be told apart
        titles, lines = {"decode": f"write {asked.n_gen}", "prefill": f"read {asked.n_prompt}"}, []
        for what in WHAT:
            heading = f"{'MiB':>9} {'tokens/s':>9}" + "".join(f" {'x ' + shown(b):>10}" for b in self.baselines)
            columns = [
                f"{self.sizes[row['type']] / MIB:9,.1f} {row[what]:9.2f}" + "".join(f" {row[f'{what}/{b}']:10.2f}" for b in self.baselines)
                for row in rows
            ]
            lines += format_table(titles[what], heading, [(row["type"], c) for row, c in zip(rows, columns, strict=True)], width)
        return [*lines, "", f"medians of {asked.rounds} rounds on {self.n_threads} threads; a ratio is the median of those of the rounds"]

    def record(self) -> dict:
        """What `ggml-ext bench --json` prints: tokens a second of each round, and the summary."""
        asked = self.asked
        return {
            "ggml_ext": __version__, "threads": self.n_threads, "n_prompt": asked.n_prompt, "n_gen": asked.n_gen, "bytes": self.sizes,
            "samples": self.samples, "summary": summarize_speed(self.samples, self.baselines),
        }


def shown(name: str) -> str:
    """Of a baseline, in the heading of a column."""
    return name.removeprefix("stock ").upper() if name.startswith("stock ") else shorten(name, 8)


def bench(asked: BenchOptions, console: Console) -> Speeds:
    """Everything after the command line; UserError for what the user can change."""
    n_threads = asked.check()
    files = [open_model(path) for path in asked.models]
    asked = within_positions(asked, files, console)
    names = asked.stock_names()
    stock = neighbours(files[0]) if names is None else names
    llama_bench, llama_quantize = map(require_tool, ("llama-bench", "llama-quantize"))
    models = dict(zip(label_models(asked.models), (file.path for file in files), strict=True))
    with made_stock(files[0], stock, llama_quantize, n_threads, console) as made:
        models |= made
        sizes = {name: disk_bytes(open_model(path)) for name, path in models.items()}
        run = BenchRunner(llama_bench, asked.n_prompt, asked.n_gen, n_threads, device_options(asked.n_gpu_layers, asked.device, asked.rpc))
        with console.bar("llama-bench", asked.rounds, "round") as bar:
            samples = measure_speed(models, run, asked.rounds, lambda _: bar.update())
    return Speeds(samples, sizes, list(made) or list(models)[1:2], asked, n_threads)


def within_positions(asked: BenchOptions, files: Sequence[GGUFFile], console: Console) -> BenchOptions:
    """No more tokens than all models have positions for."""
    n = min((found for file in files if (found := position_limit(file)) is not None), default=max(asked.n_prompt, asked.n_gen))
    if n < max(asked.n_prompt, asked.n_gen):
        console.note(f"positions for {n:,} tokens: no more are read or written")
    return replace(asked, n_prompt=min(asked.n_prompt, n), n_gen=min(asked.n_gen, n))


def neighbours(file: GGUFFile) -> list[str]:
    """The stock files between which its size is; one where it is smaller or larger than all."""
    smaller, larger = ([name for name in LADDER if (STOCK[name] <= model_bpw(file)) == is_smaller] for is_smaller in (True, False))
    return [*smaller[-1:], *larger[:1]]


@contextlib.contextmanager
def made_stock(file: GGUFFile, names: Sequence[str], program: Path, n_threads: int, console: Console) -> Iterator[dict[str, Path]]:
    """Stock files of the model by name, beside it as long as this lasts. Made from its own weights: their errors change no speed."""
    if not names:
        yield {}
        return
    folder = file.path.parent
    needed = sum(t.n_elements for t in file.tensors) * sum(STOCK[name] for name in names) / 8
    try:
        with temporary_directory(folder, TEMPORARY, console.note) as temporary:
            if (free := free_space(folder)) < needed:
                raise UserError(
                    f"no space left on device: {folder} needs {needed / MIB:,.0f} MiB for {', '.join(names)}, {free / MIB:,.0f} MiB are free: free "
                    "some space, or pass --stock none, or files that you have as MODEL"
                )
            made = {}
            with console.bar("llama-quantize", len(names), "file") as bar:
                for name in names:
                    made[f"stock {name}"] = out = temporary / f"{name}.gguf"
                    if wrong := requantize(program, file.path, out, name.upper(), n_threads):
                        raise UserError(wrong)
                    bar.update()
            yield made
    except OSError as e:
        raise UserError(f"cannot write in {folder}: {e.strerror}; pass --stock none, or files that you have as MODEL") from e
