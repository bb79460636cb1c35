"""CUDA without a GPU: interpret nvcc's PTX in numpy, launched by upstream's own host code.

    parser.py     parses a module into kernels and instructions
    table.py      the table of instructions; unknown opcodes are refused
    arithmetic.py, effects.py    the instructions, about one line each
    memory.py     global and shared memory, with checks of every access
    machine.py    executes a launch: scheduling, barriers, warps
    device.py     the CUDA runtime that host code sees: memory, launches, libraries of build/ptx
    compiled.py   lists what is compiled
    build.py      compiles the libraries: host.cu, common.cu, others.cu, runtime.cpp and upstream's sources

The semantics are those of "Parallel Thread Execution ISA", version 9.0 (NVIDIA, 2025). Not covered: ptxas, weak memory ordering inside a
warp, real scheduling, speed.
"""
