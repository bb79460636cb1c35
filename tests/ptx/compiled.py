"""What is compiled to be interpreted: architectures, stock types, tiles. build.py and the tests go by these lists."""

# CUDA C++ Programming Guide, table of technical specifications: bytes of shared memory that a block may have
SHARED_LIMIT = {"75": 64 * 1024, "80": 163 * 1024, "90": 227 * 1024, "120": 99 * 1024}
ARCHITECTURES = tuple(SHARED_LIMIT)
MAIN = "90"  # the one for which the kernels of every type are compiled; the night compiles all for all
TENSOR_CORES = ("75", "90")  # one of each kind
STOCK = ("q3_K", "q4_K", "iq3_s", "iq2_xxs")
# Columns of MMQ's tiles that upstream uses for the layouts of our types (mmq-config-ampere.cuh), and a type for each of the two
# layouts, which has them all
WHOLE, RAGGED = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128), (8, 16, 32, 64, 128)
ALL_TILES_OF = ("itq3_t", "itq3_s")


def all_tiles_on(name: str, nightly: bool) -> tuple[str, ...]:
    """Architectures for which tiles of all numbers of columns are compiled for a type."""
    if name in ALL_TILES_OF:
        return TENSOR_CORES if nightly else ("90",)
    return ("90",) if nightly else ()
