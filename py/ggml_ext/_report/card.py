"""Model cards for the Hugging Face hub: Markdown with front matter, from the file's metadata and from what was measured.

What is not in the metadata and was not measured is left out. Keys of the front matter: the hub's documentation of model cards.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.encoding import to_argument, to_utf8
from .._base.package import __version__
from .._base.types import TYPES
from .._base.units import MIB
from .._calibration.importance import BUILT_IN, Importance
from .._encode.accuracy import MeasuredTensor, sum_errors
from .._formats.gguf_file import GGUFFile, bits_per_weight
from .._formats.names import tensor_class
from .._native import library
from .._plan.plan import QuantizationPlan

HUB = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+?)(?:\.git)?/?$")
YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
KIND_NAMES = {"diagonal": "mean squares", "block": "second moments of blocks", "full": "second moments of whole inputs"}
# where the metadata say which model this is
MODEL_KEYS = ("general.repo_url", "general.source.repo_url", "general.url", "general.source.url")


@dataclass(frozen=True)
class Card:
    """The model card of a file."""

    outputs: Sequence[Path]  # of a split file all parts, else one
    source: GGUFFile
    plan: QuantizationPlan
    tensors: Sequence[MeasuredTensor]
    title: str  # of the requested type
    importance: str  # the calibration statistics, within a sentence
    errors_of: str  # what the errors are measured against
    command: str
    repo: str | None = None  # ORG/NAME that the model came from, where the command says so

    def text(self) -> str:
        title = f"# {self._name()}, {self.title}"
        parts = [self._front_matter(), title, self._what(), self._how_to_run(), self._table(), self._how_made()]
        return "\n\n".join(parts) + "\n"

    # --- front matter ---

    def _text(self, key: str) -> str | None:
        value = self.source.value(key)
        return _line(value) if isinstance(value, str) and value.strip() else None

    def base_models(self) -> tuple[list[str], bool]:
        """Names on the hub, and whether they are the model itself and not those that it was made from."""
        found = self.repo or next((m[1] for key in MODEL_KEYS if (m := HUB.match(self._text(key) or ""))), None)
        if found:
            return [found], True
        count = self.source.value("general.base_model.count")
        urls = (self._text(f"general.base_model.{i}.repo_url") for i in range(min(count, 64) if isinstance(count, int) else 0))
        return [m[1] for url in urls if (m := HUB.match(url or ""))], False

    def _uses_ours(self) -> bool:
        return any(t.type.name.lower() in TYPES for t in self.plan.tensors)

    def _front_matter(self) -> str:
        models, is_itself = self.base_models()
        ours = ["ggml-ext"] if self._uses_ours() else []
        fields: dict[str, str | list[str] | None] = {
            "base_model": models,
            "base_model_relation": "quantized" if is_itself else None,
            "license": self._text("general.license"),
            "license_name": self._text("general.license.name"),
            "license_link": self._text("general.license.link"),
            "language": self.source.strings("general.languages") or [],
            "library_name": "gguf",
            "tags": list(dict.fromkeys([*(self.source.strings("general.tags") or []), "gguf", "llama.cpp", *ours])),
            "quantized_by": self._text("general.quantized_by") or "ggml-ext",
        }
        lines = ["---"]
        for key, value in fields.items():
            if isinstance(value, list):
                lines += [f"{key}:", *(f"- {_yaml(v)}" for v in value)] if value else []
            elif value:
                lines.append(f"{key}: {_yaml(value)}")
        return "\n".join([*lines, "---"])

    # --- text ---

    def _name(self) -> str:
        return _escaped(self._text("general.name") or self.source.stem)

    def _what(self) -> str:
        models, is_itself = self.base_models()
        plan = self.plan
        n_bytes = sum(path.stat().st_size for path in self.outputs)
        blocks = plan.layers_bpw()
        in_blocks = "" if blocks is None else f"{blocks:.5g} bits a weight in the layers, "
        name = f"[{models[0]}](https://huggingface.co/{models[0]})" if is_itself else self._name()
        lines = [
            f"{name} as {self.title}: {in_blocks}{plan.size_after() * 8 / max(plan.n_elements(), 1):.2f} in all, "
            f"{plan.n_elements():,} weights, {n_bytes / MIB:,.1f} MiB."
        ]
        if models and not is_itself:
            lines.append(f"The model was made from {', '.join(models)}.")
        return " ".join(lines)

    def _how_to_run(self) -> str:
        first = shlex.quote(_line(to_argument(self.outputs[0].name)))
        needs = (
            "It needs the package ggml-ext, which holds a llama.cpp that knows the types; others refuse the file."
            if self._uses_ours()
            else "All types are llama.cpp's own: every program that is built on it runs the file."
        )
        return f"## Run\n\n{needs}\n\n    llama-server -m {first}\n    llama-cli -m {first}"

    def _table(self) -> str:
        groups: dict[tuple[str, GGMLQuantizationType], list[MeasuredTensor]] = {}
        for t in self.tensors:
            groups.setdefault((tensor_class(t.planned.name), t.planned.type), []).append(t)
        is_weighted = any(t.accuracy.weighted is not None for t in self.tensors)
        heads = ["tensors", "count", "weights", "type", "bits a weight", "relative squared error"]
        heads += ["weighted"] if is_weighted else []
        lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        for (name, qtype), members in groups.items():
            n = sum(t.planned.tensor.n_elements for t in members)
            total = sum_errors(members)
            error = f"{total.relative:.3g}" if any(t.planned.is_changed for t in members) else "as it was"
            cells = [_escaped(name), str(len(members)), f"{n:,}", qtype.name, f"{bits_per_weight(qtype):.5g}", error]
            if is_weighted:
                cells.append("" if total.weighted is None else f"{total.weighted:.3g}")
            lines.append(f"| {' | '.join(cells)} |")
        weighted = ", weighted ones the same as they count for the inputs that the importance data saw" if is_weighted else ""
        return "\n".join([
            "## What is in it", "", *lines, "",
            f"Errors are |w - w'|^2 / |w|^2 of the stored weights w' against {_escaped(self.errors_of)}{weighted}. They were measured "
            "while the file was written; they are no measure of the text that the model writes.",
        ])

    def _how_made(self) -> str:
        llama_cpp, ggml = library.upstream_versions()
        return (
            f"## How it was made\n\nWith ggml-ext {__version__} (llama.cpp {llama_cpp}, ggml {ggml}). Importance of the inputs: "
            f"{_escaped(self.importance)}.\n\n    {_line(self.command)}"
        )


def _line(text: str) -> str:
    """On one line, without what neither YAML nor Markdown can hold: control characters are blanks."""
    return "".join(c if c.isprintable() else " " for c in to_utf8(text)).strip()


def _escaped(text: str) -> str:
    """As Markdown shows it: names are no markup."""
    return re.sub(r"([\\`\[\]<>|#])", r"\\\1", _line(text))


def _yaml(text: str) -> str:
    """Plain where YAML takes it for this string; else in double quotes, as in JSON."""
    text = _line(text)
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and text.lower() not in YAML_WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def describe_importance(importance: Importance) -> str:
    """For the card: no folders of the machine that it was made on."""
    if importance.matrix is None:
        return "none"
    text = importance.calibration
    of_text = "" if not text else f", of the {text} text" if text == BUILT_IN else f", of {Path(text).name}"
    return f"{KIND_NAMES[importance.kind]} ({importance.kind}){of_text}, from {importance.matrix.path.name}"


def recorded_importance(file: GGUFFile) -> str | None:
    """What a file of the quantizer says that it was made with."""
    kind, text = file.value("ggml_ext.importance"), file.value("ggml_ext.calibration")
    if not isinstance(kind, str):
        return None
    return f"{kind}{f', calibrated with {Path(text).name}' if isinstance(text, str) and text else ''}"
