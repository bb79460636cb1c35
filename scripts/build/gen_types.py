#!/usr/bin/env python3
"""Writes the checked-in lists that follow from ggml_ext/types.toml.

    python scripts/build/gen_types.py            write the files that changed
    python scripts/build/gen_types.py --check    write nothing; exit 1 and name every stale file

Files: ggml_ext/ggml-ext-types.h, ggml_ext/types/codes.h, the include lists ggml_ext/types/all.h, ggml_ext/cpu/all.h and
cuda/all.cuh, cuda/instances/, py/ggml_ext/_types.py and the table between the "types" markers of docs/formats.md.
The output depends on types.toml alone.
"""

from __future__ import annotations

import argparse
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
INSTANCES = "cuda/instances/mmq-{name}.cu"
MODULE = "py/ggml_ext/_types.py"
FORMATS = "docs/formats.md"
MARKERS = ("<!-- types:begin -->", "<!-- types:end -->")
NOTICE = f"Generated from {TABLE} by scripts/build/gen_types.py; do not edit."
BLOCK_SIZE = 256  # QK_K, the block of every type
STOCK_ACTIVATIONS = ("q8_k",)

COMMON_FIELDS = {"name": str, "id": int, "kind": str, "block_bytes": int, "rotated": bool, "about": str}
WEIGHT_FIELDS = {
    "activation": str, "unpack_min": int, "unpack_max": int, "group": int, "has_offset": bool, "fallback": str,
    "token_embd": str, "output": str, "title": str, "fixture_rel_mse": float,
    "fns_total_error": float, "fns_dot_error": float,
}
# of trellis types; a nested list is two tables of 16 bytes
OPTIONAL_FIELDS = {"trellis_mix": list, "trellis_values": list, "trellis_offset": float}


class TableError(Exception):
    """types.toml or docs/formats.md is not as it has to be."""


def load_table(text: str) -> tuple[dict, list[dict]]:
    """The [ids] section and the [[type]] rows of types.toml, checked; raises TableError naming row and field."""
    table = tomllib.loads(text)
    ids, types = table["ids"], table["type"]
    names = [row.get("name") for row in types]
    for row in types:
        fields = COMMON_FIELDS | (WEIGHT_FIELDS if row.get("kind") == "weight" else {})
        fields = fields | (OPTIONAL_FIELDS if row.keys() & OPTIONAL_FIELDS else {})
        where = f"{TABLE}: type {row.get('name')!r}"
        if row.get("kind") not in ("weight", "activation"):
            raise TableError(f"{where}: kind is {row.get('kind')!r}, must be 'weight' or 'activation'")
        for field, wanted in fields.items():
            if type(row.get(field)) is not wanted:
                raise TableError(f"{where}: field {field!r} is {row.get(field)!r}, must be a {wanted.__name__}")
        for field in ("trellis_mix", "trellis_values"):
            if field in row and [[type(v) for v in t] for t in row[field]] != [[int] * 16] * 2:
                raise TableError(f"{where}: field {field!r} must be two tables of 16 integers")
        if unknown := sorted(set(row) - set(fields)):
            raise TableError(f"{where}: unknown field(s) {', '.join(unknown)}")
        if not ids["first"] <= row["id"] < ids["count"]:
            raise TableError(f"{where}: id {row['id']} is not in {ids['first']}..{ids['count'] - 1}")
        if row["kind"] == "weight" and row["activation"] not in (*names, *STOCK_ACTIVATIONS):
            raise TableError(f"{where}: activation {row['activation']!r} is not in the table")
    for field in ("name", "id"):
        values = [row[field] for row in types]
        if twice := sorted({str(v) for v in values if values.count(v) > 1}):
            raise TableError(f"{TABLE}: {field} {', '.join(twice)} is used twice")
    return ids, types


def of_kind(types: list[dict], kind: str) -> list[dict]:
    return [row for row in types if row["kind"] == kind]


def bits_per_weight(row: dict) -> float:
    return row["block_bytes"] * 8 / BLOCK_SIZE


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
    ]
    for row in types:
        constants = {"ID": row["id"], "BLOCK_BYTES": row["block_bytes"]}
        if row["kind"] == "weight":
            constants |= {
                "UNPACK_MIN": row["unpack_min"],
                "UNPACK_MAX": row["unpack_max"],
                "GROUP": row["group"],
                "HAS_OFFSET": int(row["has_offset"]),
                "ROTATED": int(row["rotated"]),
                "ACTIVATION": enum(row["activation"]),
                "FALLBACK": enum(row["fallback"]),
                "TOKEN_EMBD": enum(row["token_embd"]),
                "OUTPUT": enum(row["output"]),
                "TITLE": f'"{row["title"]}"',
                "FNS_TOTAL_ERROR": f"{row['fns_total_error']}f",
                "FNS_DOT_ERROR": f"{row['fns_dot_error']}f",
            }
        width = max(map(len, constants))
        out.append("")
        out += [f"#define GGML_EXT_{row['name'].upper()}_{key:<{width}} {value}" for key, value in constants.items()]
    return "\n".join(out) + "\n"


