"""Readers of scripts/build/calibration_text.py, which split a package's file into paragraphs without blank lines.

Each takes the file's text and its part of data/calibration.toml. They remove web and mail addresses, licence notices and markup.
"""
from __future__ import annotations

import json
import random
import re

UNWANTED = re.compile(r"https?://|www\.|\w@\w+\.\w|copyright|licen[cs]e|gutenberg|all rights reserved|SPDX-", re.IGNORECASE)


def split_paragraphs(text: str) -> list[str]:
    text = text.lstrip("\ufeff").replace("\r\n", "\n").expandtabs(4)
    return [p.strip("\n").rstrip() for p in re.split(r"\n[ \t]*\n", text) if p.strip()]


def read_text(text: str, part: dict) -> list[str]:
    """Read prose or code unchanged, from the first `start` to the last `end` if the part has them."""
    if "start" in part:
        text = text[text.index(part["start"]):]
    if "end" in part:
        text = text[:text.rindex(part["end"])]
    return split_paragraphs(text)


def read_novel(text: str, part: dict) -> list[str]:
    """Read prose in lines of about 70 characters without blank lines; a short line that ends a sentence ends a paragraph."""
    paragraphs = [""]
    for line in "\n".join(read_text(text, part)).splitlines():
        paragraphs[-1] += (" " if paragraphs[-1] else "") + line.strip()
        if len(line) < 60 and re.search(r"""[.!?]["']?$""", line):
            paragraphs.append("")
    return paragraphs[:-1]


def read_markdown(text: str, part: dict) -> list[str]:
    """Read Markdown or reStructuredText; replace links by their names, and remove images, anchors and HTML."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *\{[!*].*$|^\.\. _.*$|\{ ?#.*?\}|^ *=== .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *```.*\n\s*```\n|</?termy>", "", text, flags=re.MULTILINE)  # fences that the line above has emptied
    text = re.sub(r"</?code>", "`", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"</?(abbr|a|p|div|img|small|strong|em|br|kbd|span|dfn|details|summary|center)\b[^>]*>", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    text = re.sub(r"https?://(www\.)?", "", text)  # keeps the rest of a code block
    text = re.sub(r"`([^`<]+?)\s*<[^>`]+>`_+", r"\1", text)
    text = re.sub(r":\w+:`~?\.?([^`<]+?)(\s*<[^>`]+>)?`", r"`\1`", text)
    return split_paragraphs(text)


def read_tables(text: str, part: dict) -> list[str]:
    """Read only the tables of a Markdown file."""
    return [p for p in read_markdown(text, part) if p.count("\n|") > 3]


def read_chat(text: str, part: dict) -> list[str]:
    """Read dialogues of chatterbot-corpus, lists of two speakers' sentences, and skip repeated sentences."""
    talks: list[list[str]] = []
    for line in text.replace("\r\n", "\n").splitlines():
        if match := re.match(r"- -\s?(.*)", line):
            talks.append([match[1]])
        elif (match := re.match(r" {1,3}-\s?(.*)", line)) and talks:
            talks[-1].append(match[1])
        elif talks and line.startswith("    "):
            talks[-1][-1] += "\n" + line[4:]
    names = part.get("speakers", ["-", "-"])
    paragraphs, known = [], set()
    for talk in talks:
        sentences = [re.sub(r"\n+", "\n", re.sub(r"\A[|>]-?\n", "", s)).strip("'\" \n") for s in talk[:2]]
        if len(sentences) == 2 and all(sentences) and not known.intersection(sentences):
            paragraphs.append("\n".join(f"{name} {s}" for name, s in zip(names, sentences)))
            known.update(sentences)
    return paragraphs


def read_translations(text: str, part: dict) -> list[str]:
    """Read the long translated sentences of a gettext catalogue, without those that have placeholders."""
    messages = re.findall(r'^msgstr (".*"(?:\n".*")*)', text, flags=re.MULTILINE)
    sentences = ["".join(re.findall(r'"(.*)"', s)).replace("\\n", " ").replace('\\"', '"').strip() for s in messages]
    return [re.sub(r"\s+", " ", s) for s in sentences if len(s) > 30 and "%" not in s and "<" not in s]


def _leaves(value, path: tuple[str, ...] = ()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key.strip()))
    elif isinstance(value, str):
        yield path, value


def read_factbook(text: str, part: dict) -> list[str]:
    """Read the fields in full sentences of a country's page in the World Factbook, without tags."""
    fields = ((path, re.sub(r"\s*(<[^>]*>)+\s*", " ", value)) for path, value in _leaves(json.loads(text)))
    return [f"{path[-2]}: {value}" for path, value in fields if len(value) > 240 and len(re.findall(r"[a-z]\. [A-Z]", value)) > 1]


def read_factbook_json(text: str, part: dict) -> list[str]:
    """Read sections of a page as JSON with an indent of two."""
    page, sections = json.loads(text), ("Environment", "Energy", "Communications")
    return [json.dumps({name: page[name]}, indent=2, ensure_ascii=False) for name in sections if name in page]


