"""Groups of tensor types: which are floats, which encoders use calibration statistics, and what replaces a type that does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import TYPES, TypeInfo
from .names import unknown_type_message

_G = GGMLQuantizationType

DITTO3, Q2_0 = GGMLQuantizationType["DITTO3"], GGMLQuantizationType["Q2_0"]
FLOAT_TYPES = (_G.F32, _G.F16, _G.BF16)
SOURCE_TYPES = (*FLOAT_TYPES, _G.Q8_0)  # quantizing from these loses next to nothing
INTEGER_TYPES = (_G.I8, _G.I16, _G.I32, _G.I64)
ACTIVATION_TYPES = (_G.Q8_1, _G.Q8_K, *(_G(int(t.id)) for t in TYPES.values() if t.kind == "activation"))
COPIED_TYPES = (_G.F64, *INTEGER_TYPES, *ACTIVATION_TYPES)  # hold no weights
UNWEIGHTED_TYPES = (*SOURCE_TYPES, _G.TQ1_0, _G.TQ2_0)  # no calibration changes these
# llama.cpp's types whose encoders here use a Hessian: ggml_ext/encode/upstream-layouts.h and upstream-codebook-layouts.h
SCALAR_TYPES = (
    _G.Q2_K, _G.Q3_K, _G.Q4_K, _G.Q5_K, _G.Q6_K, _G.IQ4_XS, _G.IQ4_NL, _G.Q4_0, _G.Q4_1, _G.Q5_0, _G.Q5_1, _G.Q1_0, Q2_0, _G.MXFP4, _G.NVFP4,
)
CODEBOOK_TYPES = (_G.IQ3_S, _G.IQ3_XXS, _G.IQ2_S, _G.IQ2_XS, _G.IQ2_XXS)
IMATRIX_TYPES = (_G.IQ3_XXS, _G.IQ2_XXS, _G.IQ2_XS, _G.IQ2_S, _G.IQ1_M, _G.IQ1_S)  # cannot be encoded without one
TARGET_TYPES = {t.name.lower(): t for t in _G if t not in COPIED_TYPES}


def parse_type(name: str, flag: str) -> GGMLQuantizationType:
    """Return the type with that name, in any case. Raise UserError naming the flag and the known types."""
    try:
        return TARGET_TYPES[name.lower()]
    except KeyError:
        raise UserError(unknown_type_message(flag, name, sorted(TARGET_TYPES))) from None


def type_info(qtype: GGMLQuantizationType) -> TypeInfo | None:
    """Return the row of a ggml-ext type in the table of types; None for llama.cpp's types."""
    return TYPES.get(qtype.name.lower())


def metric_name(qtype: GGMLQuantizationType) -> str | None:
    """Name the form in which an encoder uses the Hessian; None if it uses the diagonal only. All scalar types share one."""
    if qtype in SCALAR_TYPES:
        return "scalar"
    return qtype.name if type_info(qtype) is not None or qtype in CODEBOOK_TYPES else None


def uses_metric(qtype: GGMLQuantizationType) -> bool:
    """Whether an encoder uses the Hessian, not its diagonal only."""
    return metric_name(qtype) is not None


def fallback_chain(qtype: GGMLQuantizationType) -> Iterator[GGMLQuantizationType]:
    """Yield the fallbacks of a ggml-ext type down to llama.cpp's: itq3_t64, itq3_t32, iq4_nl for itq3_t. llama.cpp's types have none here."""
    while (info := type_info(qtype)) and info.fallback:
        qtype = GGMLQuantizationType[info.fallback.upper()]
        yield qtype


def accurate_upstream_type(qtype: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the upstream type that replaces a ggml-ext type whose error is too large: another ggml-ext type has the same scale limits."""
    return next(t for t in fallback_chain(qtype) if type_info(t) is None)
