// The CPU kernels of one instruction set for processors other than the tests' own: answers requests on standard input
// until it ends. Requests and answers are native.py's EmulatedKernels:
//
//   int32 operation (a letter), int32 type, int64 n_blocks, then the operands     answer
//   'i'  -                                                                        the name of the set, 16 bytes
//   'u'  blocks                                                                   256 codes a block
//   'v'  blocks, as many Q8_K                                                     one float
//   'd'  blocks                                                                   256 floats a block
//   'q'  256 floats a block                                                       Q8_KR
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
        const size_t n = r.n_blocks, row_bytes = n*ggml_type_size((ggml_type) r.type);
        std::vector<uint8_t> out;
        switch (r.op) {
            case 'i':
                out.resize(16);
                strncpy((char *) out.data(), ggml_ext_cpu_isa(), out.size());
                break;
            case 'u': {
                const auto x = receive(row_bytes);
                out.resize(n*QK_K);
                for (size_t i = 0; i < n; ++i) {
                    if (!ggml_ext_cpu_unpack_block((ggml_type) r.type, x.data() + i*(row_bytes/n), out.data() + i*QK_K)) {
                        return 1;
                    }
                }
                break;
            }
            case 'v': {
                const auto x = receive(row_bytes), y = receive(n*sizeof(block_q8_K));
                const float s = vec_dot(r.type, (int) (n*QK_K), x.data(), y.data());
                out.resize(sizeof(s));
                memcpy(out.data(), &s, sizeof(s));
                break;
            }
            case 'd': {
                const auto x = receive(row_bytes);
                out.resize(n*QK_K*sizeof(float));
                ggml_get_type_traits((ggml_type) r.type)->to_float(x.data(), (float *) out.data(), n*QK_K);
                break;
            }
            case 'q': {
                const auto x = receive(n*QK_K*sizeof(float));
                out.resize(n*sizeof(block_q8_K));
                ggml_ext_quantize_row_q8_kr((const float *) x.data(), out.data(), n*QK_K);
                break;
            }
            default: return 1;
        }
        fwrite(out.data(), 1, out.size(), stdout);
        fflush(stdout);
    }
    return 0;
}
