#!/usr/bin/env python3
"""Count what the kernels for GPUs need, without a GPU, next to upstream types.

    kernel_counts.py metal TREE      TREE: the unpatched llama.cpp
    kernel_counts.py vulkan TREE     TREE: the patched one, for example build/vulkan/llama.cpp
    kernel_counts.py cuda TREE       TREE: the patched one, for example build/package/llama.cpp

Prints the tables of docs/reference/metal.md, vulkan.md and cuda.md. Metal and Vulkan: loads, look-ups and instructions per 16 weights. Metal: clang compiles the kernels as OpenCL C++ to LLVM IR for a GPU, optimized.
Vulkan: SPIR-V after glslc and spirv-opt -O, of load_a_to_shmem() of mul_mm, of mul_mat_vec in floats and in integers, and of block_a_to_shmem() of mul_mmq. Loads are those of device memory, look-ups those of tables and codebooks.
Arithmetic includes the addresses of Vulkan but not those of Metal, and no conversions between integers, stores or branches. A driver's compiler merges
some and adds others. Needs clang 14, glslc and spirv-tools.

CUDA: registers of each instance of MMVQ, warps that a multiprocessor holds at once, and whether ptxas spills registers. Needs nvcc and the headers
of cuBLAS, and two minutes per type.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cuda_tools
import metal_library
from pinned import Failure, run_script

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "tests" / "metal_host"
ATTRIBUTE = re.compile(r"\[\[\s*\w+(?:\(.*?\))?\s*\]\]")
# LLVM instructions that are not arithmetic
NO_ARITHMETIC = {"load", "store", "getelementptr", "bitcast", "zext", "sext", "trunc", "insertelement", "extractelement", "br", "ret", "phi", "alloca",
                 "unreachable", "freeze", "addrspacecast"}


def upstream_q4_k(tree: Path) -> str:
    """Return the block and the kernels of upstream's Q4_K, as text."""
    kernels = tree / metal_library.KERNELS
    dequantize, mul_mv, common = (path.read_text() for path in (kernels / "dequantize.h", kernels / "mul_mv.metal", tree / "ggml/src/ggml-common.h"))
    patterns = ((r"^static inline uchar2 get_scale_min_k4_just2.*?^}", dequantize), (r"^template <typename type4x4>\nvoid dequantize_q4_K\(.*?^}", dequantize),
                (r"^template<int nr0, typename args_t>\nvoid kernel_mul_mv_q4_K_f32_impl\(.*?^}", mul_mv))
    # as Metal's compiler does, unroll the loops of constant length
    functions = [re.sub(r"(?<!_UNROLL )\bfor \((short|int) (i|row) = 0; (i|row) < (8|16|nr0)", r"FOR_UNROLL (\1 \2 = 0; \3 < \4",
                        re.search(pattern, text, re.S | re.M)[0]) for pattern, text in patterns]
    block = re.search(r"typedef struct {(?:(?!typedef struct).)*?} block_q4_K;", common, re.S)[0]
    for word in ("GGML_EXTENSION", "GGML_COMMON_AGGR_U", "GGML_COMMON_AGGR_S"):
        block = block.replace(word, "")
    return "\n".join(["#define QK_K 256", "#define K_SCALE_SIZE 12", "typedef half ggml_half;", "typedef half2 ggml_half2;",
                      "typedef uchar uchar2 __attribute__((ext_vector_type(2)));", block, *functions])


def metal_library_text(tree: Path) -> str:
    """Return our library and upstream's headers in one text, without mul_mm."""
    directory = tree / metal_library.KERNELS
    text = "".join([(directory.parent / "ggml-metal-impl.h").read_text(),
                    (directory / "common.h").read_text().replace('#include "ggml-metal-impl.h"', ""), metal_library.library(None)])
    return "\n".join(line for line in text.replace("#include <metal_stdlib>", "").split("\n")
                     if "mul_mm<" not in line and "mul_mm_id<" not in line and line not in ("#pragma once", '#include "common.h"'))


def as_opencl(text: str) -> str:
    """Translate Metal source to OpenCL C++, which has the same address spaces."""
    # templates that are not used are not instantiated: keep the kernels' instantiations without their attributes
    text = re.sub(r'\[\[host_name\("[^"]+"\)\]\]\s*kernel', "", text)
    text = re.sub(r"^kernel void", "void", ATTRIBUTE.sub("", text), flags=re.M)
    return (HOST / "address_spaces.h").read_text() + re.sub(r"^constant (\w+) (FC_\w+)\s*;", r"constant \1 \2 = 1;", text, flags=re.M)


