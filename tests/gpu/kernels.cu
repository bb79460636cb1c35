// Check the device code of cuda/ on a GPU against the scalar references: unpack, rotation, quantization of activations, dequantization,
// programmatic dependent launch, and tensors of more than 2^32 bytes. Prints a line of JSON per check and timing; exits with 1 if a
// check fails.
//
//   ggml-ext-gpu-kernels [--few] [--no-timings] [--only-timings]
//
// --few: all checks on little data, for sanitizers and for host code (tests/cuda_host/kernels.cpp).
#include "mmq.cuh"
#include "cuda/dequantize.cuh"
#include "cuda/quantize.cuh"
#include "device.cuh"
#include "timings.cuh"

#include <cfloat>
#include <cinttypes>
#include <string>

static bool all_passed = true;

// Launch like the backend, with programmatic dependent launch.
template <typename Kernel, typename... Args>
static void launch(Kernel kernel, int64_t n_blocks, cudaStream_t stream, Args... args) {
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(dim3(n_blocks, 1, 1), dim3(32, 1, 1), 0, stream), args...);
}

static void report(const std::string & check, int64_t n, int64_t n_wrong, const std::string & first) {
    all_passed = all_passed && n_wrong == 0;
    printf("{\"check\": \"%s\", \"n\": %" PRId64 ", \"wrong\": %" PRId64 ", \"first\": \"%s\"}\n", check.c_str(), n, n_wrong, first.c_str());
    fflush(stdout);
}

