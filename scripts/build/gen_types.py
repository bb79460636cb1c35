#!/usr/bin/env python3
"""Writes the checked-in lists that follow from ggml_ext/types.toml, and what the package knows of ggml_ext/upstream.toml.

    python scripts/build/gen_types.py            write the files that changed, remove those of types that are no more
    python scripts/build/gen_types.py --check    write nothing; exit 1 and name every stale file and every one too many

Files: ggml_ext/ggml-ext-types.h, ggml_ext/types/codes.h, the include lists ggml_ext/types/all.h, ggml_ext/cpu/all.h,
cuda/all.cuh and metal/all.metal, cuda/instances/, metal/codes.metal, vulkan/types.glsl, all.glsl and signs.glsl, py/ggml_ext/_base/types.py, the table between the
"types" markers of docs/reference/formats.md, and py/ggml_ext/_base/upstream.py. The output depends on the two toml files alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Container
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
METAL_CODES = "metal/codes.metal"
VULKAN_BLOCKS = "vulkan/types.glsl"
VULKAN_UNPACKERS = "vulkan/all.glsl"
VULKAN_SIGNS = "vulkan/signs.glsl"
INSTANCES = "cuda/instances/mmq-{name}.cu"
MODULE = "py/ggml_ext/_base/types.py"
PIN = "ggml_ext/upstream.toml"
PIN_MODULE = "py/ggml_ext/_base/upstream.py"
FORMATS = "docs/reference/formats.md"
MARKERS = ("<!-- types:begin -->", "<!-- types:end -->")
NOTICE = f"Generated from {TABLE} by scripts/build/gen_types.py; do not edit."
MAX_BLOCK_SIZE = 256  # QK_K: blocks are that or a quarter of it
STOCK_ACTIVATIONS = ("q8_k",)

COMMON_FIELDS = {"name": str, "id": int, "kind": str, "block_size": int, "block_bytes": int, "rotated": bool, "about": str}
WEIGHT_FIELDS = {
    "activation": str, "unpack_min": int, "unpack_max": int, "group": int, "fallback": str, "token_embd": str,
    "output": str, "title": str, "usual_rel_mse": float, "fixture_rel_mse": float,
    "student_t4_rel_mse": float, "moments_gain": float, "fns_limits": str,
}
# of trellis types; the nested list is two tables of 16 bytes. trellis_code names the type that has them instead
TRELLIS_FIELDS = {"trellis_values": list, "trellis_offset": float}
CODEBOOK_FIELDS = {"codebook": list, "codebook_offset": float}  # of types with one codebook for all blocks: its upper 16 codes
OPTIONAL_FIELDS = {"fns_dot_error": float}
# stock type -> its limits in upstream's test-quantize-fns, of weights and of products
FNS_LIMITS = {"iq3_s": ("MAX_QUANTIZATION_TOTAL_ERROR_3BITS", "MAX_DOT_PRODUCT_ERROR_LOWBIT"),
              "iq2_s": ("MAX_QUANTIZATION_TOTAL_ERROR_2BITS", "MAX_DOT_PRODUCT_ERROR_LOWBIT"),
              "q5_k": ("MAX_QUANTIZATION_TOTAL_ERROR", "MAX_DOT_PRODUCT_ERROR")}


class TableError(Exception):
    """types.toml or docs/reference/formats.md is not as it has to be."""


def load_table(text: str) -> tuple[dict, bytes, list[dict]]:
    """The [ids] section with the [[retired]] rows in it, the signs and the [[type]] rows of types.toml, checked; raises TableError
    naming row and field."""
    table = tomllib.loads(text)
    ids, signs, types = table["ids"], table["rotation"]["signs"], table["type"]
    ids["retired"] = {row["id"]: row["name"] for row in table.get("retired", [])}
    if not re.fullmatch(f"[0-9a-f]{{{MAX_BLOCK_SIZE // 4}}}", signs):
        raise TableError(f"{TABLE}: rotation: signs is {signs!r}, must be {MAX_BLOCK_SIZE // 4} hexadecimal digits")
    names = [row.get("name") for row in types]
    for row in types:
        if code := row.pop("trellis_code", None):
            owner = next((r for r in types if r.get("name") == code and "trellis_values" in r), None)
            if owner is None:
                raise TableError(f"{TABLE}: type {row.get('name')!r}: trellis_code is {code!r}, must be a type with trellis_values")
            row |= {field: owner.get(field) for field in TRELLIS_FIELDS}
    for row in types:
        fields = COMMON_FIELDS | (WEIGHT_FIELDS if row.get("kind") == "weight" else {})
        for some in (TRELLIS_FIELDS, CODEBOOK_FIELDS):
            fields = fields | (some if row.keys() & some else {})
        fields = fields | {field: kind for field, kind in OPTIONAL_FIELDS.items() if field in row}
        where = f"{TABLE}: type {row.get('name')!r}"
        if row.get("kind") not in ("weight", "activation"):
            raise TableError(f"{where}: kind is {row.get('kind')!r}, must be 'weight' or 'activation'")
        for field, wanted in fields.items():
            if type(row.get(field)) is not wanted:
                raise TableError(f"{where}: field {field!r} is {row.get(field)!r}, must be a {wanted.__name__}")
        if row.get("fns_limits", "iq3_s") not in FNS_LIMITS:
            raise TableError(f"{where}: fns_limits is {row['fns_limits']!r}, must be one of {', '.join(FNS_LIMITS)}")
        if "trellis_values" in row and [[type(v) for v in t] for t in row["trellis_values"]] != [[int] * 16] * 2:
            raise TableError(f"{where}: field 'trellis_values' must be two tables of 16 integers")
        if "codebook" in row and ([type(v) for v in row["codebook"]] != [int] * 16 or row["codebook"] != sorted(set(row["codebook"]))):
            raise TableError(f"{where}: field 'codebook' must be 16 ascending integers")
        if unknown := sorted(set(row) - set(fields)):
            raise TableError(f"{where}: unknown field(s) {', '.join(unknown)}")
        if not ids["first"] <= row["id"] < ids["count"]:
            raise TableError(f"{where}: id {row['id']} is not in {ids['first']}..{ids['count'] - 1}")
        if row["id"] in ids["retired"]:
            raise TableError(f"{where}: id {row['id']} was that of an earlier {ids['retired'][row['id']]}: take one that no file has")
        if row["block_size"] not in (MAX_BLOCK_SIZE, MAX_BLOCK_SIZE // 4):
            raise TableError(f"{where}: block_size is {row['block_size']}, must be {MAX_BLOCK_SIZE} or {MAX_BLOCK_SIZE // 4}")
        if row["kind"] == "weight" and row["activation"] not in (*names, *STOCK_ACTIVATIONS):
            raise TableError(f"{where}: activation {row['activation']!r} is not in the table")
    for field in ("name", "id"):
        values = [row[field] for row in types]
        if twice := sorted({str(v) for v in values if values.count(v) > 1}):
            raise TableError(f"{TABLE}: {field} {', '.join(twice)} is used twice")
    for i, row in enumerate(types):
        # so that every chain of fallbacks ends, and one pass over the rows follows it, as llama-quantize's patch does
        later = [r["name"] for r in of_kind(types[i + 1 :], "weight") if r["block_size"] < row["block_size"]]
        if row.get("fallback") in set(names) - set(later):
            raise TableError(
                f"{TABLE}: type {row['name']!r}: fallback is {row['fallback']!r}, must be a stock type or a later row with "
                "smaller blocks"
            )
    return ids, bytes.fromhex(signs), types


def of_kind(types: list[dict], kind: str) -> list[dict]:
    return [row for row in types if row["kind"] == kind]


def bits_per_weight(row: dict) -> float:
    return row["block_bytes"] * 8 / row["block_size"]


def macro(name: str, lines: list[str]) -> str:
    return " \\\n    ".join([f"#define {name}", *lines])


def render_includes(types: list[dict], what: str, suffix: str = "h") -> str:
    lines = [f"// {NOTICE}", f"// {what}", "#pragma once", ""]
    return "\n".join(lines + [f'#include "{row["name"]}.{suffix}"' for row in of_kind(types, "weight")]) + "\n"


def render_instance(row: dict) -> str:
    """A source of its own for each type, so that they compile beside each other."""
    return f"// {NOTICE}\n#include \"ggml-cuda/mmq.cuh\"\n\nDECL_MMQ_CASE(GGML_TYPE_{row['name'].upper()});\n"


def render_header(ids: dict, types: list[dict]) -> str:
    weights, activations = of_kind(types, "weight"), of_kind(types, "activation")

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
    """Initialisers of words of 32 bits, the first byte in the low bits."""
    return ", ".join(f"0x{int.from_bytes(data[i : i + 4], 'little'):08x}u" for i in range(0, len(data), 4))


def render_codes(signs: bytes, types: list[dict]) -> str:
    """A header of its own: a change of a table rebuilds the files that use it, not all of llama.cpp."""
    out = [f"// {NOTICE}", "// Signs of the rotation, tables of the trellis codes, codebooks.", "#pragma once", "",
           f"#define GGML_EXT_SIGNS {{{words_of(signs)}}}"]
    for name, field in (("GGML_EXT_TRELLIS_CASES", "trellis_values"), ("GGML_EXT_CODEBOOK_CASES", "codebook")):
        out += ["", macro(name, [f"case GGML_TYPE_{row['name'].upper()}:" for row in types if field in row])]
    for row in types:
        if "trellis_values" in row:
            tables = repr([row["trellis_values"]]).replace("[", "{").replace("]", "}")
            name = f"#define GGML_EXT_{row['name'].upper()}_TRELLIS"
            out += ["", f"{name}_TABLES {tables}", f"{name}_OFFSET {row['trellis_offset']}f", f"{name}_USUAL_REL_MSE {row['usual_rel_mse']}f"]
        if "codebook" in row:
            name = f"#define GGML_EXT_{row['name'].upper()}_CODEBOOK"
            out += ["", f"{name} {{{', '.join(map(str, row['codebook']))}}}", f"{name}_OFFSET {row['codebook_offset']}f"]
    return "\n".join(out) + "\n"


def trellis_codes(k: int, values: list[list[int]]) -> list[int]:
    """Codes of all 4096 states (ggml_ext/types/trellis.h) in the order of metal/trellis.metal: the symbols as they follow each
    other, the oldest in the low bits; for K = 3 their low bits, then quad(t)."""
    out = []
    for i in range(4096):
        pairs = [i >> shift & 15 for shift in range(12 - 4 if k == 2 else 4, -1, -2)]  # pair(t), pair(t-1) ...
        if k == 4:
            i0, i1 = (i >> 8) ^ (i & 15), i >> 4 & 15
        elif k == 3:
            i0, i1 = pairs[0] ^ pairs[1] ^ pairs[2], pairs[0] ^ i >> 8
        else:
            i0, i1 = pairs[0] ^ pairs[4], pairs[2]
        out.append(values[0][i0] + values[1][i1])
    return out


def symbol_bits(row: dict) -> int:
    """K of a trellis type: two bytes of a block are scale and start."""
    return (row["block_bytes"] - 2) * 8 // row["block_size"]


def render_metal_codes(types: list[dict]) -> str:
    """One table for types that share a code."""
    out, seen = [f"// {NOTICE}", "// Codes of the trellis types by state: trellis.metal. types/trellis.h has what they are made of."], []
    for row in types:
        if "trellis_values" in row and (code := row["trellis_values"]) not in seen:
            seen.append(code)
            codes = [str(c) for c in trellis_codes(symbol_bits(row), code)]
            out += ["", f"constant uint8_t ggml_ext_{row['name']}_codes[4096] = {{"]
            out += [f"    {','.join(codes[i : i + 32])}," for i in range(0, 4096, 32)] + ["};"]
    return "\n".join(out) + "\n"


def render_vulkan_blocks(types: list[dict]) -> str:
    """What shaders know of a type before its buffer is declared; A_TYPE, QUANT_K and QUANT_R are upstream's names."""
    out = [f"// {NOTICE}", "// Blocks and constants of the type that a shader is compiled for: unpack.glsl."]
    for i, row in enumerate(of_kind(types, "weight")):
        bits = 32 if row["block_bytes"] % 4 == 0 else 16  # what the alignment of a block allows
        out += [f"#{'elif' if i else 'if'} defined(DATA_A_{row['name'].upper()})", "#define DATA_A_GGML_EXT", f"#define QUANT_K {row['block_size']}",
                f"#define EXT_ROTATION {row['block_size'] if row['rotated'] else 0}", f"#define EXT_WORD_BITS {bits}",
                f"struct ext_block {{ uint{bits}_t w[{row['block_bytes'] * 8 // bits}]; }};"]
        if "trellis_values" in row:
            out.append(f"#define EXT_TRELLIS_K {symbol_bits(row)}")
            out += [f"const uint ext_trellis_values{t}[4] = uint[4]({words_of(bytes(row['trellis_values'][t]))});" for t in range(2)]
            out.append(f"const float ext_trellis_offset = {row['trellis_offset']};")
        if "codebook" in row:
            out += [f"const uint ext_codebook[4] = uint[4]({words_of(bytes(row['codebook']))});",
                    f"const float ext_codebook_offset = {row['codebook_offset']};"]
    return "\n".join([*out, "#endif", "#ifdef DATA_A_GGML_EXT", "#define A_TYPE ext_block", "#define QUANT_R 1", "#endif"]) + "\n"


