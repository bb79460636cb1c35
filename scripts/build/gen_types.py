#!/usr/bin/env python3
"""Generate the checked-in lists of types from ggml_ext/types.toml, and the pinned versions from ggml_ext/upstream.toml.

    python scripts/build/gen_types.py            write the files that changed
    python scripts/build/gen_types.py --check    write nothing; name every stale file and exit 1

types.toml lists the files at its top. upstream.toml determines py/ggml_ext/_base/upstream.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TABLE = "ggml_ext/types.toml"
HEADER = "ggml_ext/ggml-ext-types.h"
BLOCKS = "ggml_ext/types/all.h"
CODES = "ggml_ext/types/codes.h"
UNPACKERS = "ggml_ext/cpu/all.h"
DEVICE_UNPACKERS = "cuda/all.cuh"
METAL_UNPACKERS = "metal/all.metal"
VULKAN_BLOCKS = "vulkan/types.glsl"
VULKAN_UNPACKERS = "vulkan/all.glsl"
VULKAN_SIGNS = "vulkan/signs.glsl"
MODULE = "py/ggml_ext/_base/types.py"
PIN = "ggml_ext/upstream.toml"
PIN_MODULE = "py/ggml_ext/_base/upstream.py"
FORMATS = "docs/reference/formats.md"
MARKERS = ("<!-- types:begin -->", "<!-- types:end -->")
NOTICE = f"Generated from {TABLE} by scripts/build/gen_types.py; do not edit."
MAX_BLOCK_SIZE = 256  # QK_K
ACTIVATIONS = {256: "q8_kr", 64: "q8_kr64", 32: "q8_kr32"}  # of trellis types, by block size
UPSTREAM_ACTIVATIONS = ("q8_k",)
# types of token embeddings whose rows the K-quant does not fit: llama.cpp's fallbacks have more bits than most types of the layers
SHORT_TOKEN_EMBD = {"q2_k": "itq2_t64", "q3_k": "itq3_t64", "q4_k": "itq4_t64"}

COMMON_FIELDS = {"name": str, "id": int, "kind": str, "block_size": int, "block_bytes": int, "rotated": bool, "about": str}
WEIGHT_FIELDS = {
    "activation": str, "unpack_min": int, "unpack_max": int, "group": int, "fallback": str, "token_embd": str,
    "output": str, "title": str, "usual_rel_mse": float, "fixture_rel_mse": float,
    "student_t4_rel_mse": float, "hessian_gain": float, "fns_limits": str,
}
# Trellis types have these fields or trellis_code, the type whose code they share. trellis_values: two tables of 16 bytes for each of the weights
TRELLIS_FIELDS = {"trellis_bits": int, "trellis_weights": int, "trellis_states": int, "trellis_values": list, "trellis_offset": float,
                  "trellis_gain": float, "trellis_feedback_gain": float, "trellis_unit": float}
TRELLIS_CODES = ((4, 1, 4096), (3, 1, 4096), (2, 1, 4096), (3, 2, 4096), (2, 2, 4096))  # (bits, weights, states) that ggml_ext/types/trellis.h defines indices for
COLUMN_WIDTHS = (10, 10, 2, 2, 4, 8, 7, 6, 9, 7, 0)  # of the table of trellis types
CODEBOOK_FIELDS = {"codebook": list, "codebook_offset": float}  # types with one codebook for all blocks; the upper 16 codes
OPTIONAL_FIELDS = {"fns_dot_error": float}
# upstream type -> its limits in test-quantize-fns, for weights and for products
FNS_LIMITS = {"iq3_s": ("MAX_QUANTIZATION_TOTAL_ERROR_3BITS", "MAX_DOT_PRODUCT_ERROR_LOWBIT"),
              "iq2_s": ("MAX_QUANTIZATION_TOTAL_ERROR_2BITS", "MAX_DOT_PRODUCT_ERROR_LOWBIT"),
              "q1_0": ("MAX_QUANTIZATION_TOTAL_ERROR_BINARY", "MAX_DOT_PRODUCT_ERROR_BINARY"),
              "tq2_0": ("MAX_QUANTIZATION_TOTAL_ERROR_TERNARY", "MAX_DOT_PRODUCT_ERROR_TERNARY"),
              "q5_k": ("MAX_QUANTIZATION_TOTAL_ERROR", "MAX_DOT_PRODUCT_ERROR")}


class TableError(Exception):
    """types.toml or docs/reference/formats.md is malformed."""


def load_table(text: str) -> tuple[dict, bytes, list[dict]]:
    """Parse and check types.toml.

    Returns:
        The [ids] section with the [[retired]] rows in it, the signs, and the [[type]] rows. A trellis row has the fields of the
        code that it shares, and their owner as trellis_code.

    Raises:
        TableError: a row or field is wrong; the message names it.
    """
    table = tomllib.loads(text)
    ids, signs, types = table["ids"], table["rotation"]["signs"], table["type"]
    ids["retired"] = {row["id"]: row["name"] for row in table.get("retired", [])}
    if not re.fullmatch(f"[0-9a-f]{{{MAX_BLOCK_SIZE // 4}}}", signs):
        raise TableError(f"{TABLE}: rotation: signs is {signs!r}, must be {MAX_BLOCK_SIZE // 4} hexadecimal digits")
    for row in types:
        share_code(row, types)
    for row in types:
        where = f"{TABLE}: type {row.get('name')!r}"
        check_fields(row, where)
        check_values(row, where, ids, types)
        if row["kind"] == "weight":
            row["short_token_embd"] = SHORT_TOKEN_EMBD.get(row["token_embd"], row["token_embd"])
    for field in ("name", "id"):
        values = [row[field] for row in types]
        if twice := sorted({str(v) for v in values if values.count(v) > 1}):
            raise TableError(f"{TABLE}: {field} {', '.join(twice)} is used twice")
    check_fallbacks(types)
    return ids, bytes.fromhex(signs), types


def share_code(row: dict, types: list[dict]) -> None:
    """Copy the trellis fields of the row that trellis_code names; the owner of a code names itself."""
    if code := row.get("trellis_code"):
        owner = next((r for r in types if r.get("name") == code and "trellis_values" in r), None)
        if owner is None:
            raise TableError(f"{TABLE}: type {row.get('name')!r}: trellis_code is {code!r}, must be a type with trellis_values")
        row |= {field: owner.get(field) for field in TRELLIS_FIELDS}
    elif "trellis_values" in row:
        row["trellis_code"] = row.get("name")


def check_fields(row: dict, where: str) -> None:
    """Check that a row has the fields of its kind and no others, each of its type."""
    if row.get("kind") not in ("weight", "activation"):
        raise TableError(f"{where}: kind is {row.get('kind')!r}, must be 'weight' or 'activation'")
    fields = COMMON_FIELDS | (WEIGHT_FIELDS if row["kind"] == "weight" else {})
    for some in (TRELLIS_FIELDS | {"trellis_code": str}, CODEBOOK_FIELDS):
        fields = fields | (some if row.keys() & some else {})
    fields = fields | {field: kind for field, kind in OPTIONAL_FIELDS.items() if field in row}
    for field, kind in fields.items():
        if type(row.get(field)) is not kind:
            raise TableError(f"{where}: field {field!r} is {row.get(field)!r}, must be a {kind.__name__}")
    if unknown := sorted(set(row) - set(fields)):
        raise TableError(f"{where}: unknown field(s) {', '.join(unknown)}")


def check_values(row: dict, where: str, ids: dict, types: list[dict]) -> None:
    if row.get("fns_limits", "iq3_s") not in FNS_LIMITS:
        raise TableError(f"{where}: fns_limits is {row['fns_limits']!r}, must be one of {', '.join(FNS_LIMITS)}")
    if "codebook" in row and ([type(v) for v in row["codebook"]] != [int] * 16 or row["codebook"] != sorted(set(row["codebook"]))):
        raise TableError(f"{where}: field 'codebook' must be 16 ascending integers")
    if not ids["first"] <= row["id"] < ids["count"]:
        raise TableError(f"{where}: id {row['id']} is not in {ids['first']}..{ids['count'] - 1}")
    if row["id"] in ids["retired"]:
        raise TableError(f"{where}: id {row['id']} belonged to an earlier {ids['retired'][row['id']]}; choose an id that no file has")
    if row["block_size"] not in ACTIVATIONS:
        raise TableError(f"{where}: block_size is {row['block_size']}, must be one of {', '.join(map(str, ACTIVATIONS))}")
    if row["kind"] == "weight" and row["activation"] not in (*(r.get("name") for r in types), *UPSTREAM_ACTIVATIONS):
        raise TableError(f"{where}: activation {row['activation']!r} is not in the table")
    if is_trellis(row):
        check_trellis(row, where)


def check_trellis(row: dict, where: str) -> None:
    """Check the properties that all kernels of trellis types rely on."""
    code = bits, weights, _ = tuple(row[f"trellis_{field}"] for field in ("bits", "weights", "states"))
    if code not in TRELLIS_CODES:
        raise TableError(f"{where}: a trellis of (bits, weights, states) {code} has no indices in types/trellis.h, which has {TRELLIS_CODES}")
    tables = row["trellis_values"]
    is_valid = [[type(v) for v in t] for t in tables] == [[int] * 16] * 2 * weights and min(map(min, tables)) >= 0
    if not is_valid or any(sum(map(max, tables[i : i + 2])) > 127 for i in range(0, len(tables), 2)):
        raise TableError(f"{where}: field 'trellis_values' must be {2 * weights} tables of 16 integers; the sums of two must be in 0..127")
    n_bytes = 2 + row["block_size"] // weights * bits // 8  # scale, start and symbols
    expected = {"block_bytes": n_bytes, "rotated": True, "unpack_min": 0, "unpack_max": 127, "group": row["block_size"],
                "activation": ACTIVATIONS[row["block_size"]]}
    for field, value in expected.items():
        if row[field] != value:
            raise TableError(f"{where}: {field} is {row[field]!r}, must be {value!r} for this trellis")


def check_fallbacks(types: list[dict]) -> None:
    """Check that each chain of fallbacks ends and follows the order of the rows, which llama-quantize's patch relies on."""
    names = {row["name"] for row in types}
    for i, row in enumerate(types):
        later = [r["name"] for r in filter_kind(types[i + 1 :], "weight") if r["block_size"] < row["block_size"]]
        if row.get("fallback") in names - set(later):
            raise TableError(f"{TABLE}: type {row['name']!r}: fallback is {row['fallback']!r}, must be an upstream type or a later row with "
                             "smaller blocks")


