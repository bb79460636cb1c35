"""Parse --target-size, --target-bpw and --target-kld, and the types that they choose from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import WEIGHT_TYPES
from .._formats.tensor_types import metric_name, parse_type

AUTO = "auto"
KINDS = ("size", "bpw", "kld")
PLACEHOLDER = "itq3_t"  # type in the plan until allocation has chosen one
# The types near the Pareto frontier of error and size; measuring others takes time. Allocation adds the type of the input.
DEFAULT_TYPES = ("itq2_t", "itq2_t64", "itq3_t", "itq3_t64", "itq4_t", "itq4_t64", "q4_k", "ditto5", "q6_k", "q8_0")
# Candidates only if the limit is near or below the smallest file of the default types. The predicted KL divergence is linear in the error, which
# holds only for small errors, so at larger limits these types would be chosen too often.
LOW_TYPES = tuple(name for name, info in WEIGHT_TYPES.items() if info.bpw < 2)
# With --stock: q8_0, and most of the upstream types that ggml_ext/encode/upstream-scalars.c and upstream-codebooks.c encode with error
# feedback. --target-types all adds the others.
UPSTREAM_TYPES = ("iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_k", "q5_k", "q6_k", "q8_0")
ALL_TYPES = (
    *WEIGHT_TYPES, "q1_0", "iq1_s", "iq1_m", "iq2_xxs", "q2_0", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl",
    "mxfp4", "nvfp4", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "f16",
)
MEASURED, USUAL = "measured", "usual"  # sensitivities: of this model, or those of the reference model
SENSITIVITIES = (MEASURED, USUAL)
SIZE_UNITS = {"": 0, "B": 0, "BYTES": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}


def parse_size(text: str) -> int:
    """Parse a size such as "10.5GiB", "800 MB" or "1e9"; K, M, G and T are powers of ten as in llama-gguf-split."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    if match and unit in SIZE_UNITS:
        size = float(match[1]) * 1000 ** SIZE_UNITS[unit]
    elif match and unit[1:] == "IB" and unit[0] in "KMGT":
        size = float(match[1]) * 1024 ** SIZE_UNITS[unit[0]]
    else:
        size = 0.0
    if not 1 <= size < 1e18:
        raise UserError(f"--target-size: got {text!r}, must be a size such as 10.5GiB, 700MB or 1500000000")
    return int(size)


@dataclass(frozen=True)
class Target:
    """A limit of size or quality, and the candidate types."""

    kind: str  # of KINDS: bytes of the file, bits per weight over all tensors, or KL divergence
    value: float
    text: str  # the option's value, as typed
    types: tuple[GGMLQuantizationType, ...]
    types_are_listed: bool  # by --target-types; else the type of the input is a candidate too
    upstream_only: bool = False  # --stock

    @property
    def n_metrics(self) -> int:
        """Number of different factorizations of a Hessian among the types."""
        return len({name for qtype in self.types if (name := metric_name(qtype))})

    @property
    def option(self) -> str:
        return f"target-{self.kind}={self.text}"


def parse_target(
    type_name: str | None, limits: Mapping[str, str | None], types: str | None, others: Sequence[str], upstream_only: bool = False
) -> Target | None:
    """Parse the options of a target; return None without one.

    Args:
        type_name: --type.
        limits: the options' values by kind of target.
        types: --target-types.
        others: flags on the command line that conflict with a target.
        upstream_only: --stock.

    Raises:
        UserError: naming the flag.
    """
    kinds = [kind for kind in KINDS if limits[kind] is not None]
    auto = type_name is not None and type_name.lower() == AUTO
    if not kinds:
        if types is not None:
            raise UserError("--target-types needs --target-size, --target-bpw or --target-kld")
        if upstream_only:
            raise UserError(
                "--stock needs --target-size, --target-bpw or --target-kld; without a target, a standard type such as --type q4_k_m is enough"
            )
        if auto:
            raise UserError("--type auto: pass --target-size, --target-bpw or --target-kld, which choose the types")
        if type_name is None:
            raise UserError(
                "the following arguments are required: --type, or one of --target-size, --target-bpw and --target-kld; see --help"
            )
        return None
    if len(kinds) > 1:
        raise UserError(f"--target-{kinds[0]} and --target-{kinds[1]}: pass one of them")
    kind = kinds[0]
    if type_name is not None and not auto:
        raise UserError(
            f"--type {type_name} and --target-{kind}: pass one of them, or --type auto; --target-types {type_name} limits the "
            "choice"
        )
    for flag in others:
        raise UserError(f"{flag} and --target-{kind}: a target chooses the type of each tensor; pass one of them")
    candidates, text = parse_types(types, upstream_only), limits[kind]
    assert text is not None
    value = parse_size(text) if kind == "size" else _parse_number(kind, text)
    return Target(kind, value, text, types=candidates, types_are_listed=types is not None, upstream_only=upstream_only)


def _parse_number(kind: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--target-{kind}: got {text!r}, must be a number above 0, such as {3.3 if kind == 'bpw' else 0.05}")
    return value


def parse_types(text: str | None, upstream_only: bool = False) -> tuple[GGMLQuantizationType, ...]:
    """Parse --target-types; None for the default types. UserError for a ggml-ext type with --stock."""
    names: Sequence[str]
    if text is None:
        names = UPSTREAM_TYPES if upstream_only else DEFAULT_TYPES
    elif text.strip().lower() == "all":
        names = [name for name in ALL_TYPES if not (upstream_only and name in WEIGHT_TYPES)]
    else:
        names = [name.strip() for name in text.split(",")]
    if upstream_only and (ext_names := [name for name in names if name.lower() in WEIGHT_TYPES]):
        raise UserError(f"--target-types: {ext_names[0]} is a ggml-ext type, and --stock allows standard types only: drop one of them")
    return tuple(dict.fromkeys(parse_type(name, "--target-types") for name in names))
