// Check operations on ggml-ext types on a Vulkan device against the scalar reference in double precision.
//
//   ggml-ext-vulkan-driver LIBGGML_VULKAN [integers] < cases
//
// With "integers" the device is expected to round activations to 8 bits (vulkan/q8.glsl), and so does the reference.
//
// A case is a line "type operation k m n batch r2": weights k x m, n columns (rows: n indices; experts: n tokens with two of four
// experts), `batch` weight matrices, each for r2 matrices of activations. Operations:
//   rows       ggml_get_rows
//   plain      ggml_mul_mat                        f32    the same with GGML_PREC_F32
//   permuted   activations permuted (0 2 1 3)      view   activations with an offset and longer rows
//   experts    ggml_mul_mat_id
// The result is a line "values max_error nmse different": number of outputs; maximum of error/(|w| |x|), with the norms of the row of
// weights and of the column; NMSE; number of outputs that are not bit-equal. Or "refused". The weights have their own buffer, which ends
// with them. Guards follow activations and results; "guard" means that one was overwritten.
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-ext-rotation.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int N_EXPERTS = 4, N_USED = 2, MARGIN = 256; // extra length and offset of the rows of a view
constexpr size_t GUARD = 4096;

struct test_case {
    ggml_type   type;
    std::string operation;
    int64_t     k, m, n, batch, r2;
    bool        integers;
};

struct graph {
    ggml_context * weights, * context;
    ggml_tensor  * w, * x, * base, * ids, * out, * guards[2]; // x is a view of base
};

std::mt19937 rng;

// Random blocks with scales of similar size, so that no block hides the errors of another.
std::vector<uint8_t> random_blocks(ggml_type type, int64_t n) {
    std::vector<uint8_t> bytes(ggml_row_size(type, n));
    for (auto & byte : bytes) {
        byte = (uint8_t) rng();
    }
    for (size_t i = 0; i < bytes.size(); i += ggml_type_size(type)) {
        const ggml_fp16_t d = ggml_fp32_to_fp16(0.01f + 0.0001f*(float) (rng() % 100)), z = ggml_fp32_to_fp16(3.0f + 0.01f*(float) (rng() % 100));
        switch (type) {
            case GGML_TYPE_ITQ3_S:
                memcpy(&bytes[i + 2], &z, sizeof(z));
                [[fallthrough]];
            case GGML_TYPE_DITTO3: case GGML_TYPE_DITTO5:
                memcpy(&bytes[i], &d, sizeof(d));
                break;
            default: // one-byte scale
                bytes[i] = (uint8_t) (0x60 + rng() % 16);
        }
    }
    return bytes;
}

std::vector<float> random_values(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (auto & value : values) {
        value = normal(rng);
    }
    return values;
}

graph build(const test_case & c) {
    graph g = {};
    const ggml_init_params params = {ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true};
    g.weights = ggml_init(params);
    g.context = ggml_init(params);
    ggml_context * ctx = g.context;
    const bool experts = c.operation == "experts";
    g.w = ggml_new_tensor_3d(g.weights, c.type, c.k, c.m, experts ? N_EXPERTS : c.batch);
    if (c.operation == "rows") {
        g.x = g.base = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n);
    } else if (experts) {
        g.x = g.base = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.k, N_USED, c.n);
        g.ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_USED, c.n);
    } else if (c.operation == "permuted") {
        g.base = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.k, c.batch*c.r2, c.n);
        g.x = ggml_permute(ctx, g.base, 0, 2, 1, 3);
    } else if (c.operation == "view") {
        g.base = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.k + MARGIN, c.n + 1, c.batch*c.r2);
        g.x = ggml_view_3d(ctx, g.base, c.k, c.n, c.batch*c.r2, g.base->nb[1], g.base->nb[2], MARGIN*sizeof(float) + g.base->nb[1]);
    } else if (c.operation == "plain" || c.operation == "f32") {
        g.x = g.base = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.k, c.n, c.batch*c.r2);
    } else {
        throw std::runtime_error("unknown operation: " + c.operation);
    }
    g.guards[0] = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, GUARD);
    g.out = c.operation == "rows" ? ggml_get_rows(ctx, g.w, g.x) : experts ? ggml_mul_mat_id(ctx, g.w, g.x, g.ids) : ggml_mul_mat(ctx, g.w, g.x);
    if (c.operation == "f32") {
        ggml_prec_set_acc(g.out, GGML_PREC_F32);
    }
    g.guards[1] = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, GUARD);
    return g;
}