def is_trellis(row: dict) -> bool:
    return "trellis_values" in row


def filter_kind(types: list[dict], kind: str) -> list[dict]:
    return [row for row in types if row["kind"] == kind]


def bits_per_weight(row: dict) -> float:
    n_weights = row["block_size"] if row["kind"] == "weight" else MAX_BLOCK_SIZE  # activations are stored in groups of blocks
    return row["block_bytes"] * 8 / n_weights


def macro(name: str, lines: list[str]) -> str:
    return " \\\n    ".join([f"#define {name}", *lines])


def render_includes(types: list[dict], description: str, suffix: str = "h") -> str:
    """Include the headers of all weight types; the trellis types share one."""
    names = dict.fromkeys("trellis" if is_trellis(row) else row["name"] for row in filter_kind(types, "weight"))
    return "\n".join([f"// {NOTICE}", f"// {description}", "#pragma once", "", *(f'#include "{name}.{suffix}"' for name in names)]) + "\n"


def render_header(ids: dict, types: list[dict]) -> str:
    weights, activations = filter_kind(types, "weight"), filter_kind(types, "activation")

    def enum(name: str) -> str:
        return f"GGML_TYPE_{name.upper()}"

    def cases(rows: list[dict]) -> list[str]:
        return [f"case {enum(row['name'])}:" for row in rows]

    out = [
        f"// {NOTICE}",
        "#pragma once",
        "",
        macro("GGML_EXT_TYPE_ENUM", [f"{enum(row['name'])} = {row['id']}," for row in types]),
        "",
        f"#define GGML_EXT_TYPE_COUNT {ids['count']}",
        "",
        macro("GGML_EXT_FTYPE_ENUM(P)", [f"P##{row['name'].upper()} = {row['id']}," for row in weights]),
        "",
        macro("GGML_EXT_WEIGHT_TYPES(X)", [f"X({row['name'].upper()}, {row['name']})" for row in weights]),
        "",
        macro("GGML_EXT_WEIGHT_CASES", cases(weights)),
        "",
        macro("GGML_EXT_ACTIVATION_CASES", cases(activations)),
        "",
        macro("GGML_EXT_RETIRED_TYPES(X)", [f'X({number}, "{name}")' for number, name in ids["retired"].items()]),
    ]
    for row in types:
        constants = {"ID": row["id"], "BLOCK_SIZE": row["block_size"], "BLOCK_BYTES": row["block_bytes"]}
        if row["kind"] == "weight":
            constants |= {
                "UNPACK_MIN": row["unpack_min"],
                "UNPACK_MAX": row["unpack_max"],
                "GROUP": row["group"],
                "ROTATED": int(row["rotated"]),
                "ACTIVATION": enum(row["activation"]),
                "FALLBACK": enum(row["fallback"]),
                "TOKEN_EMBD": enum(row["token_embd"]),
                "SHORT_TOKEN_EMBD": enum(row["short_token_embd"]),
                "OUTPUT": enum(row["output"]),
                "TITLE": f'"{row["title"]}"',
                "FNS_TOTAL_ERROR": FNS_LIMITS[row["fns_limits"]][0],
                "FNS_DOT_ERROR": f"{row['fns_dot_error']}f" if "fns_dot_error" in row else FNS_LIMITS[row["fns_limits"]][1],
            }
        width = max(map(len, constants))
        out.append("")
        out += [f"#define GGML_EXT_{row['name'].upper()}_{key:<{width}} {value}" for key, value in constants.items()]
    return "\n".join(out) + "\n"


