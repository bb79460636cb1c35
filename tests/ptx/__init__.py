"""CUDA without a GPU: nvcc's PTX interpreted in numpy, launched by upstream's own host code.

    parser.py     the text of a module to kernels and instructions
    table.py      the table of instructions; what is not in it is refused
    arithmetic.py, effects.py    what each instruction does, a line each
    memory.py     global and shared memory, and all that is wrong with an access
    machine.py    a launch: which threads go on, barriers, warps
    device.py     what CUDA's runtime is to host code: memory, launches, libraries of build/ptx
    compiled.py   what is compiled
    build.py      compiles those libraries: host.cu, mmq.cu, others.cu, runtime.cpp and upstream's sources

Semantics are those of "Parallel Thread Execution ISA", version 9.0 (NVIDIA, 2025). Not shown: what ptxas makes of PTX, weak ordering of
memory inside a warp, real scheduling, speed.
"""