def render_vulkan_unpackers(types: list[dict]) -> str:
    out = [f"// {NOTICE}", "// Unpack of the type that a shader is compiled for."]
    for i, row in enumerate(of_kind(types, "weight")):
        out += [f"#{'elif' if i else 'if'} defined(DATA_A_{row['name'].upper()})", f'#include "{row["name"]}.glsl"']
    return "\n".join([*out, "#endif"]) + "\n"


def render_vulkan_signs(signs: bytes) -> str:
    n_words = len(signs) // 4
    return f"// {NOTICE}\n// Signs of the rotation.\nconst uint ext_signs[{n_words}] = uint[{n_words}]({words_of(signs)});\n"


MODULE_HEAD = '''"""{notice}

The types of the extension: ids, sizes and the choices of the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_BLOCK_SIZE = {block_size}  # weights of the largest blocks
# signs of the rotation: bit j % 8 of byte j / 8 is set where sign j flips
ROTATION_SIGNS = bytes.fromhex("{signs}")


class ExtType(IntEnum):
    """Ids as stored in GGUF tensor infos; general.file_type uses the same numbers."""

{members}


@dataclass(frozen=True)
class TypeInfo:
    """One row of the table. The fields from `activation` on are None for activation types."""

    name: str                  # lower case, as on the command line and in log lines
    id: ExtType
    kind: str                  # "weight" or "activation"
    block_size: int            # weights a block
    block_bytes: int           # bytes of one
    bpw: float                 # bits per weight
    rotated: bool              # blocks hold the Walsh-Hadamard transform of the weights
    about: str
    activation: str | None = None
    unpack_min: int | None = None      # least and largest integer of the unpack contract
    unpack_max: int | None = None
    group: int | None = None           # weights that share one integer scale: value = d * scale * (q - offset)
    fallback: str | None = None        # type for rows that are no multiple of block_size
    token_embd: str | None = None      # type of the token embeddings in a file of this type
    output: str | None = None          # type of the output matrix in a file of this type
    title: str | None = None
    usual_rel_mse: float | None = None  # relative squared error of Gaussian weights
    fixture_rel_mse: float | None = None  # bound for the encoder on the real-weight fixture
    student_t4_rel_mse: float | None = None  # bound for samples of Student's t with 4 degrees of freedom
    moments_gain: float | None = None     # bound for the error of outputs with whole moments over that with their diagonal
    fns_limits: str | None = None         # stock type whose limits upstream's test-quantize-fns sets it
    fns_dot_error: float | None = None    # or its own for products
    trellis_values: list[list[int]] | None = None  # the tables of a trellis code, two of 16: ggml_ext/types/trellis.h
    trellis_offset: float | None = None
    codebook: list[int] | None = None     # codes of the upper half of a codebook for all blocks: ggml_ext/types/ditto5.h
    codebook_offset: float | None = None


'''


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
        fields += [field for field in (*OPTIONAL_FIELDS, *TRELLIS_FIELDS, *CODEBOOK_FIELDS) if field in row]
        out += f'    "{row["name"]}": TypeInfo(\n'
        out += "".join(f"        {field}={value(row, field)},\n" for field in fields)
        out += "    ),\n"
    out += "}\n\n"
    out += 'WEIGHT_TYPES: dict[str, TypeInfo] = {n: t for n, t in TYPES.items() if t.kind == "weight"}\n'
    out += f"RETIRED_TYPES: dict[int, str] = {ids['retired']!r}  # ids that files made before may have\n".replace("'", '"')
    return out