static std::string hex(const uint8_t * p, size_t n) {
    std::string out;
    char s[3];
    for (size_t i = 0; i < n; ++i) {
        snprintf(s, sizeof(s), "%02x", p[i]);
        out += s;
    }
    return out;
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

// Blocks with one bit set, with all but one bit set, and random ones. valid: only those with finite scales.
template <typename B> static std::vector<uint8_t> blocks(bool valid) {
    std::vector<uint8_t> out;
    const int n_bits = 8*sizeof(B), n_random = few ? 16 : 3000;
    for (int i = 0; i < 2*n_bits + n_random + 1; i += few && i < 2*n_bits ? 32 : 1) { // an odd number of blocks
        uint8_t b[sizeof(B)] = {};
        for (size_t j = 0; j < sizeof(B); ++j) {
            b[j] = i < 2*n_bits ? (i < n_bits ? 0 : 0xff) : (uint8_t) rng();
        }
        if (i < 2*n_bits) {
            b[i%n_bits/8] ^= (uint8_t) (1 << i%8);
        }
        int8_t  q[QK_K];
        int32_t scale[GGML_EXT_MAX_GROUPS];
        float   d, offset;
        ggml_ext_unpack_block(ggml_ext::traits<B>::type, b, q, scale, &d, &offset);
        if (!valid || (std::isfinite(d) && std::isfinite(offset))) {
            out.insert(out.end(), b, b + sizeof(B));
        }
    }
    return out;
}

struct reference {
    int8_t  q[QK_K];
    int32_t scale[GGML_EXT_MAX_GROUPS];
    float   d, offset;
};

template <typename B> static __global__ void unpack_blocks(const B * x, int n, reference * out) {
    typedef ggml_ext::traits<B> T;
    constexpr int n_threads = ggml_ext::N_THREADS<B>;
    const int ib = (blockIdx.x*32 + threadIdx.x)/n_threads, k = threadIdx.x%n_threads;
    if (ib >= n) {
        return;
    }
    const ggml_ext::unpacked u = ggml_ext::unpack_by_group<B>(x[ib], k);
    for (int i = 0; i < 32; ++i) {
        out[ib].q[T::block_size/8*(i/4) + 4*k + i%4] = (int8_t) (u.q[i/4] >> 8*(i%4));
    }
    if (k == ib%n_threads) { // all threads have the scales
        for (int s = 0; s < T::n_groups; ++s) {
            out[ib].scale[s] = T::n_groups == 1 ? 1 : u.scale[s];
        }
        out[ib].d      = u.d;
        out[ib].offset = u.offset;
    }
}

// Check unpack with the first block `shift` bytes after a multiple of four. 0 and 2 cover both alignments of each block.
template <typename B> static void check_unpack(const char * name, int shift) {
    const std::vector<uint8_t> bytes = blocks<B>(false);
    std::vector<uint8_t> shifted(shift, 0xa5);
    shifted.insert(shifted.end(), bytes.begin(), bytes.end());
    const int n = bytes.size()/sizeof(B);
    const buffer<uint8_t>   x(shifted);
    const buffer<reference> u(n);
    typedef ggml_ext::traits<B> T;
    launch(unpack_blocks<B>, (ggml_ext::N_THREADS<B>*n + 31)/32, nullptr, (const B *) (x.data + shift), n, u.data);
    const std::vector<reference> actual = u.get();
    int64_t     n_wrong = 0;
    std::string first;
    for (int i = 0; i < n; ++i) {
        reference r = {};
        ggml_ext_unpack_block(T::type, &bytes[i*sizeof(B)], r.q, r.scale, &r.d, &r.offset);
        const bool same = memcmp(r.q, actual[i].q, T::block_size) == 0 &&
            memcmp(r.scale, actual[i].scale, T::n_groups*sizeof(int32_t)) == 0 &&
            (bits_of(r.d) == bits_of(actual[i].d) || (std::isnan(r.d) && std::isnan(actual[i].d))) &&
            (bits_of(r.offset) == bits_of(actual[i].offset) || (std::isnan(r.offset) && std::isnan(actual[i].offset)));
        if (!same && n_wrong++ == 0) {
            first = "block " + std::to_string(i) + " " + hex(&bytes[i*sizeof(B)], sizeof(B));
        }
    }
    report(std::string("unpack ") + name + (shift ? ", shifted" : ""), n, n_wrong, first);
}

// Equal, where subnormals may be flushed to zero.
static bool same_float(float a, float b) {
    return a == b || (std::fabs(a) < FLT_MIN && std::fabs(b) < FLT_MIN);
}

template <typename B, typename T, typename F> static void check_dequantize(const char * name, const char * to, F as_float, float rel) {
    const std::vector<uint8_t> bytes = blocks<B>(true);
    constexpr int block_size = ggml_ext::traits<B>::block_size;
    const int64_t n = bytes.size()/sizeof(B)*block_size;
    const buffer<uint8_t> x(bytes);
    const buffer<T>       y(n);
    ggml_ext::dequantize_cuda<B>(x.data, y.data, n, nullptr);
    const std::vector<T> actual = y.get();
    std::vector<float>   expected(n);
    ggml_get_type_traits(ggml_ext::traits<B>::type)->to_float(bytes.data(), expected.data(), n);
    int64_t     n_wrong = 0;
    std::string first;
    for (int64_t i = 0; i < n; ++i) {
        const float f = as_float(actual[i]), e = expected[i];
        // one rounding to the result's type, or overflow
        const bool same = rel == 0 ? same_float(f, e) : std::fabs(f - e) <= rel*std::fabs(e) + 6e-8f || (std::isinf(f) && std::fabs(e) >= 65504);
        if (!same && n_wrong++ == 0) {
            first = "weight " + std::to_string(i%block_size) + " is " + std::to_string(f) + ", not " + std::to_string(e) + ", block " +
                    hex(&bytes[i/block_size*sizeof(B)], sizeof(B));
        }
    }
    report(std::string("dequantize ") + name + " to " + to, n, n_wrong, first);
}

template <int n> static __global__ void rotate_blocks(float * x) {
    float v[ggml_ext::N_PER_LANE];
    ggml_ext::load_values<n, true>(x + QK_K*blockIdx.x, QK_K, threadIdx.x, v);
    for (int i = 0; i < ggml_ext::N_PER_LANE; ++i) {
        const int j = n*ggml_ext::lane_block<n>(threadIdx.x) + ggml_ext::N_LANES<n>*i + ggml_ext::block_lane<n>(threadIdx.x);
        x[QK_K*blockIdx.x + j] = v[i];
    }
}

template <int n> static void check_rotation() {
    const int n_warps = few ? 10 : 1000;
    std::vector<float> x = gaussian(n_warps*QK_K);
    const buffer<float> y(x);
    launch(rotate_blocks<n>, n_warps, nullptr, y.data);
    const std::vector<float> actual = y.get();
    ggml_ext_rotate(x.data(), x.size()/n, n);
    int64_t n_wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        n_wrong += !same_float(actual[i], x[i]);
    }
    report("rotation of " + std::to_string(n), x.size(), n_wrong, "");
}

