#!/usr/bin/env python3
"""Translate a Metal library to C++: expand its includes, remove attributes and register every kernel by name.

    translate.py KERNELS.metal OUT.h [--only REGEX]    only kernels whose full name matches REGEX

KERNELS.metal must be in ggml/src/ggml-metal/kernels of a llama.cpp tree.
"""
from __future__ import annotations

import argparse
import re
from pathlib import Path

BUILTINS = {  # attribute -> the value of a metal_host::builtin
    "threadgroup_position_in_grid": "now().position",
    "threads_per_threadgroup": "now().threads",
    "thread_index_in_threadgroup": "{now().index, 0, 0}",
    "thread_position_in_threadgroup": "{now().index, 0, 0}",
    "thread_index_in_simdgroup": "{now().index % 32, 0, 0}",
    "simdgroup_index_in_threadgroup": "{now().index/32, 0, 0}",
}
ATTRIBUTE = re.compile(r"\[\[\s*(\w+)(?:\((.*?)\))?\s*\]\]")


def expand_includes(path: Path) -> str:
    """Return the text that upstream's CMakeLists.txt produces with cat and sed."""
    directory, source = path.parent, path.read_text()
    headers = ["common.h", *(name for name in ("dequantize.h", "quantize.h") if f'#include "{name}"' in source)]
    lines = []
    for line in "".join([*((directory / name).read_text() for name in headers), source]).split("\n"):
        if re.search(r'#include "(common|dequantize|quantize)\.h"|#pragma once', line):
            continue
        if "__embed_ggml-common.h__" in line:
            line = (directory.parents[1] / "ggml-common.h").read_text()
        elif '#include "ggml-metal-impl.h"' in line:
            line = (directory.parent / "ggml-metal-impl.h").read_text()
        lines.append(line)
    return "\n".join(lines)


def call_arguments(text: str) -> dict[str, str]:
    """Return the arguments of a call of each kernel function, made from metal_host::now() and `buffers`."""
    calls = {}
    for head in re.finditer(r"\bkernel void (\w+)\(", text):
        depth, end = 1, head.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        arguments, n_buffers = [], 0
        for parameter in text[head.end() : end - 1].split(",\n"):
            attribute = ATTRIBUTE.search(parameter)
            kind = ATTRIBUTE.sub("", parameter).strip().rsplit(None, 1)[0]
            if attribute and attribute[1] in BUILTINS:
                arguments.append(f"builtin{{{BUILTINS[attribute[1]]}}}")
            elif attribute and attribute[1] == "threadgroup":
                arguments.append(f"({kind}) now().memory")
            else:
                assert not attribute, parameter
                if kind.endswith("&"):
                    arguments.append(f"*({kind[:-1]} *) buffers[{n_buffers}]")
                else:
                    arguments.append(f"({kind}) buffers[{n_buffers}]")
                n_buffers += 1
        calls[head[1]] = ", ".join(arguments)
    return calls


def translate(text: str, only: re.Pattern) -> str:
    calls = call_arguments(text)
    n_kernels = 0

    def registration(name: str, function: str) -> str:
        nonlocal n_kernels
        if not only.fullmatch(name):
            return ""
        n_kernels += 1
        call = f"{function}({calls[function.split('<')[0]]})"
        return (f'static metal_host::registered metal_host_kernel_{n_kernels}("{name}", [](void ** buffers) {{ '
                f"using namespace metal_host; (void) buffers; {call}; }});")

    # template instances: replaced in place
    text = re.sub(r'template\s*\[\[host_name\("([^"]+)"\s*\)\]\]\s*kernel\s+\w+\s+(\w+<[^;]+>);', lambda m: registration(m[1], m[2].strip()), text)
    # other kernels: registered at the end
    plain = [(m[1] or m[2], m[2]) for m in re.finditer(r'(?:\[\[host_name\("([^"]+)"\)\]\]\s*)?^kernel void (\w+)\(', text, re.M)
             if not re.search(r">\s*(//[^\n]*)?\s*\Z", text[max(0, m.start() - 200) : m.start()])]
    text = re.sub(r'\[\[host_name\("[^"]+"\)\]\]', "", text)
    # function constants
    text = re.sub(r"constant (\w+) (\w+)\s*\[\[function_constant\((.+?)\)\]\];",
                  r"static \1 \2; static metal_host::registered_constant metal_host_\2(\3, &\2);", text)
    text = ATTRIBUTE.sub("", text)
    text = re.sub(r"\{ \[ 0 \.\.\. [^\]]+\] = 0\.0f \}", "{}", text)  # GNU range initializer
    text = re.sub(r"\b(\d+\.\d*)h\b", r"half(\1)", text)
    return "\n".join([text, *(registration(name, function) for name, function in plain)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=re.compile, default=re.compile(".*"))
    args = parser.parse_args()
    args.out.write_text(translate(expand_includes(args.source), args.only))


if __name__ == "__main__":
    main()