struct data {
    std::vector<uint8_t> blocks;
    std::vector<float>   w, x; // w: unpacked by the reference
    std::vector<int32_t> ids;  // experts or rows
};

data fill(const test_case & c, const graph & g) {
    data d;
    const int64_t n_rows = ggml_nrows(g.w);
    d.w.resize(ggml_nelements(g.w));
    for (int64_t r = 0; r < n_rows; ++r) {
        const auto row = random_blocks(c.type, c.k);
        d.blocks.insert(d.blocks.end(), row.begin(), row.end());
        ggml_get_type_traits(c.type)->to_float(row.data(), &d.w[r*c.k], c.k);
    }
    ggml_backend_tensor_set(g.w, d.blocks.data(), 0, d.blocks.size());
    if (c.operation == "rows") {
        for (int64_t i = 0; i < c.n; ++i) {
            d.ids.push_back(i == 0 ? (int32_t) c.m - 1 : (int32_t) (rng() % c.m));
        }
        ggml_backend_tensor_set(g.x, d.ids.data(), 0, ggml_nbytes(g.x));
    } else {
        d.x = random_values(ggml_nelements(g.base));
        for (int64_t i = 0; c.integers && i < ggml_nelements(g.base); ++i) { // rows of sizes that halves do not hold
            d.x[i] = std::ldexp(d.x[i], 12*(int) (i/g.base->ne[0] % 9) - 48);
        }
        ggml_backend_tensor_set(g.base, d.x.data(), 0, ggml_nbytes(g.base));
    }
    if (g.ids) {
        for (int64_t i = 0; i < c.n; ++i) {
            d.ids.push_back((int32_t) (rng() % N_EXPERTS));
            d.ids.push_back((int32_t) ((d.ids.back() + 1 + rng() % (N_EXPERTS - 1)) % N_EXPERTS));
        }
        ggml_backend_tensor_set(g.ids, d.ids.data(), 0, ggml_nbytes(g.ids));
    }
    for (ggml_tensor * guard : g.guards) {
        const std::vector<uint8_t> bytes(GUARD, 0xff); // NaN as floats
        ggml_backend_tensor_set(guard, bytes.data(), 0, bytes.size());
    }
    return d;
}

// Get the weights and activations of row r of column (z, q) of the output.
std::pair<const float *, const float *> operands(const test_case & c, const data & d, int64_t z, int64_t q, int64_t r) {
    if (c.operation == "experts") { // z: token, q: index of its expert
        return {&d.w[(d.ids[N_USED*z + q]*c.m + r)*c.k], &d.x[(z*N_USED + q)*c.k]};
    }
    const float * w = &d.w[((z/c.r2)*c.m + r)*c.k];
    if (c.operation == "permuted") {
        return {w, &d.x[(q*c.batch*c.r2 + z)*c.k]};
    }
    if (c.operation == "view") {
        return {w, &d.x[(z*(c.n + 1) + q + 1)*(c.k + MARGIN) + MARGIN]};
    }
    return {w, &d.x[(z*c.n + q)*c.k]};
}

GGML_EXT_DEFINE_BUTTERFLIES(butterflies, double)

// Blocks of activations, and whether they are rotated.
std::pair<int, bool> block_of(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return {GGML_EXT_##NAME##_BLOCK_SIZE, GGML_EXT_##NAME##_ROTATED != 0};
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: throw std::runtime_error("not a type of ggml-ext");
    }
}

// Round a block as the device does, in place: a group has the values of one thread, and a scale in bfloat16 that is rounded up.
void round_block(float * x, int n) {
    for (int k = 0; k < n/32; ++k) {
        const auto at = [&](int i) -> float & { return x[n/8*(i/4) + 4*k + i%4]; };
        float max = 0;
        for (int i = 0; i < 32; ++i) {
            max = std::max(max, std::fabs(at(i)));
        }
        const float quotient = max/127;
        uint32_t bits;
        memcpy(&bits, &quotient, sizeof(bits));
        bits = (bits + 0xffff) & 0xffff0000;
        float scale;
        memcpy(&scale, &bits, sizeof(bits));
        for (int i = 0; i < 32; ++i) {
            at(i) = std::nearbyint(at(i)*(1/scale))*scale;
        }
    }
}