// Check that scales cover a thread's values and exceed them only by the rounding to bfloat16, and that errors are within half a step.
// Rows are padded from ne00 to ne0; with shorter blocks they end inside 256 values.
template <typename B> static void check_quantize() {
    typedef ggml_ext::traits<B> T;
    typedef ggml_ext::block_q8<T::block_size> block_y;
    constexpr int n = T::block_size, n_threads = ggml_ext::N_THREADS<B>;
    const int64_t ne00 = n == QK_K ? 768 : n == 64 ? 704 : 672, ne0 = 1024, s01 = 777, ne1 = few ? 2 : 50, ne2 = 3;
    const std::vector<float> x = gaussian(s01*ne1*ne2);
    const buffer<float>   xd(x);
    const buffer<block_y> yd(ne2*ne1*ne0/32/block_y::n_threads);
    ggml_ext::quantize_row_q8_cuda(xd.data, yd.data, T::type, ne00, s01, s01*ne1, 0, ne0, ne1, ne2, 1, nullptr);
    const std::vector<block_y> y = yd.get();
    int64_t     n_wrong = 0;
    std::string first;
    for (int64_t row = 0; row < ne1*ne2; ++row) {
        for (int64_t ib = 0; ib < ne0/n; ++ib) {
            float v[n] = {};
            if (ib < ne00/n) {
                memcpy(v, &x[row*s01 + ib*n], sizeof(v));
                if (T::rotated) {
                    ggml_ext_rotate(v, 1, n);
                }
            }
            for (int k = 0; k < n_threads; ++k) {
                const int64_t   thread = row*ne0/32 + ib*n_threads + k;
                const block_y & b      = y[thread/block_y::n_threads];
                const int8_t *  qs     = b.qs[thread%block_y::n_threads];
                const uint32_t  ds     = b.ds[thread%block_y::n_threads], bits = ds & 0xffff0000;
                float d, amax = 0;
                memcpy(&d, &bits, 4);
                bool ok = true;
                int  sum = 0;
                for (int i = 0; i < 32; ++i) {
                    const float e = v[n/8*(i/4) + 4*k + i%4];
                    const int   q = qs[ggml_ext::code_place(ggml_ext::unpacker<B>::nibble_distance, i/4, i%4)];
                    amax = std::max(amax, std::fabs(e));
                    sum += q;
                    ok = ok && std::fabs(q*d - e) <= 0.5001f*d;
                }
                ok = ok && sum == (int16_t) ds && 127*d >= amax*(1 - 1e-6f) && 127*d <= amax*(1 + 1.01f/128);
                if (!ok && n_wrong++ == 0) {
                    first = "row " + std::to_string(row) + " block " + std::to_string(ib) + " thread " + std::to_string(k) + " d " +
                            std::to_string(d);
                }
            }
        }
    }
    report(std::string("quantize for ") + ggml_type_name(T::type), ne2*ne1*ne0/32, n_wrong, first);
}

// --- programmatic dependent launch -----------------------------------------------------------------------------------

// x[i] = src[i + shift], slowly: `next` is the identity, unknown to the compiler, and is read n_reads times.
static __global__ void write_slowly(uint32_t * x, const uint32_t * src, const uint32_t * next, uint32_t n, uint32_t shift, int n_reads) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const uint32_t i = blockIdx.x*32 + threadIdx.x;
    if (i < n) {
        uint32_t j = (i + shift) % n;
        for (int k = 0; k < n_reads; ++k) {
            j = next[j];
        }
        x[i] = src[j];
    }
}

static __global__ void copy_words(const uint32_t * x, uint32_t * y, uint32_t n) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const uint32_t i = blockIdx.x*32 + threadIdx.x;
    if (i < n) {
        y[i] = x[i];
    }
}

