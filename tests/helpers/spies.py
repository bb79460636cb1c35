"""Record the quantizer's calls of the library."""

from __future__ import annotations

from ggml_ext import quantize as program
from ggml_ext._native import library


class Spy:
    """Run the quantizer in this process. Record the metrics that it makes and uses, and encode without them."""

    def __init__(self, monkeypatch, lib):
        self.metrics, self.used = [], {}
        plain = library.Library.quantize

        def metric(_, type_id, n_per_row, triangles, is_full, shrinkage, segment=32, n_threads=1):
            self.metrics.append((type_id, n_per_row, is_full, triangles.copy()))
            return len(self.metrics) - 1

        def quantize(self_, type_id, rows, levels=0, importance=None, codebook=None, trellis_passes=0, metric=None, upstream_sweeps=0):
            self.used.setdefault(type_id, []).append((metric, len(rows)))
            return plain(self_, type_id, rows, levels, importance, codebook, trellis_passes)

        monkeypatch.setattr(library.Library, "metric", metric)
        monkeypatch.setattr(library.Library, "quantize", quantize)

    def run(self, *args) -> None:
        assert program.main([*map(str, args), "--threads", "2"]) == 0