def metal_source(tree: Path) -> str:
    """Return our library, Q4_K and a function per type that dequantizes 16 weights, as OpenCL C++."""
    functions = [(name, f"ggml_ext_dequantize<block_{name}, half4x4>") for name in metal_library.weight_types()] + [("q4_K", "dequantize_q4_K<half4x4>")]
    calls = [f'extern "C" void count_{name}(device const block_{name} * x, short il, thread half4x4 & reg) '
             f"{{ half4x4 result; {call}(x, il, result); reg = result; }}" for name, call in functions]
    mul_mv = ("template void kernel_mul_mv_q4_K_f32_impl<N_R0_Q4_K, constant ggml_metal_kargs_mul_mv &>(constant ggml_metal_kargs_mul_mv &, "
              "device const char *, device const char *, device char *, threadgroup char *, uint3, ushort, ushort);")
    text = as_opencl("\n".join([metal_library_text(tree), upstream_q4_k(tree), *calls, mul_mv]))
    # bodies of functions that address_spaces.h only declares
    for declaration, body in (("operator[](int i) __private;", "operator[](int i) __private { return c[i]; }"),
                              ("template <typename T, typename U> T as_type(U);", "template <typename T, typename U> T as_type(U u) { return __builtin_astype(u, T); }")):
        text = text.replace(declaration, body)
    return text


class Counts(NamedTuple):
    """Operations per 16 weights: loads of weights and of activations, look-ups, arithmetic."""

    weights: float
    activations: float
    look_ups: float
    arithmetic: float


def compile_metal(source: str) -> dict[str, dict[str, list[str]]]:
    """Compile OpenCL C++ to LLVM IR. Return the basic blocks, by label, of each function.

    The target has address spaces that do not alias, as Metal's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.cl"
        path.write_text(source)
        command = ["clang", "-x", "cl", "-cl-std=clc++2021", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx1030", "-nogpulib", "-cl-no-stdinc", "-Xclang",
                   "-cl-ext=-all,+cl_khr_fp16,+cl_khr_fp64,+__opencl_c_fp64",
                   "-Wno-everything", "-O2", "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine", "-mllvm", "-inline-threshold=1000000",
                   "-S", "-emit-llvm", "-o", "-", path]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"clang cannot compile the kernels:\n{done.stderr[-3000:]}")
    functions = {}
    for name, body in re.findall(r"^define [^@]*@(\S+?)\(.*?\{\n(.*?)^\}", done.stdout, re.S | re.M):
        blocks = functions[name] = {"entry": []}
        label = "entry"
        for line in body.splitlines():
            if start := re.match(r"(\d+):", line):
                label = start[1]
                blocks[label] = []
            elif line.strip():
                blocks[label].append(line.strip())
    return functions


def largest_loop(blocks: dict[str, list[str]]) -> list[str]:
    """Return the instructions of the natural loop with the most instructions."""
    successors = {label: re.findall(r"label %(\d+)", lines[-1]) for label, lines in blocks.items()}
    order, loops = list(blocks), []
    for tail, targets in successors.items():
        for head in targets:
            if order.index(head) <= order.index(tail):  # a loop, unless its blocks can be entered elsewhere
                body, stack = {head, tail}, [tail] if tail != head else []
                while stack:
                    block = stack.pop()
                    for before in (label for label, t in successors.items() if block in t and label not in body):
                        body.add(before)
                        stack.append(before)
                if "entry" not in body:
                    loops.append([line for label in body for line in blocks[label]])
    return max(loops, key=len)


def count_llvm(lines: list[str], per: float) -> Counts:
    """Count instructions, divided by `per`. Loads of constant and threadgroup memory are look-ups."""
    weights = activations = look_ups = arithmetic = 0
    for line in lines:
        operation = re.match(r"(?:%\S+ = )?(?:tail )?([a-z]+)", line)[1]
        if operation == "load":
            is_float = re.match(r"%\S+ = load (float|<4 x float>),", line) is not None
            weights += "addrspace(1)" in line and not is_float
            activations += "addrspace(1)" in line and is_float
            look_ups += "addrspace(4)" in line or "addrspace(3)" in line
        elif operation not in NO_ARITHMETIC:
            arithmetic += 1
    return Counts(weights / per, activations / per, look_ups / per, arithmetic / per)


def count_metal(tree: Path) -> None:
    functions = compile_metal(metal_source(tree))

    def loop_of_mul_mv(start: str, weights: int) -> Counts:
        """Count an iteration of a function's loop, in which a lane multiplies so many weights."""
        return count_llvm(largest_loop(next(blocks for name, blocks in functions.items() if name.startswith(start))), weights / 16)

    print("| type | mul_mm: loads | look-ups | arithmetic | mul_mv: loads of weights | of activations | look-ups | arithmetic |\n" + "| --- " * 8 + "|")
    for name in (*metal_library.weight_types(), "q4_K"):
        mm = count_llvm(sum(functions[f"count_{name}"].values(), []), 1)
        if name == "q4_K":
            mv = loop_of_mul_mv("_Z27kernel_mul_mv_q4_K_f32_impl", 2 * 32)
        else:
            mv = loop_of_mul_mv(f"_Z17kernel_ext_mul_mvI{len(name) + 6}block_{name}Ls1E", 4 * 8)
        print(f"| {name.upper()} | {mm.weights:g} | {mm.look_ups:g} | {mm.arithmetic:g} | " + " | ".join(f"{n:g}" for n in mv) + " |")


