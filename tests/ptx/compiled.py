"""What is compiled for the interpreter: architectures, upstream types, tiles. build.py and the tests share these lists."""

# bytes of shared memory per block (CUDA C++ Programming Guide, technical specifications)
SHARED_LIMIT = {"75": 64 * 1024, "80": 163 * 1024, "90": 227 * 1024, "120": 99 * 1024}
ARCHITECTURES = tuple(SHARED_LIMIT)
MAIN = "90"  # make check compiles the types for this architecture, make nightly for all of them
NIGHTLY_TYPES = ("itq1_t", "itq1h_t64", "itq1_t64", "itq4_t32", "itq2_t32")  # not in make check: ITQ1H_T and ITQ3_T32 run most of their code
TENSOR_CORES = ("75", "90")  # one architecture per kind of tensor core
STOCK = ("q3_K", "q4_K", "iq3_s", "iq2_xxs")
# columns of the MMQ tiles that upstream uses for our layouts (mmq-config-ampere.cuh); one type per layout has all of them
FULL, RAGGED = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128), (8, 16, 32, 64, 128)
ALL_TILES_OF = ("itq3_t", "itq3_s")


def all_tiles_on(name: str, nightly: bool) -> tuple[str, ...]:
    """Return the architectures for which a type has tiles of every column count."""
    if name in ALL_TILES_OF:
        return TENSOR_CORES if nightly else ("90",)
    return ("90",) if nightly else ()