std::vector<double> activations(const test_case & c, const float * x) {
    std::vector<double> result(x, x + c.k);
    const auto [n, is_rotated] = block_of(c.type);
    for (int64_t begin = 0; c.integers && begin < c.k; begin += n) {
        std::vector<float> block(x + begin, x + begin + n);
        if (is_rotated) {
            ggml_ext_rotate_block(block.data(), n);
        }
        round_block(block.data(), n);
        std::copy(block.begin(), block.end(), &result[begin]);
        if (is_rotated) {
            butterflies(&result[begin], n);
            for (int j = 0; j < n; ++j) {
                result[begin + j] *= ggml_ext_rotation_scale(n)*(ggml_ext_signs[j/32] >> j%32 & 1 ? -1 : 1);
            }
        }
    }
    return result;
}

void compare(const test_case & c, const graph & g, const data & d) {
    std::vector<float> out(ggml_nelements(g.out));
    ggml_backend_tensor_get(g.out, out.data(), 0, ggml_nbytes(g.out));
    double worst = 0, squares = 0, errors = 0;
    int64_t n_different = 0, i_out = 0;
    const auto add = [&](double expected, double scale) {
        const double error = std::fabs(out[i_out] - expected);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error/scale);
        errors  += error*error;
        squares += expected*expected;
        n_different += (float) expected != out[i_out++];
    };
    if (c.operation == "rows") {
        for (const int32_t id : d.ids) {
            for (int64_t j = 0; j < c.k; ++j) {
                add(d.w[id*c.k + j], 1);
            }
        }
    } else {
        for (int64_t z = 0; z < g.out->ne[2]; ++z) {
            for (int64_t q = 0; q < g.out->ne[1]; ++q) {
                const std::vector<double> x = activations(c, operands(c, d, z, q, 0).second);
                for (int64_t r = 0; r < c.m; ++r) {
                    const float * w = operands(c, d, z, q, r).first;
                    double product = 0, ww = 0, xx = 0;
                    for (int64_t j = 0; j < c.k; ++j) {
                        product += w[j]*x[j];
                        ww += (double) w[j]*w[j];
                        xx += x[j]*x[j];
                    }
                    add(product, std::sqrt(ww*xx));
                }
            }
        }
    }
    printf("%zu %.3g %.3g %lld\n", out.size(), worst, errors/squares, (long long) n_different);
}

// Buffers are freed after the last case: lavapipe 22.3 keeps those of a command in its state and reads them again after they are freed.
void run(ggml_backend_t backend, const test_case & c, std::vector<ggml_backend_buffer_t> & buffers) {
    graph g = build(c);
    if (!ggml_backend_supports_op(backend, g.out)) {
        printf("refused\n");
    } else {
        ggml_cgraph * nodes = ggml_new_graph(g.context);
        ggml_build_forward_expand(nodes, g.out);
        for (ggml_context * ctx : {g.weights, g.context}) {
            buffers.push_back(ggml_backend_alloc_ctx_tensors(ctx, backend));
        }
        const data d = fill(c, g);
        if (ggml_backend_graph_compute(backend, nodes) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("computing the graph failed");
        }
        bool intact = true;
        for (ggml_tensor * guard : g.guards) {
            std::vector<uint8_t> bytes(GUARD);
            ggml_backend_tensor_get(guard, bytes.data(), 0, bytes.size());
            intact = intact && bytes == std::vector<uint8_t>(GUARD, 0xff);
        }
        if (intact) {
            compare(c, g, d);
        } else {
            printf("guard\n");
        }
    }
    ggml_free(g.context);
    ggml_free(g.weights);
    fflush(stdout);
}

ggml_type find_type(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * type_name = ggml_type_name((ggml_type) i);
        if (type_name && name == type_name) {
            return (ggml_type) i;
        }
    }
    throw std::runtime_error("unknown type: " + name);
}

} // namespace

int main(int argc, char ** argv) try {
    ggml_backend_reg_t reg = argc == 2 || argc == 3 ? ggml_backend_load(argv[1]) : nullptr;
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        fprintf(stderr, "error: %s\n", reg ? "no Vulkan device" : "usage: ggml-ext-vulkan-driver LIBGGML_VULKAN [integers] < cases");
        return 1;
    }
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(reg, 0);
    fprintf(stderr, "device: %s\n", ggml_backend_dev_description(device));
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    std::vector<ggml_backend_buffer_t> buffers;
    for (std::string line, type; std::getline(std::cin, line);) {
        test_case c = {};
        c.integers = argc == 3;
        std::istringstream words(line);
        if (!(words >> type >> c.operation >> c.k >> c.m >> c.n >> c.batch >> c.r2)) {
            throw std::runtime_error("invalid case: " + line);
        }
        c.type = find_type(type);
        rng.seed(1);
        run(backend, c, buffers);
    }
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_free(buffer);
    }
    ggml_backend_free(backend);
    return 0;
} catch (const std::exception & e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
}
