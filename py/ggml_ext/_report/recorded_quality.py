"""The quality that a file records, for inspect and the model card."""

from __future__ import annotations

from .._formats.quality import RecordedQuality

QUALITY_TITLE = "## Quality"  # in model cards


def quality_lines(quality: RecordedQuality | None, is_of_other_weights: bool) -> list[str]:
    """Format the figures for the terminal; one line if those in the file are of other weights."""
    if is_of_other_weights:
        return ["recorded quality: of other weights or incomplete, not shown; ggml-ext evaluate --write measures it again"]
    if quality is None:
        return []
    q = quality
    return [
        f"recorded quality: KL divergence from {q.source} {_figure(q.kl_divergence, q.kl_divergence_error, 5)}, 99th percentile "
        f"{q.kl_divergence_99:.5f}; top-1 agreement {_figure(q.top_1, q.top_1_error, 2)} %",
        f"perplexity {_figure(q.perplexity, q.perplexity_error, 3)}, that of {q.source} {_figure(q.source_perplexity, q.source_perplexity_error, 3)}",
        f"measured on {_conditions(q)}; text's SHA-256 {q.text_sha256[:16]}...",
    ]


def recorded_section(quality: RecordedQuality) -> list[str]:
    """Format the figures as a section of the model card."""
    q = quality
    rows = [
        ("KL divergence, mean", _figure(q.kl_divergence, q.kl_divergence_error, 5)),
        ("KL divergence, 99th percentile", f"{q.kl_divergence_99:.5f}"),
        ("top-1 agreement", f"{_figure(q.top_1, q.top_1_error, 2)} %"),
        ("perplexity", _figure(q.perplexity, q.perplexity_error, 3)),
        ("perplexity of the original", _figure(q.source_perplexity, q.source_perplexity_error, 3)),
    ]
    return [
        QUALITY_TITLE, "", "| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), "",
        f"Against `{q.source}`, with standard errors, measured on {_conditions(q)}. The text's SHA-256 is `{q.text_sha256}`. The file's metadata has "
        "these figures under `ggml_ext.quality`; `ggml-ext inspect` shows them and checks that they belong to these weights.",
    ]


def _figure(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} +- {error:.{digits}f}"


def _conditions(q: RecordedQuality) -> str:
    text = "the built-in text of ggml-ext" if q.text == "built-in" else f"the text {q.text}"
    return (
        f"{q.tokens:,} tokens of {text} ({q.chunks} chunks of {q.context}, the second half of each scored), {q.devices}; logits: {q.logits}; "
        f"llama-perplexity of ggml-ext {q.version}"
    )
