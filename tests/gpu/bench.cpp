// Time matrix products on a backend, one line of JSON each:
//
//   ggml-ext-gpu-bench DEVICE TYPE[,TYPE...] ROWSxCOLSxTOKENS[xEXPERTSxUSED] ...
//   ggml-ext-gpu-bench DEVICE TYPE[,TYPE...] --large MEGABYTES
//   ggml-ext-gpu-bench DEVICE --copy MEGABYTES
//
// The first form multiplies several matrices, more than 512 MB together, so that none is cached. Times include the quantization of
// activations. With EXPERTS it times mul_mat_id over that many matrices, of which each token uses USED at random. --large checks the
// products and get_rows of a matrix of MEGABYTES, which may exceed 2^32 bytes, and exits with 1 on errors. --copy prints the bandwidth
// of a copy on the device, bytes read plus written.
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

static std::vector<std::string> split(const std::string & text, char separator) {
    std::vector<std::string> parts;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        parts.push_back(part);
    }
    return parts;
}

static ggml_type type_by_name(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * type_name = ggml_type_name((ggml_type) i);
        if (type_name && name == type_name) {
            return (ggml_type) i;
        }
    }
    fprintf(stderr, "error: unknown type %s\n", name.c_str());
    exit(1);
}

// Make n_rows rows by repeating 16 encoded ones: encoding is slow, and no kernel's speed depends on the values.
static std::vector<uint8_t> make_rows(ggml_type type, int64_t n_rows, int64_t n_cols) {
    const int64_t n_distinct = std::min<int64_t>(16, n_rows);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0, 0.02f);
    std::vector<float> x(n_distinct*n_cols), importance(n_cols, 1.0f);
    for (float & v : x) {
        v = normal(rng);
    }
    const size_t row_bytes = ggml_row_size(type, n_cols);
    std::vector<uint8_t> out(n_rows*row_bytes);
    ggml_quantize_chunk(type, x.data(), out.data(), 0, n_distinct, n_cols, importance.data());
    for (int64_t i = n_distinct; i < n_rows; ++i) {
        memcpy(&out[i*row_bytes], &out[i%n_distinct*row_bytes], row_bytes);
    }
    return out;
}

static void measure(ggml_backend_t backend, ggml_type type, int64_t m, int64_t k, int64_t n, int64_t n_experts, int64_t n_used) {
    const size_t bytes = ggml_row_size(type, k)*m*std::max<int64_t>(1, n_experts);
    const int n_products = n_experts ? 2 : (int) std::min<size_t>(256, std::max<size_t>(4, ((size_t) 512 << 20)/bytes + 1));
    ggml_init_params params = { ggml_tensor_overhead()*(3*n_products + 8) + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> weights;
    ggml_tensor * x, * ids = nullptr;
    x = n_experts ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, 1, n) : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, n);
    if (n_experts) {
        ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n);
    }
    for (int i = 0; i < n_products; ++i) {
        weights.push_back(n_experts ? ggml_new_tensor_3d(ctx, type, k, m, n_experts) : ggml_new_tensor_2d(ctx, type, k, m));
        ggml_build_forward_expand(graph, n_experts ? ggml_mul_mat_id(ctx, weights.back(), x, ids) : ggml_mul_mat(ctx, weights.back(), x));
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (!buffer) {
        fprintf(stderr, "error: no memory for %s\n", ggml_type_name(type));
        exit(1);
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, 0))) {
        fprintf(stderr, "error: %s does not multiply %s\n", ggml_backend_name(backend), ggml_type_name(type));
        exit(1);
    }
    const std::vector<uint8_t> data = make_rows(type, m, k);
    for (ggml_tensor * w : weights) {
        for (int64_t e = 0; e < std::max<int64_t>(1, n_experts); ++e) {
            ggml_backend_tensor_set(w, data.data(), e*data.size(), data.size());
        }
    }
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    std::vector<float> activations(k*n);
    for (float & v : activations) {
        v = normal(rng);
    }
    ggml_backend_tensor_set(x, activations.data(), 0, ggml_nbytes(x));
    if (ids) {
        std::vector<int32_t> order(n_experts), all;
        for (int64_t i = 0; i < n_experts; ++i) {
            order[i] = i;
        }
        for (int64_t i = 0; i < n; ++i) {
            std::shuffle(order.begin(), order.end(), rng);
            all.insert(all.end(), order.begin(), order.begin() + n_used);
        }
        ggml_backend_tensor_set(ids, all.data(), 0, ggml_nbytes(ids));
    }
    const auto run = [&](int times) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < times; ++i) {
            ggml_backend_graph_compute_async(backend, graph);
        }
        ggml_backend_synchronize(backend);
        return 1e6*std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()/times/n_products;
    };
    run(3); // warm-up, also records the graph
    const int times = (int) std::min(50.0, std::max(3.0, 20e3/(run(1)*n_products)));
    std::vector<double> us;
    for (int i = 0; i < 5; ++i) {
        us.push_back(run(times));
    }
    std::sort(us.begin(), us.end());
    printf("{\"type\": \"%s\", \"rows\": %lld, \"cols\": %lld, \"tokens\": %lld, \"experts\": %lld, \"used\": %lld, \"us\": %.3f, \"bytes\": %zu}\n",
           ggml_type_name(type), (long long) m, (long long) k, (long long) n, (long long) n_experts, (long long) n_used, us[2], bytes);
    fflush(stdout);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

