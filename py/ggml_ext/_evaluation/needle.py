"""Retrieval of facts from a long text: needles at several depths, and the logits of their answers at the text's end.

Each text ends with the sentences of its needles in another order, so a model that finds a needle predicts the digits there. This needs no chat
template, and log-probabilities fall before answers become wrong. Positions are counted in ASCII letters and digits, which are the same in a
text and in the tokens of all tokenizers; spaces and other characters are not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile
from .figures import Figure, mean_over_samples
from .logits import BaseLogits, to_log_probabilities

N_DEPTHS, PER_DEPTH = 5, 2
N_NEEDLES = N_DEPTHS * PER_DEPTH  # in a text
N_DIGITS = 5  # of an answer
ROUNDS = 5  # of tokenization, until each text begins where its chunk begins
TOKEN_KINDS = (1, 4)  # normal and user-defined tokens: the others are no text
LINE = 200  # characters of a line, at whose end a needle is put
END_OF_WORD = re.compile(r"\s")
OTHERS = re.compile("[^A-Za-z0-9]+")
ASKED = "All pass numbers of this text, in another order:\n"
PLACES = ("harbor", "castle", "garden", "bridge", "market", "temple", "valley", "island", "forest", "tower", "mill", "station", "library", "stable")
COLOURS = ("amber", "green", "silver", "purple", "white", "golden", "brown", "scarlet", "grey", "blue", "black", "pink", "orange", "yellow")


@dataclass(frozen=True)
class NeedleTexts:
    """Texts of n_ctx tokens each, one after the other. answers: of each text, sorted by the needle's depth, where they end in letters and digits."""

    text: str
    n_ctx: int
    answers: list[list[int]]

    def score(self, logits: BaseLogits, letters: Sequence[str]) -> NeedleScores:
        """Score the answers in the logits of these texts. letters: of each token of the vocabulary."""
        tokens = logits.read_tokens().ravel()
        token_at = index_letters([letters[token] for token in tokens], self.text)
        right, log_p = np.zeros((2, len(self.answers), N_NEEDLES))
        for i, ends in enumerate(self.answers):
            rows, first_row = logits.read_chunk(i), i * self.n_ctx + self.n_ctx // 2 + 1  # row 0 predicts this token
            for j, end in enumerate(ends):
                answer = np.unique(token_at[end - N_DIGITS : end])
                predicted = to_log_probabilities(rows[answer - first_row], logits.n_vocab)
                right[i, j] = (predicted.argmax(1) == tokens[answer]).all()
                log_p[i, j] = predicted[np.arange(len(answer)), tokens[answer]].sum(dtype=np.float64)
        return NeedleScores(100 * right, log_p)


@dataclass(frozen=True)
class NeedleScores:
    """Scores of answers, or their differences between two models: (n_texts, N_NEEDLES), sorted by depth.

    Attributes:
        right: 100 if all tokens of the answer are the most probable ones, else 0.
        log_p: log-probability of the answer in nats.
    """

    right: np.ndarray
    log_p: np.ndarray

    def __sub__(self, other: NeedleScores) -> NeedleScores:
        return NeedleScores(self.right - other.right, self.log_p - other.log_p)

    def totals(self) -> tuple[Figure, Figure]:
        """Return the percentage of right answers and the mean log-probability. Texts are independent samples, needles in them are not."""
        return mean_over_samples(self.right.mean(1, keepdims=True))[0], mean_over_samples(self.log_p.mean(1, keepdims=True))[0]

    def by_depth(self) -> tuple[list[Figure], list[Figure]]:
        """Return both figures for N_DEPTHS ranges of depths."""
        right, log_p = (mean_over_samples(a.reshape(len(a), N_DEPTHS, PER_DEPTH).mean(2)) for a in (self.right, self.log_p))
        return right, log_p

    def record(self) -> dict:
        keys = "right", "log_probability"
        figures = zip(keys, self.totals(), self.by_depth(), strict=True)
        return {"texts": len(self.right), **{key: {"total": list(total), "by_depth": list(map(list, depths))} for key, total, depths in figures}}


def list_letters(file: GGUFFile) -> list[str]:
    """Return the letters and digits of each token of a vocabulary."""
    tokens = file.strings("tokenizer.ggml.tokens") or []
    kinds = file.integers("tokenizer.ggml.token_type") or [TOKEN_KINDS[0]] * len(tokens)
    return [OTHERS.sub("", token) if kind in TOKEN_KINDS else "" for token, kind in zip(tokens, kinds, strict=True)]


def index_letters(tokens: Sequence[str], text: str) -> np.ndarray:
    """Return the token of each letter and digit of a text. tokens: their letters; may be those of a beginning of the text.

    UserError if they are not the text's.
    """
    if not OTHERS.sub("", text).startswith("".join(tokens)):
        raise UserError("--needle: the model's tokenizer changes letters or digits, so the answers cannot be found: drop --needle")
    return np.repeat(np.arange(len(tokens)), [len(token) for token in tokens])


