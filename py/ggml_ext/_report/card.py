"""Write model cards for the Hugging Face hub: Markdown with front matter, from the file's metadata and the measured errors.

The keys of the front matter are those of the hub's documentation of model cards.
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
from .._formats.quality import RecordedQuality
from .._native import library
from .._plan.plan import QuantizationPlan
from .recorded_quality import recorded_section

HUB = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+?)(?:\.git)?/?$")
YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
KIND_NAMES = {"diagonal": "diagonal Hessian (imatrix)", "block": "block-diagonal Hessian", "full": "full Hessian"}
# metadata with the address of the model
MODEL_KEYS = ("general.repo_url", "general.source.repo_url", "general.url", "general.source.url")


@dataclass(frozen=True)
class Card:
    """The model card of a file."""

    outputs: Sequence[Path]  # all parts of a split model, else one file
    source: GGUFFile
    plan: QuantizationPlan
    tensors: Sequence[MeasuredTensor]
    title: str  # of the requested type
    importance: str  # the calibration statistics
    reference: str  # the model that errors are measured against
    command: str
    repo: str | None = None  # ORG/NAME of --hf-repo
    quality: RecordedQuality | None = None  # in the file's metadata

    def text(self) -> str:
        title = f"# {self._name()}, {self.title}"
        parts = [self._front_matter(), title, self._description(), self._usage(), self._table(), self._provenance()]
        if self.quality is not None:
            parts.insert(4, "\n".join(recorded_section(self.quality)))
        return "\n\n".join(parts) + "\n"

    # --- front matter ---

    def _text(self, key: str) -> str | None:
        value = self.source.value(key)
        return _line(value) if isinstance(value, str) and value.strip() else None

    def base_models(self) -> tuple[list[str], bool]:
        """Return names on the hub, and whether they are this model rather than its base models."""
        name = self.repo or next((m[1] for key in MODEL_KEYS if (m := HUB.match(self._text(key) or ""))), None)
        if name:
            return [name], True
        count = self.source.value("general.base_model.count")
        urls = (self._text(f"general.base_model.{i}.repo_url") for i in range(min(count, 64) if isinstance(count, int) else 0))
        return [m[1] for url in urls if (m := HUB.match(url or ""))], False

    def _has_ext_types(self) -> bool:
        return any(t.type.name.lower() in TYPES for t in self.plan.tensors)

    def _front_matter(self) -> str:
        models, is_itself = self.base_models()
        ext_tags = ["ggml-ext"] if self._has_ext_types() else []
        fields: dict[str, str | list[str] | None] = {
            "base_model": models,
            "base_model_relation": "quantized" if is_itself else None,
            "license": self._text("general.license"),
            "license_name": self._text("general.license.name"),
            "license_link": self._text("general.license.link"),
            "language": self.source.strings("general.languages") or [],
            "library_name": "gguf",
            "tags": list(dict.fromkeys([*(self.source.strings("general.tags") or []), "gguf", "llama.cpp", *ext_tags])),
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

    def _description(self) -> str:
        models, is_itself = self.base_models()
        plan = self.plan
        n_bytes = sum(path.stat().st_size for path in self.outputs)
        bpw = plan.layers_bpw()
        layers = "" if bpw is None else f"{bpw:.5g} bits per weight in the layers, "
        name = f"[{models[0]}](https://huggingface.co/{models[0]})" if is_itself else self._name()
        lines = [
            f"{name} as {self.title}: {layers}{plan.size_after() * 8 / max(plan.n_elements(), 1):.2f} in total, "
            f"{plan.n_elements():,} weights, {n_bytes / MIB:,.1f} MiB."
        ]
        if models and not is_itself:
            lines.append(f"The model was made from {', '.join(models)}.")
        return " ".join(lines)

    def _usage(self) -> str:
        first = shlex.quote(_line(to_argument(self.outputs[0].name)))
        requirement = (
            "It needs the package ggml-ext, whose llama.cpp has these types; other builds of llama.cpp refuse the file."
            if self._has_ext_types()
            else "It has standard GGUF types only: every program that is built on llama.cpp runs it."
        )
        return f"## Run\n\n{requirement}\n\n    llama-server -m {first}\n    llama-cli -m {first}"

    def _table(self) -> str:
        groups: dict[tuple[str, GGMLQuantizationType], list[MeasuredTensor]] = {}
        for t in self.tensors:
            groups.setdefault((tensor_class(t.planned.name), t.planned.type), []).append(t)
        is_weighted = any(t.accuracy.weighted_nmse is not None for t in self.tensors)
        headings = ["tensors", "count", "weights", "type", "bits per weight", "NMSE"]
        headings += ["weighted NMSE"] if is_weighted else []
        lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
        for (name, qtype), members in groups.items():
            n = sum(t.planned.tensor.n_elements for t in members)
            total = sum_errors(members)
            error = f"{total.nmse:.3g}" if any(t.planned.is_changed for t in members) else "unchanged"
            cells = [_escaped(name), str(len(members)), f"{n:,}", qtype.name, f"{bits_per_weight(qtype):.5g}", error]
            if is_weighted:
                cells.append("" if total.weighted_nmse is None else f"{total.weighted_nmse:.3g}")
            lines.append(f"| {' | '.join(cells)} |")
        weighted = " The weighted NMSE is the same under the Hessian of the calibration." if is_weighted else ""
        return "\n".join([
            "## Tensors", "", *lines, "",
            f"NMSE is |w - w'|^2 / |w|^2 for the stored weights w' and the weights w of {_escaped(self.reference)}.{weighted} It was measured during "
            "quantization and does not measure the quality of the model's answers.",
        ])

    def _provenance(self) -> str:
        llama_cpp, ggml = library.upstream_versions()
        return (
            f"## Quantization\n\nQuantized with ggml-ext {__version__} (llama.cpp {llama_cpp}, ggml {ggml}). Calibration: "
            f"{_escaped(self.importance)}.\n\n    {_line(self.command)}"
        )


def _line(text: str) -> str:
    """Put text on one line. Control characters, which YAML and Markdown cannot hold, become spaces."""
    return "".join(c if c.isprintable() else " " for c in to_utf8(text)).strip()


def _escaped(text: str) -> str:
    """Escape the markup characters of Markdown."""
    return re.sub(r"([\\`\[\]<>|#])", r"\\\1", _line(text))


def _yaml(text: str) -> str:
    """Format a string for YAML, in double quotes unless a plain scalar is unambiguous."""
    text = _line(text)
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and text.lower() not in YAML_WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def describe_importance(importance: Importance) -> str:
    """Describe the calibration without the directories of this machine."""
    if importance.kind == "none":
        return "none"
    text = importance.text_name
    source = "" if not text else f", {text} text" if text == BUILT_IN else f", text {Path(text).name}"
    limit = "" if importance.full_columns is None else f" (block-diagonal beyond {importance.full_columns:,} columns)"
    origin = "quantized layers" if importance.matrix is None else importance.matrix.path.name
    return f"{KIND_NAMES[importance.kind]}{limit}{source}, from {origin}{importance.scales_title}"


def recorded_importance(file: GGUFFile) -> str | None:
    """Read from a quantized file's metadata how it was calibrated; None if that is not recorded."""
    kind, text = file.value("ggml_ext.importance"), file.value("ggml_ext.calibration")
    if not isinstance(kind, str):
        return None
    if isinstance(limit := file.value("ggml_ext.importance.full_columns"), int):
        kind += f" up to {limit:,} columns"
    return f"{kind}{f', calibrated with {Path(text).name}' if isinstance(text, str) and text else ''}"