def read_factbook_table(text: str, part: dict) -> list[str]:
    """Read a page's short fields as a Markdown table."""
    n_rows, sections = 24, ("Economy", "Geography", "People and Society")
    rows = [f"| {' / '.join(path[:-1])} | {value} |" for path, value in _leaves(json.loads(text))
            if len(value) < 60 and path[0] in sections]
    tables = [rows[i:i + n_rows] for i in range(0, len(rows) - n_rows + 1, n_rows)]
    return ["\n".join(["| Field | Value |", "| --- | --- |", *table]) for table in tables]


def read_constitution(text: str, part: dict) -> list[str]:
    return [f"{a['article']}. {a['title']}. " + re.sub(r"\s*\n\s*", "\n", a["description"]).strip() for a in json.loads(text)]


def read_leaves(text: str, part: dict) -> list[str]:
    """Read the strings of a JSON file that match `pattern`, which identifies the part's language."""
    return [value for _, value in _leaves(json.loads(text)) if re.search(part["pattern"], value)]


class _Numbers:
    """Random numbers that only use random(), because other methods of Python's generator may change between versions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def below(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low))

    def pick(self, items: list):
        return items[self.below(0, len(items))]


def write_arithmetic() -> list[str]:
    """Write sums, products, divisions, percentages, sequences, equations and word problems with their steps."""
    rng, out = _Numbers(1), []
    for _ in range(60):
        a, b, c = rng.below(12, 9999), rng.below(3, 999), rng.below(2, 60)
        low, tens = b % 10, b - b % 10
        things = rng.pick(["apples", "tickets", "bricks", "pages", "litres of milk", "bolts"])
        who = rng.pick(["Mina", "Tomás", "Aiko", "Ravi", "Lena"])
        out += [
            f"{a} + {b} = {a + b}\n{a} - {b} = {a - b}\n{a} * {c} = {a * c}\n{a} / {c} = {a // c} remainder {a % c}",
            f"Compute {a} x {b}.\n{a} x {tens} = {a * tens}\n{a} x {low} = {a * low}\n"
            f"The sum is {a * tens} + {a * low} = {a * b}.",
            f"{who} has {c * b} {things} and packs them into boxes of {c}. How many boxes are there?\n"
            f"{c * b} / {c} = {b}, so there are {b} boxes. {c // 2} {things} more fill {100 * (c // 2) / c:.0f} % of one.",
            f"{c} % of {a} is {a * c / 100:.2f}. "
            f"After a rise by {c} % the price of {a / 100:.2f} becomes {a * (100 + c) / 10000:.2f}.",
            f"Sequence: {', '.join(str(a + i * c) for i in range(6))}, ... The difference is {c}; the next term is {a + 6 * c}.",
            f"Solve {c}x + {b} = {c * low + b}. Subtract {b}: {c}x = {c * low}. Divide by {c}: x = {low}.",
            "\n".join(["| n | n^2 | n^3 | 1/n |", "| --- | --- | --- | --- |",
                       *(f"| {n} | {n * n} | {n**3} | {1 / n:.4f} |" for n in range(c, c + 4))]),
        ]
    return out


def write_logs() -> list[str]:
    """Write log lines of a web server, a training run and workers."""
    rng, out = _Numbers(2), []
    methods, statuses = ["GET", "POST", "PUT"], [200, 200, 200, 304, 404, 500]
    paths, levels = ["api/items", "index.html", "login", "static/app.js"], ["INFO", "WARNING", "ERROR", "DEBUG"]
    events = ["connection to database reset, retrying in", "request finished after", "cache miss, reloaded in", "queue drained in"]
    for k in range(40):
        clock, loss = rng.below(0, 80000), 9 * rng.random()
        day, times = f"2024-{1 + k % 12:02}-{1 + k % 28:02}", range(clock, clock + 60, 7)
        stamps = [f"{day}T{t // 3600:02}:{t // 60 % 60:02}:{t % 60:02}" for t in times]
        lines = [f'10.0.{rng.below(0, 9)}.{rng.below(1, 255)} - - [{t}] "{rng.pick(methods)} /{rng.pick(paths)} HTTP/1.1" '
                 f"{rng.pick(statuses)} {rng.below(90, 90000)}" for t in stamps]
        lines += [f"step {100 * (i + 10 * k):6} | loss {loss / (1 + i / 4):.4f} | lr {3e-4 * (1 - i / 12):.2e} | "
                  f"{rng.below(8000, 9000)} tokens/s" for i in range(6)]
        lines += [f"{t} {rng.pick(levels)} [worker-{rng.below(1, 8)}] {rng.pick(events)} {rng.below(1, 5000)} ms"
                  for t in stamps[:6]]
        out.append("\n".join(lines))
    return out


READERS = {name.removeprefix("read_"): function for name, function in list(globals().items()) if name.startswith("read_")}
WRITERS = {name.removeprefix("write_"): function for name, function in list(globals().items()) if name.startswith("write_")}
