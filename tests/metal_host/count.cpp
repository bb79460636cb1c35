// Runs one kernel of mul_mv with one column, for scripts/gpu/metal_instructions.py to count: count KERNEL COLUMNS ROWS_A_SIMDGROUP
// SIMDGROUPS THREADGROUP_BYTES BLOCK_WEIGHTS BLOCK_BYTES.
#include "runtime.h" // brings the integers that the next one uses
#include "ggml-metal-impl.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    using namespace metal_host;
    if (argc != 8) {
        return 1;
    }
    const int n = atoi(argv[2]), nr0 = atoi(argv[3]), nsg = atoi(argv[4]), memory = atoi(argv[5]), block = atoi(argv[6]), bytes = atoi(argv[7]);
    const int    n_rows   = nr0*nsg;
    const size_t row_size = (size_t) n/block*bytes;
    std::vector<unsigned char> w(row_size*n_rows + 64, 0x2a); // a kernel may load whole words behind the last block
    std::vector<float> x(n, 1.0f), y(n_rows);
    for (auto & [index, set] : constants()) {
        set(index == FC_MUL_MV ? nsg : index == FC_MUL_MV + 5 ? 0 : 1); // + 5: rows split among simdgroups
    }
    ggml_metal_kargs_mul_mv args = {};
    args.ne00 = n;      args.ne01 = n_rows; args.ne02 = 1;
    args.nb00 = bytes;  args.nb01 = row_size; args.nb02 = args.nb03 = row_size*n_rows;
    args.ne10 = n;      args.ne11 = 1;      args.ne12 = 1;
    args.nb10 = 4;      args.nb11 = args.nb12 = args.nb13 = 4*n;
    args.ne0  = n_rows; args.ne1  = 1;      args.nr0 = nr0; args.r2 = args.r3 = 1;
    void * buffers[] = {&args, w.data(), x.data(), y.data()};
    launch(kernels().at(argv[1]), {1, 1, 1}, {32, (unsigned) nsg, 1}, memory, buffers);
    printf("%g\n", y[0]);
}
