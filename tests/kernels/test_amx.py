"""Patch 0035: the tile configuration that ggml's AMX code loads is complete with any compiler.

GCC 12 assumes that ldtilecfg reads eight bytes and drops the stores of the other 56, so that upstream's K-quants crash. The test compiles
the lines that fill and load the configuration, replaces the instruction in the assembly by copies of its operand and compares the bytes.
It runs on CPUs without AMX too.
"""

from __future__ import annotations

import ctypes
import platform
import re
import struct
import subprocess
from pathlib import Path

import pytest

from helpers.native import BUILD

SOURCE = BUILD / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
BARRIER = '__asm__ volatile("" : : "m"(tc));'
# Palette 1 in Intel's manual: byte 0 the palette, byte 1 the first row, 14 reserved, bytes per row of 16 tiles (uint16), rows of each
# (uint8). Two tiles of 8 x 64 bytes, two of 16 x 32, four of 16 x 64.
EXPECTED = struct.pack("<BB14x16H16B", 1, 0, *[64, 64, 32, 32, 64, 64, 64, 64], *[0] * 8, *[8, 8, 16, 16, 16, 16, 16, 16], *[0] * 8)

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX needs an x86-64 CPU")


def compiler() -> str:
    """Return the compiler that built the package."""
    cache = BUILD / "CMakeCache.txt"
    if not cache.exists():
        pytest.skip(f"{BUILD} is not built: run make test")
    return re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache.read_text(), re.M)[1]


def capture_configuration(folder: Path, text: str, level: str) -> bytes:
    """Compile the configuration code in `text` at an optimization level and return the bytes that ldtilecfg would read."""
    parts = [re.search(pattern, text, re.M | re.S)[0]
             for pattern in (r"^struct tile_config_t\s*\{.*?^\};", r"^inline void ggml_tile_config_init\(void\) \{.*?^\}")]
    parts[1] = parts[1].replace("inline", "static")  # so that each library has its own `done`
    source, assembly, library = folder / "tiles.cpp", folder / "tiles.s", folder / "tiles.so"
    source.write_text("\n".join(["#include <immintrin.h>", "#include <cstdint>", *parts, "unsigned char captured[64];",
                                 'extern "C" void load(void) { ggml_tile_config_init(); }']))
    subprocess.run([compiler(), level, "-mamx-tile", "-fno-stack-protector", "-fPIC", "-S", source, "-o", assembly], check=True)

    def replace_load(match: re.Match) -> str:
        offset, base = match[1] or "0", match[2]
        return "\tmovq captured@GOTPCREL(%rip), %r11\n" + "\n".join(
            f"\tmovups {offset}+{16 * i}({base}), %xmm15\n\tmovups %xmm15, {16 * i}(%r11)" for i in range(4))

    lines, n = re.subn(r"^\s*ldtilecfg\s+(-?\d+)?\((%\w+)\)$", replace_load, assembly.read_text(), flags=re.M)
    assert n == 1 and "ldtilecfg" not in lines, assembly.read_text()
    assembly.write_text(lines)
    subprocess.run([compiler(), "-shared", assembly, "-o", library], check=True)
    dll = ctypes.CDLL(str(library))
    dll.load()
    return bytes((ctypes.c_ubyte * 64).in_dll(dll, "captured"))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O2", "-O3"])
def test_full_tile_configuration_is_stored(tmp_path, level):
    text = SOURCE.read_text()
    configuration = capture_configuration(tmp_path, text, level)
    assert configuration == EXPECTED, f"ldtilecfg reads {configuration.hex()}, expected {EXPECTED.hex()}"
    (tmp_path / "stock").mkdir()
    assert BARRIER in text
    needed = capture_configuration(tmp_path / "stock", text.replace(BARRIER, ""), level) != EXPECTED
    print(f"{compiler()} {level}: patch 0035 is {'needed' if needed else 'not needed'}")