# --- Vulkan

SHADERS = Path("ggml/src/ggml-vulkan/vulkan-shaders")
DEFINES = {"FLOAT16": "1", "FLOAT_TYPE": "float16_t", "FLOAT_TYPEV2": "f16vec2", "FLOAT_TYPEV4": "f16vec4", "ACC_TYPE": "float", "ACC_TYPEV2": "vec2",
           "B_TYPE": "float16_t", "B_TYPE_SCALAR": "float16_t", "B_TYPEV4": "f16vec4", "D_TYPE": "float"}
LOAD_A = "load_a_to_shmem(gl_WorkGroupID.x, gl_LocalInvocationID.x, gl_LocalInvocationID.y, 0, 0, p.K);"
VULKAN_COUNTS = ("StorageBuffer", "Workgroup", "arithmetic")
# the products of one block with all rows and columns; the results depend on all of them
ADD_BLOCK = """
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) { [[unroll]] for (uint n = 0; n < NUM_ROWS; ++n) { temp[j][n] = 0.0; } }
    CALL
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) { [[unroll]] for (uint n = 0; n < NUM_ROWS; ++n) { data_d[j*NUM_ROWS + n] = temp[j][n]; } }
"""
ARITHMETIC = re.compile(r"Op(I|F|S|U|Bit|Shift|Convert|Vector|Ext)")
NO_SPIRV_ARITHMETIC = {"OpUConvert", "OpSConvert", "OpStore", "OpSelectionMerge", "OpSwitch", "OpExtInstImport", "OpExtension", "OpFunction", "OpFunctionEnd",
                       "OpVectorShuffle", "OpSource", "OpSourceExtension", "OpString", "OpSpecConstant", "OpSpecConstantOp", "OpSpecConstantComposite"}