// Print the bandwidth of copies of n_bytes in device memory, the best of five.
static void measure_copy(ggml_backend_t backend, int64_t n_bytes) {
    const int n_copies = 8;
    ggml_init_params params = { ggml_tensor_overhead()*(n_copies + 8) + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx   = ggml_init(params);
    ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_tensor *  src   = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_bytes/4), * dst = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_bytes/4);
    for (int i = 0; i < n_copies; ++i) {
        ggml_build_forward_expand(graph, ggml_cpy(ctx, i%2 ? dst : src, i%2 ? src : dst));
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (!buffer) {
        fprintf(stderr, "error: no memory for two buffers of %lld MB\n", (long long) (n_bytes >> 20));
        exit(1);
    }
    ggml_backend_buffer_clear(buffer, 0);
    double best = 0;
    for (int i = 0; i < 6; ++i) { // the first also records the graph
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(backend, graph);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = i ? std::max(best, 2.0*n_copies*n_bytes/seconds) : 0;
    }
    printf("{\"copy_gb_per_s\": %.1f, \"bytes\": %lld}\n", best/1e9, (long long) n_bytes);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

// Check that all rows give the result of row i%16, which they equal: bit-equal for get_rows and for one column; for 16 columns the order
// of summation may differ. test-backend-ops checks the first 16 rows.
static bool check_large(ggml_backend_t backend, ggml_type type, int64_t n_bytes) {
    const int64_t k = 4096, n_distinct = 16, m = n_bytes/(int64_t) ggml_row_size(type, k)/n_distinct*n_distinct + n_distinct;
    ggml_init_params params = { ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_tensor *  w = ggml_new_tensor_2d(ctx, type, k, m), * ids = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_distinct);
    std::vector<ggml_tensor *> x, y;
    for (int64_t n : {1, 16}) {
        x.push_back(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, n));
        y.push_back(ggml_mul_mat(ctx, w, x.back()));
        ggml_build_forward_expand(graph, y.back());
    }
    ggml_tensor * last = ggml_get_rows(ctx, w, ids);
    ggml_build_forward_expand(graph, last);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (!buffer) {
        fprintf(stderr, "error: no memory for %lld MB of %s\n", (long long) (ggml_nbytes(w) >> 20), ggml_type_name(type));
        exit(1);
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const int64_t n_part = std::min<int64_t>(m, 1 << 14); // rows per copy
    const std::vector<uint8_t> data = make_rows(type, n_part, k);
    for (int64_t i = 0; i < m; i += n_part) {
        ggml_backend_tensor_set(w, data.data(), i*w->nb[1], std::min(n_part, m - i)*w->nb[1]);
    }
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    for (ggml_tensor * t : x) {
        std::vector<float> values(ggml_nelements(t));
        for (float & v : values) {
            v = normal(rng);
        }
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
    std::vector<int32_t> indices(n_distinct);
    for (int64_t i = 0; i < n_distinct; ++i) {
        indices[i] = (int32_t) (m - n_distinct + i);
    }
    ggml_backend_tensor_set(ids, indices.data(), 0, ggml_nbytes(ids));
    bool ok = ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS;

    std::vector<float> expected(n_distinct*k), actual(n_distinct*k);
    ggml_get_type_traits(type)->to_float(data.data(), expected.data(), n_distinct*k);
    ggml_backend_tensor_get(last, actual.data(), 0, ggml_nbytes(last));
    int64_t n_wrong = 0, first = -1;
    for (int64_t i = 0; i < n_distinct*k; ++i) {
        if (actual[i] != expected[i] && n_wrong++ == 0) {
            first = m - n_distinct + i/k;
        }
    }
    for (ggml_tensor * t : y) {
        std::vector<float> values(ggml_nelements(t));
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
        for (int64_t j = 0; j < t->ne[1]; ++j) {
            const float * column = &values[j*m];
            float largest = 0;
            for (int64_t i = 0; i < n_distinct; ++i) {
                largest = std::max(largest, std::fabs(column[i]));
            }
            // another order of k/32 terms adds up to k/32 roundings of the largest partial sum, at most four times the largest result
            const float tolerance = t->ne[1] == 1 ? 0 : k/32*4*6e-8f*largest;
            for (int64_t i = 0; i < m; ++i) {
                if (!(std::fabs(column[i] - column[i%n_distinct]) <= tolerance) && n_wrong++ == 0) {
                    first = i;
                }
            }
            ok = ok && largest > 0;
        }
    }
    printf("{\"check\": \"large %s\", \"n\": %lld, \"bytes\": %lld, \"wrong\": %lld, \"first\": %lld}\n", ggml_type_name(type),
           (long long) m, (long long) ggml_nbytes(w), (long long) n_wrong, (long long) first);
    fflush(stdout);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return ok && n_wrong == 0;
}

int main(int argc, char ** argv) {
    const bool large = argc == 5 && strcmp(argv[3], "--large") == 0, copy = argc == 4 && strcmp(argv[2], "--copy") == 0;
    if (argc < 4) {
        fprintf(stderr, "usage: %s DEVICE TYPE[,TYPE...] ROWSxCOLSxTOKENS[xEXPERTSxUSED] ...\n"
                        "       %s DEVICE TYPE[,TYPE...] --large MEGABYTES\n"
                        "       %s DEVICE --copy MEGABYTES\n", argv[0], argv[0], argv[0]);
        return 1;
    }
    ggml_backend_load_all();
    ggml_backend_t backend = ggml_backend_init_by_name(argv[1], nullptr);
    if (!backend) {
        fprintf(stderr, "error: no device %s\n", argv[1]);
        return 1;
    }
    // the CPU backend defaults to four threads, which spin very slowly on fewer cores
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend, (int) std::max(1u, std::thread::hardware_concurrency()));
    }
    if (copy) {
        measure_copy(backend, atoll(argv[3]) << 20);
        ggml_backend_free(backend);
        return 0;
    }
    if (large) {
        bool ok = true;
        for (const std::string & name : split(argv[2], ',')) {
            ok = check_large(backend, type_by_name(name), atoll(argv[4]) << 20) && ok;
        }
        ggml_backend_free(backend);
        return ok ? 0 : 1;
    }
    for (int i = 3; i < argc; ++i) {
        long long m, k, n, n_experts = 0, n_used = 0;
        const int n_read = sscanf(argv[i], "%lldx%lldx%lldx%lldx%lld", &m, &k, &n, &n_experts, &n_used);
        if ((n_read != 3 && n_read != 5) || n_used > n_experts) {
            fprintf(stderr, "error: %s is not ROWSxCOLSxTOKENS[xEXPERTSxUSED]\n", argv[i]);
            return 1;
        }
        for (const std::string & name : split(argv[2], ',')) {
            measure(backend, type_by_name(name), m, k, n, n_experts, n_used);
        }
    }
    ggml_backend_free(backend);
}