def render_pin(pin: dict) -> str:
    return (
        f'"""{NOTICE.replace(TABLE, PIN)}\n\nThe llama.cpp that the package is made for.\n"""\n\n'
        f'LLAMA_CPP_VERSION = "{pin["llama_cpp"]}"\nGGML_VERSION = "{pin["ggml"]}"\n'
    )


def render_formats_table(types: list[dict]) -> str:
    out = ["| type | GGUF id | weights a block | bytes | bpw | what |", "| --- | --- | --- | --- | --- | --- |"]
    for row in types:
        bpw = f"{bits_per_weight(row):g}"
        out.append(f"| `{row['name'].upper()}` | {row['id']} | {row['block_size']} | {row['block_bytes']} | {bpw} | {row['about']} |")
    return "\n".join(out)


def render_formats(text: str, types: list[dict]) -> str:
    """docs/reference/formats.md with the lines between its markers replaced; raises TableError if there is not one pair of them."""
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise TableError(f"{FORMATS}: needs one {begin} and, after it, one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{render_formats_table(types)}\n{end}{rest.split(end)[1]}"


def remove_strays(root: Path, names: Container[str], check: bool) -> bool:
    """Removes the instances that the table does not make, of types that were removed or renamed; with check only names them.

    names: of all files that it makes. True if one is left: CMake compiles whatever lies there. What was not generated is kept.
    """
    is_left = False
    for path in sorted((root / INSTANCES).parent.glob("*.cu")):
        name = path.relative_to(root).as_posix()
        if name in names:
            continue
        is_ours = path.read_text(encoding="utf-8", errors="replace").startswith(f"// {NOTICE}")
        if is_ours and not check:
            path.unlink()
            print(f"gen_types: removed {name}")
            continue
        way_out = "run python scripts/build/gen_types.py" if is_ours else "it was not generated: move it away"
        print(f"gen_types: {name} is of no type of the table: {way_out}", file=sys.stderr)
        is_left = True
    return is_left


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 and name every stale file")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    failed = False
    try:
        ids, signs, types = load_table((args.root / TABLE).read_text(encoding="utf-8"))
        pin = render_pin(tomllib.loads((args.root / PIN).read_text(encoding="utf-8")))
    except (OSError, KeyError, TableError, tomllib.TOMLDecodeError) as e:
        print(f"gen_types: {e}", file=sys.stderr)
        return 1

    renderers = {
        HEADER: lambda old: render_header(ids, types),
        BLOCKS: lambda old: render_includes(types, "Block structs and scalar unpack of every weight type."),
        CODES: lambda old: render_codes(signs, types),
        UNPACKERS: lambda old: render_includes(types, "Unpack over the SIMD primitives of every weight type."),
        DEVICE_UNPACKERS: lambda old: render_includes(types, "Unpack on the device of every weight type.", "cuh"),
        METAL_UNPACKERS: lambda old: render_includes(types, "Unpack in Metal of every weight type.", "metal"),
        METAL_CODES: lambda old: render_metal_codes(types),
        VULKAN_BLOCKS: lambda old: render_vulkan_blocks(types),
        VULKAN_UNPACKERS: lambda old: render_vulkan_unpackers(types),
        VULKAN_SIGNS: lambda old: render_vulkan_signs(signs),
        MODULE: lambda old: render_module(ids, signs, types),
        PIN_MODULE: lambda old: pin,
        FORMATS: lambda old: render_formats(old, types),
    }
    for row in of_kind(types, "weight"):
        renderers[INSTANCES.format(name=row["name"])] = lambda old, row=row: render_instance(row)
    for name, render in renderers.items():
        path = args.root / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            new = render(old)
        except TableError as e:
            print(f"gen_types: {e}", file=sys.stderr)
            failed = True
            continue
        if new == old:
            continue
        if args.check:
            print(f"gen_types: {name} is stale: run python scripts/build/gen_types.py", file=sys.stderr)
            failed = True
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8", newline="\n")
            print(f"gen_types: wrote {name}")
    return int(remove_strays(args.root, renderers, args.check) or failed)


if __name__ == "__main__":
    sys.exit(main())
