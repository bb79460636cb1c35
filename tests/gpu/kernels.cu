// The device code of cuda/ on a GPU against the scalar references: unpack, rotation, quantisation of activations,
// dequantisation. Prints a line of JSON for each check and one for each timing; exits with 1 if a check failed.
#include "ggml-cuda/quantize.cuh"
#include "cuda/dequantize.cuh"
#include "cuda/quantize.cuh"

#include <cinttypes>
#include <random>
#include <string>

// Memory on the device, of whole words as buffers of tensors are: unpack.cuh may read the last one's padding.
template <typename T> struct buffer {
    T *    data;
    size_t n;
    explicit buffer(size_t n) : n(n) {
        CUDA_CHECK(cudaMalloc((void **) &data, (n*sizeof(T) + 3)/4*4));
        CUDA_CHECK(cudaMemset(data, 0x55, n*sizeof(T)));
    }
    explicit buffer(const std::vector<T> & from) : buffer(from.size()) {
        CUDA_CHECK(cudaMemcpy(data, from.data(), n*sizeof(T), cudaMemcpyHostToDevice));
    }
    buffer(const buffer &) = delete;
    ~buffer() { cudaFree(data); }
    std::vector<T> get() const {
        std::vector<T> out(n);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(out.data(), data, n*sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};

static bool all_passed = true;

static void report(const std::string & check, int64_t n, int64_t n_wrong, const std::string & first) {
    all_passed = all_passed && n_wrong == 0;
    printf("{\"check\": \"%s\", \"n\": %" PRId64 ", \"wrong\": %" PRId64 ", \"first\": \"%s\"}\n", check.c_str(), n, n_wrong, first.c_str());
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

static std::mt19937 rng(20261121);

// Every bit alone, every bit but one, random bytes. Finite scales where asked for.
template <typename B> static std::vector<uint8_t> blocks(bool valid) {
    std::vector<uint8_t> out;
    const int n_bits = 8*sizeof(B), n_random = 3000;
    for (int i = 0; i < 2*n_bits + n_random + 1; ++i) { // an odd number
        uint8_t b[sizeof(B)] = {};
        for (size_t j = 0; j < sizeof(B); ++j) {
            b[j] = i < 2*n_bits ? (i < n_bits ? 0 : 0xff) : (uint8_t) rng();
        }
        if (i < 2*n_bits) {
            b[i%n_bits/8] ^= (uint8_t) (1 << i%8);
        }
        if (!valid || ggml_ext_validate_row(ggml_ext::traits<B>::type, b, 1)) {
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
    const int ib = (blockIdx.x*blockDim.x + threadIdx.x)/n_threads, k = threadIdx.x%n_threads;
    if (ib >= n) {
        return;
    }
    const ggml_ext::unpacked u = ggml_ext::unpacker<B>::unpack(x[ib], k);
    for (int i = 0; i < 32; ++i) {
        out[ib].q[T::block_size/8*(i/4) + 4*k + i%4] = (int8_t) (u.q[i/4] >> 8*(i%4));
    }
    if (k == ib%n_threads) { // each thread knows the scales
        for (int s = 0; s < T::n_groups; ++s) {
            out[ib].scale[s] = T::n_groups == 1 ? 1 : u.scale[s];
        }
        out[ib].d      = u.d;
        out[ib].offset = u.offset;
    }
}

template <typename B> static void check_unpack(const char * name) {
    const std::vector<uint8_t> bytes = blocks<B>(false);
    const int n = bytes.size()/sizeof(B);
    const buffer<uint8_t>   x(bytes);
    const buffer<reference> u(n);
    typedef ggml_ext::traits<B> T;
    unpack_blocks<<<(ggml_ext::N_THREADS<B>*n + 127)/128, 128>>>((const B *) x.data, n, u.data);
    CUDA_CHECK(cudaGetLastError());
    const std::vector<reference> found = u.get();
    int64_t     n_wrong = 0;
    std::string first;
    for (int i = 0; i < n; ++i) {
        reference r = {};
        ggml_ext_unpack_block(T::type, &bytes[i*sizeof(B)], r.q, r.scale, &r.d, &r.offset);
        const bool same = memcmp(r.q, found[i].q, T::block_size) == 0 &&
            memcmp(r.scale, found[i].scale, T::n_groups*sizeof(int32_t)) == 0 &&
            (bits_of(r.d) == bits_of(found[i].d) || (std::isnan(r.d) && std::isnan(found[i].d))) &&
            (bits_of(r.offset) == bits_of(found[i].offset) || (std::isnan(r.offset) && std::isnan(found[i].offset)));
        if (!same && n_wrong++ == 0) {
            first = "block " + std::to_string(i) + " " + hex(&bytes[i*sizeof(B)], sizeof(B));
        }
    }
    report(std::string("unpack ") + name, n, n_wrong, first);
}

// Equal bits, but for -0, and with what flushes subnormal numbers to zero.
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
    const std::vector<T> found = y.get();
    std::vector<float>   expected(n);
    ggml_get_type_traits(ggml_ext::traits<B>::type)->to_float(bytes.data(), expected.data(), n);
    int64_t     n_wrong = 0;
    std::string first;
    for (int64_t i = 0; i < n; ++i) {
        const float f = as_float(found[i]), e = expected[i];
        // one rounding to the result's type, or its largest number passed
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
        const int at = n*ggml_ext::lane_block<n>(threadIdx.x) + ggml_ext::N_LANES<n>*i + ggml_ext::block_lane<n>(threadIdx.x);
        x[QK_K*blockIdx.x + at] = v[i];
    }
}

static std::vector<float> gaussian(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float & v : x) {
        v = normal(rng);
    }
    return x;
}

template <int n> static void check_rotation() {
    const int n_warps = 1000;
    std::vector<float> x = gaussian(n_warps*QK_K);
    const buffer<float> y(x);
    rotate_blocks<n><<<n_warps, 32>>>(y.data);
    CUDA_CHECK(cudaGetLastError());
    const std::vector<float> found = y.get();
    ggml_ext_rotate(x.data(), x.size()/n, n);
    int64_t n_wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        n_wrong += !same_float(found[i], x[i]);
    }
    report("rotation of " + std::to_string(n), x.size(), n_wrong, "");
}

// Scales cover what a thread multiplies and are no larger than bfloat16's rounding makes them; values lie within half a step.
// Rows are padded from ne00 to ne0; those of blocks of 64 end in the middle of 256 values.
template <typename B> static void check_quantize() {
    typedef ggml_ext::traits<B> T;
    typedef ggml_ext::block_q8<T::block_size> block_y;
    constexpr int n = T::block_size, n_threads = ggml_ext::N_THREADS<B>;
    const int64_t ne00 = n == QK_K ? 768 : 704, ne0 = 1024, s01 = 777, ne1 = 50, ne2 = 3;
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
                    amax = std::max(amax, std::fabs(e));
                    sum += qs[i];
                    ok = ok && std::fabs(qs[i]*d - e) <= 0.5001f*d;
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

// Microseconds of one launch of f on stream, out of a graph of many: no gaps between launches.
template <typename F> static double microseconds(F f) {
    const int n_launches = 200, n_replays = 20;
    cudaStream_t    stream;
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    cudaEvent_t     start, stop;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n_launches; ++i) {
        f(stream);
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
    std::vector<double> times;
    for (int i = 0; i < n_replays; ++i) {
        CUDA_CHECK(cudaEventRecord(start, stream));
        CUDA_CHECK(cudaGraphLaunch(exec, stream));
        CUDA_CHECK(cudaEventRecord(stop, stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        times.push_back(1e3*ms/n_launches);
    }
    std::sort(times.begin(), times.end());
    return times[n_replays/2];
}

static void time_quantize() {
    for (int64_t n : {2048, 4096, 8192, 14336}) {
        const buffer<float> x(gaussian(n));
        const buffer<ggml_ext::block_q8<QK_K>> y(n/QK_K);
        const auto us = [&](ggml_type type) {
            return microseconds([&](cudaStream_t s) { ggml_ext::quantize_row_q8_cuda(x.data, y.data, type, n, n, n, n, n, 1, 1, 1, s); });
        };
        printf("{\"timing\": \"quantize\", \"n\": %" PRId64 ", \"plain_us\": %.3f, \"rotated_us\": %.3f, \"rotated_64_us\": %.3f}\n", n,
               us(GGML_TYPE_CCQ2), us(GGML_TYPE_ITQ3_S), us(GGML_TYPE_ITQ3_T64));
    }
}

static void time_copy() {
    const size_t n = (size_t) 1 << 30;
    const buffer<uint8_t> a(n), b(n);
    double best = 1e30;
    for (int i = 0; i < 5; ++i) {
        cudaEvent_t start, stop;
        CUDA_CHECK(cudaEventCreate(&start));
        CUDA_CHECK(cudaEventCreate(&stop));
        CUDA_CHECK(cudaEventRecord(start));
        CUDA_CHECK(cudaMemcpyAsync(a.data, b.data, n, cudaMemcpyDeviceToDevice));
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        best = std::min(best, (double) ms);
    }
    printf("{\"timing\": \"copy\", \"gb_per_s\": %.1f}\n", 2*n/best/1e6);
}

int main(int argc, char ** argv) {
    const bool timings = argc < 2 || std::string(argv[1]) != "--no-timings";
#define CHECK(NAME, name)                                                                                                       \
    check_unpack<block_##name>(#name);                                                                                          \
    check_dequantize<block_##name, float>(#name, "f32", [](float x) { return x; }, 0);                                          \
    check_dequantize<block_##name, half>(#name, "f16", [](half x) { return __half2float(x); }, 1.0f/2048);                      \
    check_dequantize<block_##name, nv_bfloat16>(#name, "bf16", [](nv_bfloat16 x) { return __bfloat162float(x); }, 1.0f/256);    \
    check_quantize<block_##name>();
    GGML_EXT_WEIGHT_TYPES(CHECK)
    check_rotation<256>();
    check_rotation<64>();
    if (timings) {
        time_quantize();
        time_copy();
    }
    return all_passed ? 0 : 1;
}