def words_of(data: bytes) -> str:
    """Format bytes as initialisers of 32-bit words, the first byte in the low bits."""
    return ", ".join(f"0x{int.from_bytes(data[i : i + 4], 'little'):08x}u" for i in range(0, len(data), 4))


def render_codes(signs: bytes, types: list[dict]) -> str:
    """Render the constants that few files use. They are not in the header that all of llama.cpp includes."""
    trellis, codebook = [row for row in types if is_trellis(row)], [row for row in types if "codebook" in row]
    out = [f"// {NOTICE}", "// Signs of the rotation, the trellis types and their codes, codebooks.", "#pragma once", "",
           f"#define GGML_EXT_SIGNS {{{words_of(signs)}}}"]
    for name, rows in (("GGML_EXT_TRELLIS_CASES", trellis), ("GGML_EXT_CODEBOOK_CASES", codebook)):
        out += ["", macro(name, [f"case GGML_TYPE_{row['name'].upper()}:" for row in rows])]
    cells = [["NAME,", "name,", "K,", "V,", "n,", "code,", "offset,", "gain,", "feedback,", "unit,", "NMSE"]]
    cells += [[f"{row['name'].upper()},", f"{row['name']},", f"{row['trellis_bits']},", f"{row['trellis_weights']},", f"{row['block_size']},", f"{row['trellis_code']},",
               *(f"{row[field]}f," for field in ("trellis_offset", "trellis_gain", "trellis_feedback_gain", "trellis_unit")), f"{row['usual_rel_mse']}f"] for row in trellis]
    head, *lines = [" ".join(f"{cell:<{width}}" for cell, width in zip(line, COLUMN_WIDTHS)).rstrip() for line in cells]
    out += ["", f"//  ({head})", macro("GGML_EXT_TRELLIS_TYPES(X)", [f"X({line})" for line in lines])]
    for row in trellis:
        if row["trellis_code"] == row["name"]:
            tables = repr([row["trellis_values"]]).replace("[", "{").replace("]", "}")
            out += ["", f"#define GGML_EXT_TRELLIS_TABLES_{row['name']} {tables}"]
    for row in codebook:
        name = f"#define GGML_EXT_{row['name'].upper()}_CODEBOOK"
        out += ["", f"{name} {{{', '.join(map(str, row['codebook']))}}}", f"{name}_OFFSET {row['codebook_offset']}f"]
    return "\n".join(out) + "\n"


