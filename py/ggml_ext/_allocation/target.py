"""What the quantizer's --target-size, --target-bpw and --target-kld say: the limit, and the types to choose from (choice.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import WEIGHT_TYPES
from .._formats.tensor_types import parse_type

AUTO = "auto"
KINDS = ("size", "bpw", "kld")
PLACEHOLDER = "itq3_t"  # in the plan, for types that are still to be chosen
# What lies on or near the frontier of error against bits; the others cost time to measure. The type of the input joins them.
DEFAULT_TYPES = ("itq2_t", "itq2_t64", "itq3_t", "itq3_t64", "itq4_t", "itq4_t64", "q4_k", "ditto5", "q6_k", "q8_0")
# The same with --stock: what ggml_ext/encode/upstream-scalars.c and upstream-codebooks.c make, which every llama.cpp loads.
STOCK_TYPES = ("iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_k", "q5_k", "q6_k", "q8_0")
ALL_TYPES = (
    *WEIGHT_TYPES, "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "f16",
)
SENSITIVITIES = ("measured", "usual")
SIZE_UNITS = {"": 0, "B": 0, "BYTES": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}


def parse_size(text: str) -> int:
    """Bytes of "10.5GiB", "800 MB", "1e9"; K, M, G and T alone are powers of ten as in llama-gguf-split. UserError for others."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = found[2].upper() if found else ""
    if found and unit in SIZE_UNITS:
        size = float(found[1]) * 1000 ** SIZE_UNITS[unit]
    elif found and unit[1:] == "IB" and unit[0] in "KMGT":
        size = float(found[1]) * 1024 ** SIZE_UNITS[unit[0]]
    else:
        size = 0.0
    if not 1 <= size < 1e18:
        raise UserError(f"--target-size: got {text!r}, must be a size such as 10.5GiB, 700MB or 1500000000")
    return int(size)


@dataclass(frozen=True)
class Target:
    """kind: "size" (bytes of the file), "bpw" (bits a weight of all tensors) or "kld" (KL divergence). text: as it was given.
    types: to choose from, which that of the input joins where no option lists them. is_stock: the file is for every llama.cpp."""

    kind: str
    value: float
    text: str
    types: tuple[GGMLQuantizationType, ...]
    types_are_listed: bool
    is_stock: bool = False

    @property
    def option(self) -> str:
        return f"target-{self.kind}={self.text}"


def parse_target(
    type_name: str | None, limits: Mapping[str, str | None], types: str | None, others: Sequence[str], stock: bool = False
) -> Target | None:
    """The target of the options, None where there is none; UserError naming the flag. type_name: of --type; limits: by kind of target
    what is given; types: of --target-types; others: flags that are given and choose types themselves; stock: --stock is given."""
    given = [kind for kind in KINDS if limits[kind] is not None]
    auto = type_name is not None and type_name.lower() == AUTO
    if not given:
        if types is not None:
            raise UserError("--target-types belongs to --target-size, --target-bpw or --target-kld, and none is given")
        if stock:
            raise UserError(
                "--stock belongs to --target-size, --target-bpw or --target-kld, and none is given; --type with the name of a stock type, such "
                "as q4_k_m, makes a stock file by itself"
            )
        if auto:
            raise UserError("--type auto: pass --target-size, --target-bpw or --target-kld, which choose the types")
        if type_name is None:
            raise UserError(
                "the following arguments are required: --type, or one of --target-size, --target-bpw and --target-kld; see --help"
            )
        return None
    if len(given) > 1:
        raise UserError(f"--target-{given[0]} and --target-{given[1]}: pass one of them")
    kind = given[0]
    if type_name is not None and not auto:
        raise UserError(
            f"--type {type_name} and --target-{kind}: pass one of them, or --type auto; --target-types {type_name} limits the "
            "choice"
        )
    for flag in others:
        raise UserError(f"{flag} and --target-{kind}: a target chooses the type of each tensor; leave one out")
    candidates, text = parse_types(types, stock), limits[kind]
    assert text is not None
    value = parse_size(text) if kind == "size" else _parse_number(kind, text)
    return Target(kind, value, text, types=candidates, types_are_listed=types is not None, is_stock=stock)


def _parse_number(kind: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--target-{kind}: got {text!r}, must be a number above 0, such as {3.3 if kind == 'bpw' else 0.05}")
    return value


def parse_types(text: str | None, stock: bool = False) -> tuple[GGMLQuantizationType, ...]:
    """Of --target-types; None: the default ones. UserError for one of ours with --stock."""
    names: Sequence[str]
    if text is None:
        names = STOCK_TYPES if stock else DEFAULT_TYPES
    elif text.strip().lower() == "all":
        names = [name for name in ALL_TYPES if not (stock and name in WEIGHT_TYPES)]
    else:
        names = [name.strip() for name in text.split(",")]
    if stock and (ours := [name for name in names if name.lower() in WEIGHT_TYPES]):
        raise UserError(f"--target-types: {ours[0]} is a type of ggml-ext, which a stock file cannot hold: leave it or --stock out")
    return tuple(dict.fromkeys(parse_type(name, "--target-types") for name in names))
