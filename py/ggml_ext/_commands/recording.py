"""The quality of a file as evaluate --write and quantize --evaluate record it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from .._base.package import __version__
from .._evaluation.figures import BASE_PPL, KLD, KLD_99, PPL, SAME_TOP, Figure
from .._evaluation.logits import BaseLogits
from .._formats.gguf_file import GGUFFile
from .._formats.quality import RecordedQuality

DEVICE = re.compile(r"using device \S+ \((.+?)\) \(")  # in the log of llama.cpp's loader
LOGITS = "source 16 bits, file 32 bits"  # what llama-perplexity --kl-divergence compares


def make_recorded_quality(
    statistics: Mapping[str, Figure], log: str, *, source: GGUFFile, text: Path, text_name: str, logits: BaseLogits
) -> RecordedQuality:
    """Make the record of a comparison.

    Args:
        statistics: of the file, by llama-perplexity's names.
        log: of its run, which names the devices.
        source: the model that the file was compared with.
        text: that was scored.
        text_name: what to call it.
        logits: of the source.
    """

    def figure(name: str) -> tuple[float, float]:
        value, error = statistics[name]
        return value, error or 0.0

    (perplexity, perplexity_error), (source_perplexity, source_error) = figure(PPL), figure(BASE_PPL)
    (kld, kld_error), (top_1, top_1_error) = figure(KLD), figure(SAME_TOP)
    return RecordedQuality(
        perplexity=perplexity, perplexity_error=perplexity_error, source_perplexity=source_perplexity, source_perplexity_error=source_error,
        kl_divergence=kld, kl_divergence_error=kld_error, kl_divergence_99=figure(KLD_99)[0], top_1=top_1, top_1_error=top_1_error,
        tokens=logits.n_scored, chunks=logits.n_chunks, context=logits.n_ctx, text=text_name,
        text_sha256=hashlib.sha256(text.read_bytes()).hexdigest(), source=source.path.name,
        devices=", ".join(dict.fromkeys(DEVICE.findall(log))) or "CPU", logits=LOGITS, version=__version__,
    )