def render_vulkan_blocks(types: list[dict]) -> str:
    """Render the definitions that precede a shader's buffer of blocks; A_TYPE, QUANT_K and QUANT_R are upstream's names."""
    out = [f"// {NOTICE}", "// Block struct and constants of the type that a shader is compiled for, used by unpack.glsl."]
    for i, row in enumerate(filter_kind(types, "weight")):
        bits = 32 if row["block_bytes"] % 4 == 0 else 16  # the largest word that blocks are aligned to
        out += [f"#{'elif' if i else 'if'} defined(DATA_A_{row['name'].upper()})", "#define DATA_A_GGML_EXT", f"#define QUANT_K {row['block_size']}",
                f"#define EXT_ROTATION {row['block_size'] if row['rotated'] else 0}", f"#define EXT_WORD_BITS {bits}",
                f"struct ext_block {{ uint{bits}_t w[{row['block_bytes'] * 8 // bits}]; }};"]
        if is_trellis(row):
            out.append(f"#define EXT_TRELLIS_K {row['trellis_bits']}")
            out.append(f"#define EXT_TRELLIS_V {row['trellis_weights']}")
            out += [f"const uint ext_trellis_values{t}[4] = uint[4]({words_of(bytes(table))});" for t, table in enumerate(row["trellis_values"])]
            out.append(f"const float ext_trellis_offset = {row['trellis_offset']};")
        if "codebook" in row:
            out += [f"const uint ext_codebook[4] = uint[4]({words_of(bytes(row['codebook']))});",
                    f"const float ext_codebook_offset = {row['codebook_offset']};"]
    return "\n".join([*out, "#endif", "#ifdef DATA_A_GGML_EXT", "#define A_TYPE ext_block", "#define QUANT_R 1", "#endif", "#ifdef EXT_INTEGER", '#include "q8.glsl"', "#endif"]) + "\n"


