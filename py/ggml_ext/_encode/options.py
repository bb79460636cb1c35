"""Options of the encoders, and the codec that they select."""

from __future__ import annotations

from dataclasses import dataclass

from .._base.errors import UserError
from .._base.option import option
from .._base.types import WEIGHT_TYPES
from .._native import library
from .codec import CODEBOOKS, EFFORTS, ENCODERS, Codec

TRELLIS_TYPES = [name for name, info in WEIGHT_TYPES.items() if info.trellis_values]


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The options of the encoders."""

    itq3_levels: int = option(
        8, choices=(8, 3), record=1, record_for=["itq3_s"], help="itq3_s: number of levels; 3 is the paper's ternary (default: 8)"
    )
    ditto_codebook: str = option(
        CODEBOOKS[0], choices=CODEBOOKS, record=2, record_for=["ditto3"],
        help="ditto3: a codebook per block, as llama-quantize writes, or the paper's one per tensor (default: block)",
    )
    effort: str = option(
        "normal", choices=tuple(EFFORTS), record=3, record_for=TRELLIS_TYPES,
        help="scale candidates of itq*_t (1; 2 to 6; 6), sweeps of standard types (1; 2; 4); fast: no --propagate (default: normal)",
    )
    encoder: str = option(
        ENCODERS[0], choices=ENCODERS, in_command=False, help="implementation of the encoders; auto: c, else numpy; the bytes are the same (default: auto)"
    )

    def load(self, n_threads: int) -> Codec:
        """Make the codec. Raise UserError if --encoder c needs the library, which is missing."""
        lib = None if self.encoder == "numpy" else library.load()
        if lib is None and self.encoder == "c":
            raise UserError(
                "--encoder c: the library was not built with this package: reinstall ggml-ext with a C compiler, or "
                "leave out --encoder"
            )
        return Codec(lib, self.itq3_levels, self.ditto_codebook, self.effort, n_threads=n_threads)