// Check a chain of launches, repeated n_steps times: write new input to x, run(stream, x, y), copy y. Without waiting, on a stream and
// in a graph, the results must equal those with a wait after each launch.
template <typename F> static void check_chain(const std::string & name, const std::vector<uint32_t> & input, size_t n_out, F run) {
    const int n_steps = few ? 2 : 64, n_reads = few ? 2 : 50;
    const uint32_t n = input.size();
    std::vector<uint32_t> identity(n);
    for (uint32_t i = 0; i < n; ++i) {
        identity[i] = i;
    }
    const buffer<uint32_t> source(input), next(identity), x(n), y(n_out), out(n_out*n_steps);
    cudaStream_t stream;
    CUDA_CHECK(cudaDeviceSynchronize()); // another stream fills the buffers
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const auto steps = [&](bool wait) {
        for (int i = 0; i < n_steps; ++i) {
            const auto wait_for_launch = [&] { CUDA_CHECK(wait ? cudaStreamSynchronize(stream) : cudaSuccess); };
            launch(write_slowly, (n + 31)/32, stream, x.data, (const uint32_t *) source.data, (const uint32_t *) next.data, n, 37u*i, n_reads);
            wait_for_launch();
            run(stream, x.data, y.data);
            wait_for_launch();
            launch(copy_words, (n_out + 31)/32, stream, (const uint32_t *) y.data, out.data + n_out*i, (uint32_t) n_out);
            wait_for_launch();
        }
    };
    steps(true);
    const std::vector<uint32_t> expected = out.get();
    const auto compare = [&](const char * how) {
        const std::vector<uint32_t> actual = out.get();
        int64_t     n_wrong = 0;
        std::string first;
        for (size_t i = 0; i < actual.size(); ++i) {
            if (actual[i] != expected[i] && n_wrong++ == 0) {
                first = "step " + std::to_string(i/n_out) + " word " + std::to_string(i%n_out);
            }
        }
        CUDA_CHECK(cudaMemset(out.data, 0x55, actual.size()*4));
        CUDA_CHECK(cudaDeviceSynchronize());
        report(name + " behind a kernel, " + how, actual.size(), n_wrong, first);
    };
    CUDA_CHECK(cudaMemset(out.data, 0x55, expected.size()*4));
    CUDA_CHECK(cudaDeviceSynchronize());
    steps(false);
    compare("stream");
    {
        const captured_graph graph(stream, [&] { steps(false); });
        for (int i = 0; i < (few ? 1 : 3); ++i) {
            CUDA_CHECK(cudaGraphLaunch(graph.exec, stream));
        }
        compare("graph");
    }
    CUDA_CHECK(cudaStreamDestroy(stream));
}

static std::vector<uint32_t> to_words(const void * data, size_t n_bytes) {
    std::vector<uint32_t> words(n_bytes/4);
    memcpy(words.data(), data, 4*words.size());
    return words;
}

template <typename B> static void check_chains(const char * name) {
    const ggml_type type = ggml_ext::traits<B>::type;
    const int64_t k = few ? 512 : 2048, n_columns = few ? 2 : 5;
    const std::vector<float> x = gaussian(k*n_columns);
    check_chain(std::string("quantize for ") + name, to_words(x.data(), 4*x.size()), k*n_columns/32*9, [&](cudaStream_t stream, void * x, void * y) {
        ggml_ext::quantize_row_q8_cuda((const float *) x, y, type, k, k, k*n_columns, 0, k, n_columns, 1, 1, stream);
    });
    if (ggml_ext::quantizes_for_mmq(type)) {
        check_chain(std::string("quantize for tiles of ") + name, to_words(x.data(), 4*x.size()), k*n_columns/32*9, [&](cudaStream_t stream, void * x, void * y) {
            ggml_ext::quantize_mmq_cuda<false>((const float *) x, nullptr, y, type, k, k, k*n_columns, 0, k, n_columns, n_columns, 1, 1, 0, stream);
        });
    }
    std::vector<uint8_t> bytes = blocks<B>(true);
    const int64_t n = std::min<int64_t>(few ? 8 : 64, bytes.size()/sizeof(B)/2*2)*ggml_ext::traits<B>::block_size; // full words
    check_chain(std::string("dequantize ") + name, to_words(bytes.data(), n/ggml_ext::traits<B>::block_size*sizeof(B)), n, [&](cudaStream_t stream, void * x, void * y) {
        ggml_ext::dequantize_cuda<B>(x, (float *) y, n, stream);
    });
}

// --- more than 2^32 bytes ----------------------------------------------------------------------------------------------