def render_vulkan_unpackers(types: list[dict]) -> str:
    out = [f"// {NOTICE}", "// Unpacks the type that a shader is compiled for.", "#if defined(EXT_TRELLIS_K)", '#include "trellis.glsl"']
    for row in filter_kind(types, "weight"):
        if not is_trellis(row):
            out += [f"#elif defined(DATA_A_{row['name'].upper()})", f'#include "{row["name"]}.glsl"']
    return "\n".join([*out, "#endif"]) + "\n"


def render_vulkan_signs(signs: bytes) -> str:
    n_words = len(signs) // 4
    return f"// {NOTICE}\n// Signs of the rotation.\nconst uint ext_signs[{n_words}] = uint[{n_words}]({words_of(signs)});\n"


MODULE_HEAD = '''"""{notice}

The ggml-ext types: ids, sizes and options of the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_BLOCK_SIZE = {block_size}  # weights of the largest block
# signs of the rotation: bit j % 8 of byte j / 8 is set where sign j flips
ROTATION_SIGNS = bytes.fromhex("{signs}")


class ExtType(IntEnum):
    """Ids of the types in GGUF files, for tensors and for general.file_type."""

{members}


@dataclass(frozen=True)
class TypeInfo:
    """Properties of a type. Activation types have None from `activation` on."""

    name: str                  # lower case, as for --type
    id: ExtType
    kind: str                  # "weight" or "activation"
    block_size: int            # weights per block
    block_bytes: int           # bytes per block
    bpw: float                 # bits per weight
    rotated: bool              # blocks hold the Walsh-Hadamard transform of the weights
    about: str
    activation: str | None = None
    unpack_min: int | None = None      # range of the codes
    unpack_max: int | None = None
    group: int | None = None           # weights per integer scale: value = d * scale * (q - offset)
    fallback: str | None = None        # type for rows that are not a multiple of block_size
    token_embd: str | None = None      # type of the token embeddings in files of this type
    short_token_embd: str | None = None  # the same for rows that token_embd does not fit, before its own fallback
    output: str | None = None          # type of the output matrix in files of this type
    title: str | None = None
    usual_rel_mse: float | None = None  # NMSE of Gaussian weights
    fixture_rel_mse: float | None = None  # upper bound of the NMSE of the fixture of real weights
    student_t4_rel_mse: float | None = None  # the same for Student's t distribution with 4 degrees of freedom
    hessian_gain: float | None = None     # upper bound of the output error with full Hessians relative to diagonal ones
    fns_limits: str | None = None         # upstream type whose limits apply in test-quantize-fns
    fns_dot_error: float | None = None    # limit for products, if different
    trellis_bits: int | None = None     # bits per symbol (ggml_ext/types/trellis.h)
    trellis_weights: int | None = None  # weights per symbol
    trellis_states: int | None = None
    trellis_values: list[list[int]] | None = None  # two tables of 16 values for each of the weights
    trellis_offset: float | None = None
    trellis_gain: float | None = None  # first scale candidate relative to the one that gives the code the block's energy
    trellis_feedback_gain: float | None = None  # the same with a block-diagonal or full Hessian
    trellis_unit: float | None = None  # fixed-point steps per unit of the scale in the encoder's search
    codebook: list[int] | None = None     # upper half of the codebook (ggml_ext/types/ditto5.h)
    codebook_offset: float | None = None


'''