def compile_vulkan(shaders: Path, text: str, defines: dict[str, str], *options: str) -> Counter:
    """Compile a shader and count the operations in its SPIR-V: loads by storage class, arithmetic. options: more of spirv-opt's."""
    with tempfile.TemporaryDirectory() as folder:
        source, spirv, optimized = (Path(folder) / name for name in ("a.comp", "a.spv", "b.spv"))
        source.write_text(text)
        for command in (["glslc", "-fshader-stage=compute", "--target-env=vulkan1.2", f"-I{shaders}", source, "-o", spirv,
                         *(f"-D{name}={value}" for name, value in defines.items())],
                        ["spirv-opt", "--target-env=vulkan1.2", *options, "--freeze-spec-const", "-O", spirv, "-o", optimized],
                        ["spirv-dis", optimized]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Failure(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    storage: dict[str, str] = {}
    counts = Counter()
    for result, operation, operands in re.findall(r"^ *(?:(%\S+) = )?(Op\w+) ?(.*)$", done.stdout, re.M):
        words = operands.split()
        if operation == "OpVariable":
            storage[result] = words[1]
        elif operation == "OpAccessChain":
            storage[result] = storage.get(words[1], "")
        elif operation == "OpLoad":
            counts[storage.get(words[1], "")] += 1
        elif ARITHMETIC.match(operation) and operation not in NO_SPIRV_ARITHMETIC:
            counts["arithmetic"] += 1
    return counts


def count_mul_mm(shaders: Path) -> None:
    head = (shaders / "mul_mm.comp").read_text().split("void main() {")[0].replace("layout (constant_id = 12) const uint MmTypeA = 0;",
                                                                                    "const uint MmTypeA = MM_TYPE;")
    ours = int(re.search(r"LOAD_VEC_A = (\d+)", (shaders / "ggml_ext" / "mul_mm.glsl").read_text())[1])
    print("| mul_mm | loads | look-ups | arithmetic |\n| --- | --- | --- | --- |")
    for name in (*metal_library.weight_types(), "q4_K"):
        upper = name.upper()
        if name == "q4_K":
            load_vec_a, defines = 4, {**DEFINES, "MULMAT_QUANT": "1", "MM_TYPE": f"GGML_TYPE_{upper}"}  # mm_load_vec_a() in mul_mm.comp
        else:
            load_vec_a, defines = ours, {**DEFINES, f"DATA_A_{upper}": "1", "LOAD_VEC_A": str(ours)}
        with_load, without = (compile_vulkan(shaders, f"{head}void main() {{ {call} barrier(); data_d[gl_LocalInvocationID.x] = "
                                             "D_TYPE(buf_a[gl_LocalInvocationID.y].x); }", defines) for call in (LOAD_A, ""))
        counts = [(with_load[key] - without[key]) * 16 / load_vec_a for key in VULKAN_COUNTS]
        print(f"| {upper} | " + " | ".join(f"{n:g}" for n in counts) + " |")


def count_mul_mat_vec(shaders: Path) -> None:
    """Count a thread's 32 weights of each row, with the rows that pipelines.h chooses for one and for eight columns, in floats and in integers."""
    head = (shaders / "ggml_ext_mul_mat_vec.comp").read_text().split("void compute_outputs(")[0]
    floats = {"B_TYPE": "float", "B_TYPEV2": "vec2", "B_TYPEV4": "vec4"}
    print("\n| mul_mat_vec, floats / integers | " + " | ".join(f"{n} column{'s' * (n > 1)}: loads | look-ups | arithmetic" for n in (1, 8)) +
          " |\n" + "| --- " * 7 + "|")
    for name in metal_library.weight_types():
        cells = []
        for n_columns, n_rows in ((1, 4), (8, 2)):
            sizes = ("--set-spec-const-default-value", f"1:{n_rows} 2:{n_columns}")
            numbers = []
            for more in (floats, {"B_TYPE": "ext_q8", "EXT_INTEGER": "1"}):
                defines = {f"DATA_A_{name.upper()}": "1", "D_TYPE": "float", "FLOAT_TYPE": "float", "FLOAT_TYPEV2": "vec2", **more}
                with_block, without = (compile_vulkan(shaders, f"{head}void main() {{ {ADD_BLOCK.replace('CALL', call)} }}", defines, *sizes)
                                       for call in ("add_block(p.stride_a, p.stride_b, p.ncols, 0, NUM_ROWS, gl_WorkGroupID.x, gl_LocalInvocationID.x);", ""))
                numbers.append([(with_block[key] - without[key]) / (2 * n_rows) for key in VULKAN_COUNTS])
            cells += [f"{a:.3g} / {b:.3g}" for a, b in zip(*numbers, strict=True)]
        print(f"| {name.upper()} | " + " | ".join(cells) + " |")


def count_mul_mmq(shaders: Path) -> None:
    head = (shaders / "mul_mmq.comp").read_text().split("void main() {")[0]
    print("\n| mul_mmq | loads | look-ups | arithmetic |\n| --- | --- | --- | --- |")
    for name in metal_library.weight_types():
        defines = {**DEFINES, f"DATA_A_{name.upper()}": "1", "EXT_INTEGER": "1", "FLOAT_TYPE": "float", "FLOAT_TYPEV2": "uint"}
        with_load, without = (compile_vulkan(shaders, f"{head}void main() {{ {call} barrier(); data_d[gl_LocalInvocationID.x] = "
                                             "float(buf_a[gl_LocalInvocationID.y].qs[0]); }", defines)
                              for call in ("block_a_to_shmem(gl_LocalInvocationID.x, gl_WorkGroupID.x, 0);", ""))
        print(f"| {name.upper()} | " + " | ".join(f"{(with_load[key] - without[key]) / 2:g}" for key in VULKAN_COUNTS) + " |")


def count_vulkan(tree: Path) -> None:
    for count in (count_mul_mm, count_mul_mat_vec, count_mul_mmq):
        count(tree / SHADERS)


# --- CUDA

# resident warps, thread blocks and KiB of shared memory per multiprocessor (CUDA C++ Programming Guide, technical specifications)
MULTIPROCESSORS = {"80": (64, 32, 164), "90": (64, 32, 228), "120": (48, 24, 100)}
REGISTERS = 65536 // 4  # of a quarter of a multiprocessor, where a warp takes multiples of 256
RESERVED = 1024         # bytes of shared memory per block that the driver takes
UPSTREAM = ("q4_K", "q3_K")
ENTRY = re.compile(r"Compiling entry function '\w*?mul_mat_vec_q(_moe)?IL9ggml_type\d+ELi(\d)ELb(\d)E(?:Lb(\d)E)?\w*' for 'sm_(\d+)'.*?"
                   r"(\d+) bytes spill stores.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?", re.S)
# the kernels: (experts, columns, fused, rows shorter than 4096)
SHORT = [(False, 1, fused, True) for fused in (False, True)]
INSTANCES = [(False, 1, False, False), SHORT[0], (False, 1, True, False), SHORT[1], *((False, n, False, False) for n in range(2, 9)),
             *((True, 2, fused, False) for fused in (False, True))]
HEAD = ["1 column", "short rows", "fused", "fused, short rows", *map(str, range(2, 9)), "experts", "fused experts"]


class Instance(NamedTuple):
    """What ptxas says about a kernel: registers per thread, bytes of shared memory per block and of spilled registers per thread."""

    registers: int
    shared: int
    spilled: int

    def resident_warps(self, n_warps: int, architecture: str) -> int:
        """Return how many warps a multiprocessor holds at once, in blocks of n_warps (the rules of cuda_occupancy.h)."""
        warps, blocks, kib = MULTIPROCESSORS[architecture]
        of_registers = 4 * (REGISTERS // (-(-self.registers // 8) * 8 * 32))
        return min(of_registers // n_warps, warps // n_warps, blocks, kib * 1024 // (-(-self.shared // 128) * 128 + RESERVED)) * n_warps


def read_instances(log: str) -> list[tuple[tuple, Instance]]:
    """Return the kernels of MMVQ in the messages of nvcc -Xptxas=-v, with their architectures and keys of INSTANCES."""
    return [((architecture, moe != "", int(columns), fused == "1", short == "1"), Instance(int(registers), int(shared or 0), int(spilled)))
            for moe, columns, fused, short, architecture, spilled, registers, shared in ENTRY.findall(log)]


def compile_mmvq(tree: Path, name: str, architectures: list[str]) -> dict[tuple, Instance]:
    """Compile all kernels of MMVQ for a type. Return them by architecture and key of INSTANCES."""
    ggml = tree / "ggml"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "mmvq.cu"
        source.write_text(cuda_tools.trimmed_mmvq((ggml / "src/ggml-cuda/mmvq.cu").read_text(), {name: name not in UPSTREAM}, tuple(range(1, 9))))
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
        command = cuda_tools.compile_command(ggml, "", *targets, "-w", "-Xptxas=-v", "-c", source, "-o", f"{folder}/mmvq.o")
        done = subprocess.run([part for part in command if part != "-arch="], capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"nvcc cannot compile {name}:\n{done.stderr[-3000:]}")
    return dict(read_instances(done.stderr))


def count_cuda(tree: Path, names: list[str], architectures: list[str]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = dict(zip(names, pool.map(lambda name: compile_mmvq(tree, name, architectures), names), strict=True))
    for architecture in architectures:
        print(f"sm_{architecture}, registers / resident warps\n\n| type | {' | '.join(HEAD)} |\n" + "| --- " * (len(HEAD) + 1) + "|")
        for name in names:
            instances = {key: counts[name][(architecture, *key)] for key in INSTANCES}
            # warps per block: of experts one per token; short rows have one per 1024 weights, here two
            n_warps = {key: 2 if key in SHORT or key[1] > 4 or key[0] else 4 for key in INSTANCES}
            print(f"| {name.upper()} | " + " | ".join(f"{i.registers} / {i.resident_warps(n_warps[key], architecture)}{' spills' * (i.spilled > 0)}"
                                                      for key, i in instances.items()) + " |")
        print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["metal", "vulkan", "cuda"])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--types", nargs="+", default=[*metal_library.weight_types(), *UPSTREAM], metavar="TYPE",
                        help=f"cuda: types to compile (default: all of ggml-ext, {' and '.join(UPSTREAM)})")
    parser.add_argument("--architectures", nargs="+", choices=MULTIPROCESSORS, default=["90"], help="cuda: for which GPUs (default: 90)")
    args = parser.parse_args()
    if args.backend == "cuda":
        return run_script(lambda: count_cuda(args.tree, args.types, args.architectures))
    return run_script(lambda: (count_metal if args.backend == "metal" else count_vulkan)(args.tree))


if __name__ == "__main__":
    sys.exit(main())