// Check get_rows of the last row of a tensor of more than 2^32 bytes.
template <typename B> static void check_large_rows(const char * name) {
    constexpr int64_t block_size = ggml_ext::traits<B>::block_size, k = 4096, row_bytes = k/block_size*sizeof(B);
    const int64_t n_rows = few ? 5 : ((int64_t) 1 << 32)/row_bytes + 3;
    const std::vector<uint8_t> all = blocks<B>(true);
    std::vector<uint8_t> rows[2] = {std::vector<uint8_t>(row_bytes), std::vector<uint8_t>(row_bytes)};
    for (int64_t i = 0; i < row_bytes; ++i) {
        rows[0][i] = all[i % all.size()];
        rows[1][i] = all[all.size() - 1 - (row_bytes - 1 - i) % all.size()]; // ends with the last block
    }
    const buffer<uint8_t> x(n_rows*row_bytes);
    CUDA_CHECK(cudaMemcpy(x.data, rows[0].data(), row_bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(x.data + (n_rows - 1)*row_bytes, rows[1].data(), row_bytes, cudaMemcpyHostToDevice));
    const buffer<int32_t> ids(std::vector<int32_t>{(int32_t) (n_rows - 1), 0});
    const buffer<float>   y(2*k);
    const size_t nb = n_rows*row_bytes;
    ggml_ext::get_rows_cuda<B>(x.data, ids.data, y.data, k, row_bytes, nb, nb, 2, 1, 1, 4, 8, 8, 4*k, 8*k, 8*k, nullptr);
    const std::vector<float> actual = y.get();
    std::vector<float> expected(2*k);
    const auto to_float = ggml_get_type_traits(ggml_ext::traits<B>::type)->to_float;
    to_float(rows[1].data(), expected.data(), k);
    to_float(rows[0].data(), expected.data() + k, k);
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < 2*k; ++i) {
        n_wrong += !same_float(actual[i], expected[i]);
    }
    report(std::string("last of many rows of ") + name, n_rows, n_wrong, "");
}

// Check quantize_mmq_cuda() with a result of more than 2^32 bytes: all columns are the same row of x, so first and last must be equal.
template <typename B> static void check_large_columns(const char * name) {
    const ggml_type type = ggml_ext::traits<B>::type;
    if (!ggml_ext::quantizes_for_mmq(type)) {
        return;
    }
    constexpr int64_t block_bytes = 4*sizeof(block_q8_1), k = 4096, n_parts = k/(4*QK8_1);
    const int64_t n = few ? 5 : ((int64_t) 1 << 32)/(n_parts*block_bytes) + 3;
    const buffer<float>   x(gaussian(k));
    const buffer<uint8_t> y(n*n_parts*block_bytes);
    ggml_ext::quantize_mmq_cuda<false>(x.data, nullptr, y.data, type, k, 0, 0, 0, k, n, n, 1, 1, 0, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    int64_t n_wrong = 0;
    for (int64_t part = 0; part < n_parts; ++part) {
        uint8_t first[block_bytes], last[block_bytes], unwritten[block_bytes];
        CUDA_CHECK(cudaMemcpy(first, y.data + part*n*block_bytes, block_bytes, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(last, y.data + (part*n + n - 1)*block_bytes, block_bytes, cudaMemcpyDeviceToHost));
        memset(unwritten, 0x55, block_bytes);
        n_wrong += memcmp(first, last, block_bytes) != 0 || memcmp(first, unwritten, block_bytes) == 0;
    }
    report(std::string("last of many columns for ") + name, n, n_wrong, "");
}

int main(int argc, char ** argv) {
    bool timings = true, checks = true;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        if (option == "--few") {
            few = true;
        } else if (option == "--no-timings") {
            timings = false;
        } else if (option == "--only-timings") {
            checks = false;
        } else {
            fprintf(stderr, "usage: %s [--few] [--no-timings] [--only-timings]\n", argv[0]);
            return 1;
        }
    }
#define CHECK(NAME, name)                                                                                                       \
    check_unpack<block_##name>(#name, 0);                                                                                       \
    if (sizeof(block_##name) % 4) { /* others are always aligned to four */                                                \
        check_unpack<block_##name>(#name, 2);                                                                                   \
    }                                                                                                                           \
    check_dequantize<block_##name, float>(#name, "f32", [](float x) { return x; }, 0);                                          \
    check_dequantize<block_##name, half>(#name, "f16", [](half x) { return __half2float(x); }, 1.0f/2048);                      \
    check_dequantize<block_##name, nv_bfloat16>(#name, "bf16", [](nv_bfloat16 x) { return __bfloat162float(x); }, 1.0f/256);    \
    check_quantize<block_##name>();                                                                                             \
    check_chains<block_##name>(#name);                                                                                          \
    check_large_rows<block_##name>(#name);                                                                                      \
    check_large_columns<block_##name>(#name);
    if (checks) {
        GGML_EXT_WEIGHT_TYPES(CHECK)
        check_rotation<256>();
        check_rotation<64>();
        check_rotation<32>();
    }
    if (timings) {
        time_quantize();
    }
    return all_passed ? 0 : 1;
}