def pack(words: list[str], width: int = 130) -> list[str]:
    """Join words to lines of at most this width."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += " " * bool(lines[-1]) + word
    return lines


def render_module(ids: dict, signs: bytes, types: list[dict]) -> str:
    def value(row: dict, field: str) -> str:
        if field == "id":
            return f"ExtType.{row['name'].upper()}"
        if field == "bpw":
            return repr(bits_per_weight(row))
        text = row[field]
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(text, str) else repr(text)

    members = "\n".join(f"    {row['name'].upper()} = {row['id']}" for row in types)
    out = MODULE_HEAD.format(notice=NOTICE, block_size=MAX_BLOCK_SIZE, signs=signs.hex(), members=members)
    out += "TYPES: dict[str, TypeInfo] = {\n"
    for row in types:
        fields = ["name", "id", "kind", "block_size", "block_bytes", "bpw", "rotated", "about"]
        fields += WEIGHT_FIELDS if row["kind"] == "weight" else []
        fields += ["short_token_embd"] if row["kind"] == "weight" else []
        fields += [field for field in (*OPTIONAL_FIELDS, *TRELLIS_FIELDS, *CODEBOOK_FIELDS) if field in row]
        out += f'    "{row["name"]}": TypeInfo(\n'
        out += "".join(f"        {line}\n" for line in pack([f"{field}={value(row, field)}," for field in fields]))
        out += "    ),\n"
    out += "}\n\n"
    out += 'WEIGHT_TYPES: dict[str, TypeInfo] = {n: t for n, t in TYPES.items() if t.kind == "weight"}\n'
    out += f"RETIRED_TYPES: dict[int, str] = {ids['retired']!r}  # ids in files of earlier versions\n".replace("'", '"')
    return out


def render_pin(pin: dict) -> str:
    return (
        f'"""{NOTICE.replace(TABLE, PIN)}\n\nThe pinned llama.cpp.\n"""\n\n'
        f'LLAMA_CPP_VERSION = "{pin["llama_cpp"]}"\nGGML_VERSION = "{pin["ggml"]}"\n'
    )


def render_formats_table(types: list[dict]) -> str:
    out = ["| type | GGUF id | weights per block | bytes | bpw | description |", "| --- | --- | --- | --- | --- | --- |"]
    for row in types:
        bpw = f"{bits_per_weight(row):g}"
        out.append(f"| `{row['name'].upper()}` | {row['id']} | {row['block_size']} | {row['block_bytes']} | {bpw} | {row['about']} |")
    return "\n".join(out)


def render_formats(text: str, types: list[dict]) -> str:
    """Replace the lines between the markers of docs/reference/formats.md; TableError if there is not one pair of them."""
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise TableError(f"{FORMATS}: needs one {begin} and, after it, one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{render_formats_table(types)}\n{end}{rest.split(end)[1]}"


def render_all(root: Path) -> dict[str, str]:
    """Render every generated file of the tree, by its path."""
    ids, signs, types = load_table((root / TABLE).read_text(encoding="utf-8"))
    return {
        HEADER: render_header(ids, types),
        BLOCKS: render_includes(types, "Block structs and scalar unpack of all weight types."),
        CODES: render_codes(signs, types),
        UNPACKERS: render_includes(types, "SIMD unpack of all weight types."),
        DEVICE_UNPACKERS: render_includes(types, "CUDA unpack of all weight types.", "cuh"),
        METAL_UNPACKERS: render_includes(types, "Metal unpack of all weight types.", "metal"),
        VULKAN_BLOCKS: render_vulkan_blocks(types),
        VULKAN_UNPACKERS: render_vulkan_unpackers(types),
        VULKAN_SIGNS: render_vulkan_signs(signs),
        MODULE: render_module(ids, signs, types),
        PIN_MODULE: render_pin(tomllib.loads((root / PIN).read_text(encoding="utf-8"))),
        FORMATS: render_formats((root / FORMATS).read_text(encoding="utf-8"), types),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name every stale file and exit 1")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    try:
        texts = render_all(args.root)
    except (OSError, KeyError, TableError, tomllib.TOMLDecodeError) as e:
        print(f"gen_types: {e}", file=sys.stderr)
        return 1
    is_stale = False
    for name, text in texts.items():
        path = args.root / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if args.check:
            print(f"gen_types: {name} is stale: run python scripts/build/gen_types.py", file=sys.stderr)
            is_stale = True
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"gen_types: wrote {name}")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())