def render_codes(types: list[dict]) -> str:
    """A header of its own: a change of a table rebuilds the files that use it, not all of llama.cpp."""
    out = [f"// {NOTICE}", "// Tables of the trellis codes.", "#pragma once"]
    for row in types:
        if "trellis_mix" in row:
            tables = repr([row["trellis_mix"], row["trellis_values"]]).replace("[", "{").replace("]", "}")
            name = f"#define GGML_EXT_{row['name'].upper()}_TRELLIS"
            out += ["", f"{name}_TABLES {tables}", f"{name}_OFFSET {row['trellis_offset']}f"]
    return "\n".join(out) + "\n"


MODULE_HEAD = '''"""{notice}

The types of the extension: ids, sizes and the choices of the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

BLOCK_SIZE = {block_size}  # weights a block, of every type


class ExtType(IntEnum):
    """Ids as stored in GGUF tensor infos; general.file_type uses the same numbers."""

{members}


@dataclass(frozen=True)
class TypeInfo:
    """One row of the table. The fields from `activation` on are None for activation types."""

    name: str                  # lower case, as on the command line and in log lines
    id: ExtType
    kind: str                  # "weight" or "activation"
    block_bytes: int           # bytes of one block of block_size weights
    bpw: float                 # bits per weight
    rotated: bool              # blocks hold the Walsh-Hadamard transform of the weights
    about: str
    block_size: int = BLOCK_SIZE
    activation: str | None = None
    unpack_min: int | None = None      # least and largest integer of the unpack contract
    unpack_max: int | None = None
    group: int | None = None           # weights that share one integer scale
    has_offset: bool | None = None     # value = d * scale * (q - offset)
    fallback: str | None = None        # type for rows that are no multiple of block_size
    token_embd: str | None = None      # type of the token embeddings in a file of this type
    output: str | None = None          # type of the output matrix in a file of this type
    title: str | None = None
    fixture_rel_mse: float | None = None  # bound for the encoder on the real-weight fixture
    fns_total_error: float | None = None  # bounds for the cosine of upstream's test-quantize-fns
    fns_dot_error: float | None = None
    trellis_mix: list[list[int]] | None = None  # the tables of a trellis code, each two of 16: ggml_ext/types/trellis.h
    trellis_values: list[list[int]] | None = None
    trellis_offset: float | None = None


'''


def render_module(types: list[dict]) -> str:
    def value(row: dict, field: str) -> str:
        if field == "id":
            return f"ExtType.{row['name'].upper()}"
        if field == "bpw":
            return repr(bits_per_weight(row))
        text = row[field]
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(text, str) else repr(text)

    members = "\n".join(f"    {row['name'].upper()} = {row['id']}" for row in types)
    out = MODULE_HEAD.format(notice=NOTICE, block_size=BLOCK_SIZE, members=members)
    out += "TYPES: dict[str, TypeInfo] = {\n"
    for row in types:
        fields = ["name", "id", "kind", "block_bytes", "bpw", "rotated", "about"]
        fields += WEIGHT_FIELDS if row["kind"] == "weight" else []
        fields += [field for field in OPTIONAL_FIELDS if field in row]
        out += f'    "{row["name"]}": TypeInfo(\n'
        out += "".join(f"        {field}={value(row, field)},\n" for field in fields)
        out += "    ),\n"
    out += "}\n\n"
    out += 'WEIGHT_TYPES: dict[str, TypeInfo] = {n: t for n, t in TYPES.items() if t.kind == "weight"}\n'
    return out


def render_formats_table(types: list[dict]) -> str:
    out = [f"| type | GGUF id | bytes / {BLOCK_SIZE} | bpw | what |", "| --- | --- | --- | --- | --- |"]
    for row in types:
        bpw = f"{bits_per_weight(row):g}"
        out.append(f"| `{row['name'].upper()}` | {row['id']} | {row['block_bytes']} | {bpw} | {row['about']} |")
    return "\n".join(out)


def render_formats(text: str, types: list[dict]) -> str:
    """docs/formats.md with the lines between its markers replaced; raises TableError if there is not one pair of them."""
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise TableError(f"{FORMATS}: needs one {begin} and, after it, one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{render_formats_table(types)}\n{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 and name every stale file")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    failed = False
    try:
        ids, types = load_table((args.root / TABLE).read_text(encoding="utf-8"))
    except (OSError, KeyError, TableError, tomllib.TOMLDecodeError) as e:
        print(f"gen_types: {e}", file=sys.stderr)
        return 1

    renderers = {
        HEADER: lambda old: render_header(ids, types),
        BLOCKS: lambda old: render_includes(types, "Block structs and scalar unpack of every weight type."),
        CODES: lambda old: render_codes(types),
        UNPACKERS: lambda old: render_includes(types, "Unpack over the SIMD primitives of every weight type."),
        DEVICE_UNPACKERS: lambda old: render_includes(types, "Unpack on the device of every weight type.", "cuh"),
        MODULE: lambda old: render_module(types),
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
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