def write_needle_texts(filler: str, n_ctx: int, n_texts: int, tokenize: Callable[[str], list[str]]) -> NeedleTexts:
    """Hide needles in n_texts pieces of a text. UserError if it is too short or n_ctx too small.

    Args:
        filler: the text, of which lines in ASCII are used; repeated if it is too short.
        tokenize: returns the letters of each token of a text, as index_letters() takes them.
    """
    # positions would jump in lines without ASCII letters; programs read some backslashes as escapes
    lines = [line for line in filler.splitlines(keepends=True) if line.isascii() and "\\" not in line]
    hay = _Hay.measure("".join(lines), (n_texts + 1) * n_ctx, tokenize)
    sentences = [_sentences(i) for i in range(n_texts)]
    n_sentence = len(tokenize("\n".join(sum(sentences, [])))) / (n_texts * N_NEEDLES) + 1
    slack = 32 + n_ctx // 32
    n_hay = n_ctx - slack - int((2 * N_NEEDLES + 1) * n_sentence)
    if n_hay < n_ctx // 2:
        raise UserError(
            f"--needle: {N_NEEDLES} sentences and their repetitions need {n_ctx - n_hay} tokens, at most half of the {n_ctx} tokens of a text: pass "
            f"--ctx-size {-(-2 * (n_ctx - n_hay) // 256) * 256} or more"
        )
    lengths = np.full(n_texts, n_hay)
    for _ in range(ROUNDS):
        text, answers, starts = _compose(hay, sentences, lengths, slack)
        token_at = index_letters(tokenize(text), text)
        drift = token_at[starts] - n_ctx * np.arange(n_texts + 1)
        if -lengths.min() / (2 * N_NEEDLES) < drift.min() and drift.max() < slack // 2:  # the first needle and the last question are in the chunk
            return NeedleTexts(text, n_ctx, answers)
        lengths -= np.diff(drift)
    raise UserError("--needle: the lengths of the texts cannot be set with this tokenizer: pass a larger --ctx-size")


def _sentences(seed: int) -> list[str]:
    """Return the needles of a text: no colour, place or number occurs twice."""
    rng = random.Random(seed)
    parts = rng.sample(COLOURS, N_NEEDLES), rng.sample(PLACES, N_NEEDLES), rng.sample(range(10 ** (N_DIGITS - 1), 10**N_DIGITS), N_NEEDLES)
    return [f"The pass number of the {colour} {place} is {number}.\n" for colour, place, number in zip(*parts, strict=True)]


@dataclass(frozen=True)
class _Hay:
    """A long text. token_at: the token at each character."""

    text: str
    token_at: np.ndarray

    @classmethod
    def measure(cls, text: str, n_tokens: int, tokenize: Callable[[str], list[str]]) -> _Hay:
        """Repeat a text until it has n_tokens. UserError if it is very short."""
        tokens = tokenize(text)
        if len(tokens) < 256:
            raise UserError(f"--needle: the text has {len(tokens)} tokens in lines of ASCII characters, needs 256: pass another one with -f")
        n_repeats = -(-n_tokens // len(tokens)) + 1
        letters = np.array([not OTHERS.match(character) for character in text])
        token_at = np.append(index_letters(tokens, text), len(tokens))[np.cumsum(letters) - letters]
        return cls(text * n_repeats, np.concatenate([token_at + i * len(tokens) for i in range(n_repeats)]))

    def cut(self, n_tokens: float, at_line: bool) -> int:
        """Return the first end of a line, if it is near, or else of a word, after n_tokens."""
        start = int(np.searchsorted(self.token_at, n_tokens))
        line = self.text.find("\n", start, start + LINE) if at_line else -1
        match = END_OF_WORD.search(self.text, start if line < 0 else line)
        return match.end() if match else len(self.text)


def _compose(hay: _Hay, sentences: list[list[str]], lengths: np.ndarray, slack: int) -> tuple[str, list[list[int]], list[int]]:
    """Join hay and needles to texts with `lengths` tokens of hay before the questions and `slack` behind them.

    Returns the text, the ends of the answers by depth, and where each text begins and the last one ends, in letters and digits.
    """
    parts: list[str] = []
    n_letters = position = 0
    answers, starts = [], [0]

    def add(part: str) -> int:
        nonlocal n_letters
        parts.append(part)
        n_letters += len(OTHERS.sub("", part))
        return n_letters

    def add_hay(n_tokens: float, at_line: bool = True) -> None:
        """Add hay up to n_tokens of all hay."""
        nonlocal position
        end = max(hay.cut(n_tokens, at_line), position)
        add(hay.text[position:end])
        position = end

    for i, hidden in enumerate(sentences):
        first = int(hay.token_at[position])
        for depth, sentence in enumerate(hidden):
            add_hay(first + lengths[i] * (depth + 0.5) / N_NEEDLES)
            add("\n" + sentence)
        add_hay(first + lengths[i])
        add("\n" + ASKED)
        ends = {j: add(hidden[j]) for j in random.Random(i).sample(range(N_NEEDLES), N_NEEDLES)}
        answers.append([ends[j] for j in range(N_NEEDLES)])
        add_hay(first + lengths[i] + slack, at_line=False)
        starts.append(n_letters)
    add("\n" + hay.text[position:hay.cut(hay.token_at[position] + 2 * slack, at_line=False)])
    return "".join(parts), answers, starts
