"""The public headers, patched and pristine: bindings such as llama-cpp-python describe upstream's structs by hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import llama_cpp as patches
from ggml_ext import TYPES, WEIGHT_TYPES

HEADERS = ("include/llama.h", "ggml/include/ggml.h", "ggml/include/ggml-backend.h", "ggml/include/gguf.h", "tools/mtmd/mtmd.h")


def abi(tree: Path) -> dict[str, object]:
    """What callers depend on: size and offsets of every struct, values of the enumerations, types of the functions."""
    cindex = pytest.importorskip("clang.cindex")
    # clang's own headers, which the package lacks; layouts do not depend on them
    text = "typedef __SIZE_TYPE__ size_t;\n" + "".join(f'#include "{tree / h}"\n' for h in HEADERS)
    folders = [tree / "include", tree / "ggml" / "include", tree / "tools" / "mtmd"]
    system = subprocess.run(["cc", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
    unit = cindex.Index.create().parse("all.c", args=["-std=c11", "-isystem", system, *(f"-I{f}" for f in folders)],
                                       unsaved_files=[("all.c", text)])
    errors = [d.spelling for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    assert not errors, errors
    kinds, found = cindex.CursorKind, {}

    def place_less(text: str) -> str:
        """Names of what has no name hold its place."""
        return re.sub(r" at [^)]*", "", text)

    def add_struct(cursor, name: str) -> None:
        struct = cursor.type
        fields = [(*map(place_less, (f.spelling, f.type.spelling)), struct.get_offset(f.spelling)) for f in struct.get_fields()]
        found[f"struct {name}"] = struct.get_size(), struct.get_align(), fields
        for child in cursor.get_children():
            if child.kind in (kinds.STRUCT_DECL, kinds.UNION_DECL):
                add_struct(child, f"{name}, line {child.location.line - cursor.location.line}")

    for cursor in unit.cursor.get_children():
        if not str(cursor.location.file).startswith(str(tree)):
            continue
        if cursor.kind in (kinds.STRUCT_DECL, kinds.UNION_DECL) and cursor.is_definition():
            add_struct(cursor, cursor.spelling)
        elif cursor.kind == kinds.ENUM_DECL:
            found.update((f"constant {c.spelling}", c.enum_value) for c in cursor.get_children())
        elif cursor.kind == kinds.FUNCTION_DECL:
            found[f"function {cursor.spelling}"] = cursor.type.spelling.replace("_Bool", "bool")
    return found


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> tuple[Path, Path]:
    patched = tmp_path_factory.mktemp("tree") / "llama.cpp"
    patches.patch_tree(patches.pristine_tree(), patched)
    return patches.pristine_tree(), patched


def test_patches_change_no_struct_and_no_function(trees):
    """Our types are new constants, and the one that counts the types is larger; --act-prec has two functions and the constants that
    they take. Nothing else differs."""
    stock, ours = map(abi, trees)
    assert len(stock["struct llama_context_params"][2]) > 20 and len(stock["struct llama_model_params"][2]) > 10
    assert {name for name, value in stock.items() if ours.get(name) != value} == {"constant GGML_TYPE_COUNT"}
    added = {f"constant GGML_TYPE_{name.upper()}": int(t.id) for name, t in TYPES.items()}
    for prefix in ("GGML", "LLAMA"):
        added |= {f"constant {prefix}_FTYPE_MOSTLY_{name.upper()}": int(t.id) for name, t in WEIGHT_TYPES.items()}
    added |= {"constant LLAMA_ACT_PREC_Q8": 0, "constant LLAMA_ACT_PREC_F16": 1,
              "function llama_set_act_prec": "bool (struct llama_context *, enum llama_act_prec)",
              "function llama_get_act_prec": "enum llama_act_prec (const struct llama_context *)"}
    assert {name: value for name, value in ours.items() if name not in stock} == added
