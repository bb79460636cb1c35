// Serve the CPU kernels of one instruction set under an emulator: answer requests from standard input until it ends. Requests and answers, as
// in native.py's EmulatedKernels:
//
//   int32 operation (a letter), int32 type, int64 n_blocks, then the operands     answer
//   'i'  -                                                                        the name of the set, 16 bytes
//   'u'  blocks                                                                   the codes
//   'v'  blocks, a row of the type's activations                                  one float
//   'c'  int64 n_rows, n_cols; rows of n_blocks; columns of the type's activations   floats, column by column
//   'g'  the same, for the GEMM                                                   the same
//   'd'  blocks                                                                   floats
//   'r'  the same, by the function for GET_ROWS                                   floats
//   'q'  floats of as many blocks; type: Q8_KR, Q8_KR64 or Q8_KR32           the activations
#include "ggml-ext-cpu.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

struct request {
    int32_t op, type;
    int64_t n_blocks;
};

static std::vector<uint8_t> receive(size_t size) {
    std::vector<uint8_t> data(size);
    if (fread(data.data(), 1, size, stdin) != size) {
        fprintf(stderr, "the request ends early\n");
        exit(1);
    }
    return data;
}

// Bytes of n activations. All types store 256 together; Q8_K and Q8_KR have the same size.
static size_t activation_bytes(size_t block_size, size_t n) {
    return (n + QK_K - 1)/QK_K*(block_size == 32 ? sizeof(block_q8_kr32) : block_size == 64 ? sizeof(block_q8_kr64) : sizeof(block_q8_K));
}

static float vec_dot(int32_t type, int n, const void * x, const void * y) {
    float s = NAN;
    switch (type) {
#define X(NAME, name) case GGML_TYPE_##NAME: ggml_ext_vec_dot_##name(n, &s, 0, x, 0, y, 0, 1); break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
    }
    return s;
}

int main() {
    request r;
    while (fread(&r, sizeof(r), 1, stdin) == 1) {
        const enum ggml_type type = (ggml_type) r.type;
        const size_t n = r.n_blocks, block_size = ggml_blck_size(type), row_bytes = n*ggml_type_size(type);
        std::vector<uint8_t> out;
        switch (r.op) {
            case 'i':
                out.resize(16);
                strncpy((char *) out.data(), ggml_ext_cpu_isa(), out.size());
                break;
            case 'u': {
                const auto x = receive(row_bytes);
                out.resize(n*block_size);
                for (size_t i = 0; i < n; ++i) {
                    if (!ggml_ext_cpu_unpack_block(type, x.data() + i*(row_bytes/n), out.data() + i*block_size)) {
                        return 1;
                    }
                }
                break;
            }
            case 'v': {
                const auto x = receive(row_bytes), y = receive(activation_bytes(block_size, n*block_size));
                const float s = vec_dot(r.type, (int) (n*block_size), x.data(), y.data());
                out.resize(sizeof(s));
                memcpy(out.data(), &s, sizeof(s));
                break;
            }
            case 'c':
            case 'g': {
                int64_t count[2]; // rows, columns
                memcpy(count, receive(sizeof(count)).data(), sizeof(count));
                const size_t y_bytes = activation_bytes(block_size, n*block_size);
                const auto x = receive(count[0]*row_bytes), y = receive(count[1]*y_bytes);
                std::vector<const void *> columns;
                std::vector<float *> products;
                out.resize(count[0]*count[1]*sizeof(float));
                for (int64_t c = 0; c < count[1]; ++c) {
                    columns.push_back(y.data() + c*y_bytes);
                    products.push_back((float *) out.data() + c*count[0]);
                }
                const auto multiply = r.op == 'c' ? ggml_ext_dot_columns : ggml_ext_gemm;
                if (!multiply(type, n*block_size, products.data(), x.data(), row_bytes, count[0], columns.data(), (int) count[1])) {
                    return 1;
                }
                break;
            }
            case 'd':
            case 'r': {
                const auto x = receive(row_bytes);
                out.resize(n*block_size*sizeof(float));
                (r.op == 'd' ? ggml_get_type_traits(type)->to_float : ggml_ext_to_float(type))(x.data(), (float *) out.data(), n*block_size);
                break;
            }
            case 'q': {
                const auto x = receive(n*block_size*sizeof(float));
                const auto quantize = block_size == 32 ? ggml_ext_quantize_row_q8_kr32 :
                                      block_size == 64 ? ggml_ext_quantize_row_q8_kr64 : ggml_ext_quantize_row_q8_kr;
                out.resize(activation_bytes(block_size, n*block_size));
                quantize((const float *) x.data(), out.data(), n*block_size);
                break;
            }
            default: return 1;
        }
        fwrite(out.data(), 1, out.size(), stdout);
        fflush(stdout);
    }
    return 0;
}
