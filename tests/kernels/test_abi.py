"""The public headers, patched and pristine. Bindings such as llama-cpp-python repeat upstream's structs by hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import llama_cpp as patches
from ggml_ext import TYPES, WEIGHT_TYPES

HEADERS = ("include/llama.h", "ggml/include/ggml.h", "ggml/include/ggml-backend.h", "ggml/include/gguf.h", "tools/mtmd/mtmd.h")


def read_abi(tree: Path) -> dict[str, object]:
    """Return what callers depend on: size and offsets of structs, enumeration constants, function types."""
    cindex = pytest.importorskip("clang.cindex")
    # stddef.h belongs to clang, which the package lacks; layouts do not depend on it
    text = "typedef __SIZE_TYPE__ size_t;\n" + "".join(f'#include "{tree / h}"\n' for h in HEADERS)
    folders = [tree / "include", tree / "ggml" / "include", tree / "tools" / "mtmd"]
    system = subprocess.run(["cc", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
    unit = cindex.Index.create().parse("all.c", args=["-std=c11", "-isystem", system, *(f"-I{f}" for f in folders)],
                                       unsaved_files=[("all.c", text)])
    errors = [d.spelling for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    assert not errors, errors
    kinds, interface = cindex.CursorKind, {}

    def strip_location(text: str) -> str:
        """Remove the source location from the name of an anonymous struct."""
        return re.sub(r" at [^)]*", "", text)

    def add_struct(cursor, name: str) -> None:
        struct = cursor.type
        fields = [(*map(strip_location, (f.spelling, f.type.spelling)), struct.get_offset(f.spelling)) for f in struct.get_fields()]
        interface[f"struct {name}"] = struct.get_size(), struct.get_align(), fields
        for child in cursor.get_children():
            if child.kind in (kinds.STRUCT_DECL, kinds.UNION_DECL):
                add_struct(child, f"{name}, line {child.location.line - cursor.location.line}")

    for cursor in unit.cursor.get_children():
        if not str(cursor.location.file).startswith(str(tree)):
            continue
        if cursor.kind in (kinds.STRUCT_DECL, kinds.UNION_DECL) and cursor.is_definition():
            add_struct(cursor, cursor.spelling)
        elif cursor.kind == kinds.ENUM_DECL:
            interface.update((f"constant {c.spelling}", c.enum_value) for c in cursor.get_children())
        elif cursor.kind == kinds.FUNCTION_DECL:
            interface[f"function {cursor.spelling}"] = cursor.type.spelling.replace("_Bool", "bool")
    return interface


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> tuple[Path, Path]:
    patched = tmp_path_factory.mktemp("tree") / "llama.cpp"
    patches.patch_tree(patches.pristine_tree(), patched)
    return patches.pristine_tree(), patched


def test_patches_only_add_to_the_interface(trees):
    """The patches add constants and the two functions of --act-prec; besides, only GGML_TYPE_COUNT changes."""
    upstream, patched_interface = map(read_abi, trees)
    assert len(upstream["struct llama_context_params"][2]) > 20 and len(upstream["struct llama_model_params"][2]) > 10
    assert {name for name, value in upstream.items() if patched_interface.get(name) != value} == {"constant GGML_TYPE_COUNT"}
    added = {f"constant GGML_TYPE_{name.upper()}": int(t.id) for name, t in TYPES.items()}
    for prefix in ("GGML", "LLAMA"):
        added |= {f"constant {prefix}_FTYPE_MOSTLY_{name.upper()}": int(t.id) for name, t in WEIGHT_TYPES.items()}
    added |= {"constant LLAMA_ACT_PREC_Q8": 0, "constant LLAMA_ACT_PREC_F16": 1,
              "function llama_set_act_prec": "bool (struct llama_context *, enum llama_act_prec)",
              "function llama_get_act_prec": "enum llama_act_prec (const struct llama_context *)"}
    assert {name: value for name, value in patched_interface.items() if name not in upstream} == added
