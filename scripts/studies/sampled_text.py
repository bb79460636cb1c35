#!/usr/bin/env python3
"""Text that a model writes itself, to be compared as calibration text with the built-in one (data/calibration.toml).

    sampled_text.py -m MODEL -o FILE [--bytes 100000] [--tokens 512] [--temperature 1] [--min-p 0.05]
                    [--starts any|code|bos] [-t 1]

Every piece is one run of llama-completion with a random seed of its own, 1, 2, 3 ..., from a short start: a chat model writes
other things after "def" than after "Once". --starts bos gives it nothing but the token that begins a text. No top-k and no
top-p: the text should vary as the model's inputs do. --min-p leaves out tokens less likely than that part of the likeliest.
From the whole distribution (0) SmolLM2-135M-Instruct writes noise after some dozen tokens; with 0.05 it writes sentences, and
often the same ones again. A piece ends where the model ends it. The same model, options, processor and number of threads give
the same text. Pieces of fewer than 100 characters are left out: they are a start and its end.

Compare: llama-imatrix on FILE and on py/ggml_ext/data/calibration.txt with as many chunks of each, then scripts/tools/paired.py.
"""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script
from ggml_ext._native.programs import tool_path

# No blanks at their ends: vocabularies keep them with the next word, and a blank alone is followed by nonsense.
CODE = ["def", "import", "class", "#", '"""', "@", "from", "if", "for", "async def", "try:", "with open(", "return", "    def",
        "test_"]
# beginnings of prose, talk, code, markup, tables, numbers and other languages
ANY = ["The", "Once upon a time", "In", "How", "User:", "Question:", "def", "Dear", "I", "# Introduction", "```python\n",
       "| Name |", "<html>", '{\n  "name":', "1.", "Chapter 1", "What is", "When", '"', "import", "#include <", "SELECT", "Die", "Le",
       "El", "A", "Write", "According to", "12 +", "Abstract.", "To", "Let x be", "function", "На", "这", "この", "Il", "Os", "##", "My"]
STARTS = {"any": ANY, "code": CODE, "bos": [""]}
MIN_CHARS = 100


def sample(program: Path, model: Path, start: str, seed: int, args: argparse.Namespace) -> str:
    """One piece, with its start; UserError if the program fails."""
    command = [program, "-m", model, "-p", start, "-n", args.tokens, "-c", args.tokens + 64, "-t", args.threads, "-no-cnv",
               "--no-display-prompt", "--simple-io", "--no-warmup", "--no-perf", "--seed", seed,
               "--temp", args.temperature, "--top-k", 0, "--top-p", 1, "--min-p", args.min_p]
    done = subprocess.run([*map(str, command)], capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = " / ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise UserError(f"{model}: {program.name} exited with {done.returncode}: {last}")
    text = done.stdout.decode(errors="ignore")  # a piece may end within a character
    return start + re.sub(r"\s*\[end of text\]\s*\Z", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True)
    add("-o", "--output", type=Path, required=True)
    add("--bytes", type=int, default=100_000, help="how much to write (100000)")
    add("--tokens", type=int, default=512, help="the most in a piece (512)")
    add("--temperature", type=float, default=1.0)
    add("--min-p", type=float, default=0.05)
    add("--starts", choices=STARTS, default="any")
    add("-t", "--threads", type=int, default=1)
    add("--program", type=Path, help="default: the package's llama-completion")
    args = parser.parse_args()
    if not args.model.is_file():
        raise UserError(f"{args.model}: no such file")
    program = args.program or tool_path("llama-completion")

    # by a name of its own until it is whole; what a run that was stopped has written stays there to be looked at
    part, n_bytes, kept, seed = args.output.with_name(args.output.name + ".part"), 0, 0, 0
    progress = tqdm(total=args.bytes, unit="B", unit_scale=True, disable=None)
    with part.open("w", encoding="utf-8", newline="\n") as out, progress as bar:
        while n_bytes < args.bytes:
            if seed >= 20 and n_bytes < 20 * seed:
                raise UserError(f"{args.model}: {seed} runs gave {n_bytes} bytes: it ends its texts at once; try other --starts")
            start = STARTS[args.starts][seed % len(STARTS[args.starts])]
            seed += 1
            text = sample(program, args.model, start, seed, args).strip("\n")
            if len(text) >= MIN_CHARS:
                out.write(text + "\n\n")
                out.flush()
                n_bytes += len(text.encode()) + 2
                kept += 1
                bar.update(len(text.encode()) + 2)
    part.replace(args.output)
    print(f"{args.output}: {n_bytes} bytes in {kept} pieces; left out: {seed - kept} of fewer than {MIN_CHARS} characters")


if __name__ == "__main__":
    sys.exit(run_script(main))
