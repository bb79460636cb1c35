// Graphs in thread pools whose threads are late at random: threadpool_stress GRAPHS [SEED]
//
// Every graph runs with a random number of the pool's threads, some are aborted at a random node, some pools are paused before one.
// Each complete graph must give the bytes that one thread gives. Exit code 1 if not; a lost wake-up hangs.
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr int     N_LAYERS = 6;
constexpr int64_t N        = 96;
constexpr int     POOLS[]  = {1, 2, 3, 5, 8, 16};

std::atomic<uint32_t> delay_seed;
std::atomic<int>      nodes_before_abort;

// Be late in one call of 40, by up to 400 us: sometimes longer, sometimes shorter than the others spin.
void delay(int ith) {
    std::minstd_rand random(delay_seed++ + 7919*ith);
    random.discard(2);
    if (random() % 40 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    }
}

void add_one(ggml_tensor * dst, const ggml_tensor * a, int ith, int nth, void *) {
    delay(ith);
    const int64_t n = ggml_nelements(dst);
    for (int64_t i = ith*n/nth; i < (ith + 1)*n/nth; i++) {
        static_cast<float *>(dst->data)[i] = static_cast<const float *>(a->data)[i] + 1;
    }
}

bool abort_callback(void *) {
    return --nodes_before_abort == 0;
}

struct Graph {
    ggml_context * ctx;
    ggml_cgraph *  graph;
    ggml_tensor *  out;
    size_t         size() const { return ggml_nbytes(out); }
};

Graph make_graph() {
    ggml_context * ctx = ggml_init({16*1024*1024, nullptr, false});
    std::minstd_rand random(1);
    const auto tensor = [&](int64_t n_cols) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, n_cols);
        std::generate_n(static_cast<float *>(t->data), N*n_cols, [&] { return float(random() % 201)/1000 - 0.1f; });
        return t;
    };
    const auto quantized_product = [&](int64_t n_cols) { // cpu/mul-mat.cpp: dot products of few columns, the GEMM of many
        std::vector<float> weights(256*N);
        std::generate(weights.begin(), weights.end(), [&] { return float(random() % 201)/1000 - 0.1f; });
        ggml_tensor * w = ggml_new_tensor_2d(ctx, GGML_TYPE_ITQ3_S, 256, N);
        ggml_tensor * y = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, n_cols);
        ggml_quantize_chunk(w->type, weights.data(), w->data, 0, N, 256, nullptr);
        std::generate_n(static_cast<float *>(y->data), 256*n_cols, [&] { return float(random() % 201)/1000 - 0.1f; });
        return ggml_mul_mat(ctx, w, y);
    };
    ggml_tensor * many = quantized_product(20);
    ggml_tensor * x = ggml_add(ctx, tensor(3), ggml_add(ctx, quantized_product(3), ggml_view_2d(ctx, many, N, 3, many->nb[1], 0)));
    for (int i = 0; i < N_LAYERS; i++) { // products share out their chunks, and have a barrier inside
        x = ggml_soft_max(ctx, ggml_map_custom1(ctx, ggml_mul_mat(ctx, tensor(N), x), add_one, GGML_N_TASKS_MAX, nullptr));
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, x);
    return {ctx, graph, x};
}

ggml_status compute(const Graph & g, ggml_threadpool * pool, int n_threads) {
    ggml_cplan plan = ggml_graph_plan(g.graph, n_threads, pool);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data      = work.data();
    plan.abort_callback = abort_callback;
    memset(g.out->data, 0, g.size());
    return ggml_graph_compute(g.graph, &plan);
}

} // namespace

int main(int argc, char ** argv) {
    const int n_graphs = argc > 1 ? atoi(argv[1]) : 1000;
    std::minstd_rand random(argc > 2 ? atoi(argv[2]) : 1);
    const Graph g = make_graph();
    nodes_before_abort = 0;
    compute(g, nullptr, 1);
    const std::vector<uint8_t> expected(static_cast<uint8_t *>(g.out->data), static_cast<uint8_t *>(g.out->data) + g.size());

    int n_aborted = 0;
    for (const int n_threads : POOLS) {
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        params.poll = random() % 2 ? 50 : 0;
        ggml_threadpool * pool = ggml_threadpool_new(&params);
        for (int i = 0; i < n_graphs/int(std::size(POOLS)); i++) {
            if (random() % 16 == 0) {
                ggml_threadpool_pause(pool);
            }
            const bool aborts = random() % 8 == 0;
            nodes_before_abort = aborts ? 1 + random() % N_LAYERS : 0;
            const ggml_status status = compute(g, pool, 1 + random() % n_threads);
            if (status != (aborts ? GGML_STATUS_ABORTED : GGML_STATUS_SUCCESS) || (!aborts && memcmp(g.out->data, expected.data(), g.size()) != 0)) {
                printf("graph %d of %d threads: status %d, or other bytes than one thread gives\n", i, n_threads, status);
                return 1;
            }
            n_aborted += aborts;
        }
        ggml_threadpool_free(pool);
    }
    ggml_free(g.ctx);
    printf("%d graphs, %d aborted: equal\n", n_graphs, n_aborted);
    return 0;
}
