// MUL_MAT and MUL_MAT_ID with ggml-ext types: few columns by dot products, many by the GEMM. ggml-cpu's traits.cpp calls these functions
// before its own kernels.
#include "ggml-ext-cpu.h"
#include "gemm.h"
#include "../ggml-ext-traits.h"
#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstring>

using namespace ggml_ext;

#ifdef GGML_EXT_TESTS
static std::atomic<int64_t> n_panels_done{0};

int64_t ggml_ext_cpu_n_panels(void) {
    return n_panels_done.load(std::memory_order_relaxed);
}
#endif

namespace {

// --- an operation and its work buffer ----------------------------------------------------------------------

struct mul_mat {
    const ggml_tensor * op, * src0, * src1, * ids;
    int64_t   n;          // weights per row
    int64_t   n_rows;     // of a matrix
    int64_t   n_matrices;
    int64_t   n_columns;  // of op: index i1 + (i2 + i3*ne2)*ne1
    int64_t   n_blocks;   // of 256 weights in a row, the last may be partial
    ggml_type activation;
    size_t    block_size; // bytes of 256 quantized activations

    explicit mul_mat(const ggml_tensor * op)
        : op(op), src0(op->src[0]), src1(op->src[1]), ids(op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr), n(src0->ne[0]),
          n_rows(src0->ne[1]), n_matrices(src0->ne[2]*src0->ne[3]), n_columns(op->ne[1]*op->ne[2]*op->ne[3]), n_blocks((n + QK_K - 1)/QK_K),
          activation(ggml_get_type_traits_cpu(src0->type)->vec_dot_type),
          block_size(ggml_type_size(activation)) {
        GGML_ASSERT(src0->nb[0] == ggml_type_size(src0->type) && op->nb[0] == sizeof(float));
        GGML_ASSERT(op->ne[0] == n_rows && src1->ne[0] == n && op->ne[2] == (ids ? ids->ne[1] : src1->ne[2]));
    }

    // Upstream's code takes the others. It skips empty results, whose operands need not fit each other with --split-mode tensor.
    static bool is_supported(const ggml_tensor * op) {
        return (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && !ggml_is_empty(op) && is_weight_type(op->src[0]->type) &&
               op->src[1]->type == GGML_TYPE_F32 && op->src[1]->nb[0] == sizeof(float);
    }

    const char * matrix(int64_t m) const { return (const char *) src0->data + m%src0->ne[2]*src0->nb[2] + m/src0->ne[2]*src0->nb[3]; }

    // Index of the matrix that gives column (i1, i2, i3).
    int64_t find_matrix(int64_t i1, int64_t i2, int64_t i3) const {
        if (ids) {
            const int32_t m = *(const int32_t *) ((const char *) ids->data + i1*ids->nb[0] + i2*ids->nb[1]);
            GGML_ASSERT(m >= 0 && m < n_matrices);
            return m;
        }
        return i2/(op->ne[2]/src0->ne[2]) + i3/(op->ne[3]/src0->ne[3])*src0->ne[2];
    }

    // A source is a row of src1. Column i1 has source i1 % ne11, which differs from i1 only if the experts of a token share one.
    int64_t n_sources() const { return ggml_nrows(src1); }
    const float * source(int64_t i) const {
        return (const float *) ((const char *) src1->data + i%src1->ne[1]*src1->nb[1] + i/src1->ne[1]%src1->ne[2]*src1->nb[2] +
                                i/src1->ne[1]/src1->ne[2]*src1->nb[3]);
    }
    int64_t find_source(int64_t i1, int64_t i2, int64_t i3) const { return i1%src1->ne[1] + (i2 + i3*op->ne[2])*src1->ne[1]; }
    template <typename F> void each_column_of_source(int64_t source, F f) const {
        for (int64_t i1 = source%src1->ne[1]; i1 < op->ne[1]; i1 += src1->ne[1]) { f(i1 + source/src1->ne[1]*op->ne[1]); }
    }

    ggml_from_float_t from_float() const {
        return ggml_ext_study_from_float(op, activation, ggml_get_type_traits_cpu(activation)->from_float);
    }
};

// Aligned parts of a buffer. Of NULL, they are counted.
struct buffer_parts {
    char * begin, * end;
    explicit buffer_parts(void * p) : begin((char *) p), end(begin) {}

    template <typename T> T * add(size_t n) {
        char * part = (char *) GGML_PAD((uintptr_t) end, 64);
        end = part + n*sizeof(T);
        return (T *) part;
    }
    size_t size() const { return end - begin; }
};
constexpr size_t ALIGNMENT = 64; // more bytes that a buffer needs, which may itself be aligned less

// Columns sorted by matrix.
struct column_order {
    int32_t * first;    // n_matrices + 1: the columns of matrix m have the positions first[m] to first[m + 1] - 1
    int32_t * position; // of each column
    int32_t * source;   // at each position
    float  ** products; // at each position

    column_order(const mul_mat & p, buffer_parts & parts)
        : first(parts.add<int32_t>(p.n_matrices + 1)), position(parts.add<int32_t>(p.n_columns)), source(parts.add<int32_t>(p.n_columns)),
          products(parts.add<float *>(p.n_columns)) {}

    void sort(const mul_mat & p) const {
        std::fill_n(first, p.n_matrices + 1, 0);
        each_index(p.op, [&](int64_t, int64_t i1, int64_t i2, int64_t i3) { ++first[p.find_matrix(i1, i2, i3) + 1]; });
        for (int64_t m = 0; m < p.n_matrices; ++m) { first[m + 1] += first[m]; }
        each_index(p.op, [&](int64_t column, int64_t i1, int64_t i2, int64_t i3) { // moves first[m] to the end of m
            const int32_t k = first[p.find_matrix(i1, i2, i3)]++;
            position[column] = k;
            source[k]        = (int32_t) p.find_source(i1, i2, i3);
            products[k]      = (float *) ((char *) p.op->data + i1*p.op->nb[1] + i2*p.op->nb[2] + i3*p.op->nb[3]);
        });
        for (int64_t m = p.n_matrices; m > 0; --m) { first[m] = first[m - 1]; }
        first[0] = 0;
    }

private:
    template <typename F> static void each_index(const ggml_tensor * op, F f) {
        int64_t column = 0;
        for (int64_t i3 = 0; i3 < op->ne[3]; ++i3) {
            for (int64_t i2 = 0; i2 < op->ne[2]; ++i2) {
                for (int64_t i1 = 0; i1 < op->ne[1]; ++i1) { f(column++, i1, i2, i3); }
            }
        }
    }
};

// Sort the columns and let threads take units of work. All threads call this, and a barrier follows.
void prepare_units(const ggml_compute_params * params, const mul_mat & p, const column_order & order) {
    if (params->ith == 0) {
        order.sort(p);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
}

// Call f(m, i) for this thread's units: i = 0 .. n_units - 1 of each matrix with columns. Each thread begins with unit ith.
template <typename F>
void each_unit(const ggml_compute_params * params, const mul_mat & p, const column_order & order, int64_t n_units, F f) {
    const bool is_numa = ggml_is_numa();
    int64_t unit = params->ith, begin = 0;
    for (int64_t m = 0; m < p.n_matrices; ++m) {
        if (order.first[m] == order.first[m + 1]) {
            continue;
        }
        for (; unit < begin + n_units; unit = is_numa ? unit + params->nth : ggml_threadpool_chunk_add(params->threadpool, 1)) {
            f(m, unit - begin);
        }
        begin += n_units;
    }
}

// --- few columns -------------------------------------------------------------------------------------------

// First block that thread ith quantizes in row `row`; it ends where the next thread begins. A row of Q8_KR64 or Q8_KR32 is written in
// full, so the threads take turns by row.
int64_t first_block(const mul_mat & p, int64_t ith, int64_t nth, int64_t row) {
    const int64_t block = ggml_blck_size(p.activation), n_blocks = p.n/block;
    return block < QK_K ? (ith > row%nth ? n_blocks : 0) : ith*n_blocks/nth;
}

constexpr int MAX_DOT_COLUMNS = 16; // per call, two passes of ggml_ext_dot_columns()

void multiply_dots(const ggml_compute_params * params, const mul_mat & p, const column_order & order, char * rows) {
    const auto    from_float = p.from_float();
    const int64_t ith = params->ith, nth = params->nth, block = ggml_blck_size(p.activation);
    const size_t  row_size = p.n_blocks*p.block_size;
    prepare_units(params, p, order);
    for (int64_t i = 0; i < p.n_sources(); ++i) {
        const int64_t begin = first_block(p, ith, nth, i), end = first_block(p, ith + 1, nth, i);
        if (begin < end) {
            from_float(p.source(i) + begin*block, rows + i*row_size + begin*p.block_size, (end - begin)*block);
        }
    }
    ggml_barrier(params->threadpool);

    // Small matrices are divided among the threads: in units of 64, two threads would share 576 rows 5:4. Smaller units cost an atomic
    // addition each and load the columns again.
    const bool    is_small = p.n_rows < 16*64 || p.n_rows < 4*nth*64 || ggml_is_numa();
    const int64_t n_units  = is_small ? nth : (p.n_rows + 63)/64;
    const int64_t per_unit = (p.n_rows + n_units - 1)/n_units;
    each_unit(params, p, order, n_units, [&](int64_t m, int64_t unit) {
        const int64_t row = unit*per_unit, n_rows = std::min(per_unit, p.n_rows - row);
        for (int64_t i = order.first[m]; n_rows > 0 && i < order.first[m + 1]; i += MAX_DOT_COLUMNS) {
            const int    n_columns = (int) std::min<int64_t>(MAX_DOT_COLUMNS, order.first[m + 1] - i);
            const void * y[MAX_DOT_COLUMNS];
            float      * s[MAX_DOT_COLUMNS];
            for (int c = 0; c < n_columns; ++c) {
                y[c] = rows + order.source[i + c]*row_size;
                s[c] = order.products[i + c] + row;
            }
            ggml_ext_dot_columns(p.src0->type, p.n, s, p.matrix(m) + row*p.src0->nb[1], p.src0->nb[1], n_rows, y, n_columns);
        }
    });
}

// --- many columns ------------------------------------------------------------------------------------------

#if defined(GGML_EXT_GEMM)
// Columns of a unit: their products stay in the L2 cache.
constexpr int64_t MAX_UNIT_COLUMNS = 512;
// Panels of a unit whose activations are large, because every unit reads them again. With few activations, one panel leaves room for
// them in the L1 cache.
constexpr int     MAX_UNIT_PANELS = 4;
constexpr int64_t LARGE_ACTIVATIONS = 1 << 19; // bytes

struct gemm_buffers {
    struct thread_buffers {
        weight_panel panels[MAX_UNIT_PANELS];
        alignas(64) float products[MAX_UNIT_COLUMNS*MAX_UNIT_PANELS*PANEL_ROWS];
    };
    char           * columns;
    thread_buffers * threads;
    int64_t          stride; // columns, and those that AMX tiles read beyond the last
    int              n_scales;

    // A source that several experts share is stored once for each.
    gemm_buffers(const mul_mat & p, const gemm_functions & f, int n_threads, buffer_parts & parts)
        : stride(p.n_columns + 16), n_scales(f.n_scales) {
        columns = parts.add<char>(p.n_blocks*panel_size());
        threads = parts.add<thread_buffers>(n_threads);
    }
    size_t panel_size() const { return GGML_PAD(stride*column_size(n_scales), 64); }

    column_panel panel(int64_t block) const {
        char  * codes = columns + block*panel_size();
        float * d     = (float *) (codes + stride*QK_K);
        return {(int8_t *) codes, d, d + stride, stride};
    }
};

void quantize_columns(const ggml_compute_params * params, const mul_mat & p, const gemm_functions & f, const column_order & order,
                      const gemm_buffers & buffers) {
    const auto    from_float = p.from_float();
    const int64_t n_units = p.n_sources()*p.n_blocks;
    for (int64_t u = n_units*params->ith/params->nth; u < n_units*(params->ith + 1)/params->nth; ++u) {
        const int64_t source = u/p.n_blocks, block = u%p.n_blocks;
        union {
            block_q8_K    q8_k;
            block_q8_kr64 q8_kr64;
        } quantized;
        from_float(p.source(source) + block*QK_K, &quantized, std::min<int64_t>(QK_K, p.n - block*QK_K));
        p.each_column_of_source(source, [&](int64_t column) { f.pack_column(&quantized, buffers.panel(block).from(order.position[column])); });
    }
}

// Rows of a matrix, and the columns at some positions.
struct gemm_unit {
    int64_t matrix, row, position;
    int     n_rows, n_columns;
};

// Write the products [panel][column][row] of a unit.
void store_products(const column_order & order, const gemm_unit & u, const float * products) {
    for (int c = 0; c < u.n_columns; ++c) {
        constexpr int AHEAD = 8; // columns; each is in other pages
        const float * prefetched = order.products[u.position + std::min(c + AHEAD, u.n_columns - 1)] + u.row;
        for (int r = 0; r < u.n_rows; r += 16) { __builtin_prefetch(prefetched + r, 1); }
        float * out = order.products[u.position + c] + u.row;
        for (int r = 0; r < u.n_rows; r += PANEL_ROWS) {
            const float * in = products + r*u.n_columns + c*PANEL_ROWS;
            if (u.n_rows - r >= PANEL_ROWS) {
                memcpy(out + r, in, sizeof(float)*PANEL_ROWS); // a constant size, for vector instructions
            } else {
                memcpy(out + r, in, sizeof(float)*(u.n_rows - r));
            }
        }
    }
}

// Multiply, and prefetch the rows [next, end) that this thread probably multiplies next.
void multiply_unit(const mul_mat & p, const gemm_functions & f, const column_order & order, const gemm_buffers & buffers,
                   const gemm_unit & u, const char * next, const char * end, gemm_buffers::thread_buffers & thread) {
    const int     panel_blocks = QK_K/ggml_blck_size(p.src0->type);
    const int64_t n_blocks = p.n/ggml_blck_size(p.src0->type);
    const size_t  nb1 = p.src0->nb[1];
    const int     n_panels = (u.n_rows + PANEL_ROWS - 1)/PANEL_ROWS;
    const int64_t prefetch_size = (end - next)/p.n_blocks;
    const char  * x = p.matrix(u.matrix) + u.row*nb1;
    memset(thread.products, 0, sizeof(float)*n_panels*u.n_columns*PANEL_ROWS);
    for (int64_t b = 0; b < p.n_blocks; ++b, x += panel_blocks*ggml_type_size(p.src0->type), next += prefetch_size) {
        for (int64_t i = 0; i < prefetch_size; i += 64) { __builtin_prefetch(next + i, 0, 2); }
        for (int i = 0; i < n_panels; ++i) {
            f.pack_rows(x + i*PANEL_ROWS*nb1, nb1, u.n_rows - i*PANEL_ROWS, n_blocks - b*panel_blocks, thread.panels[i]);
        }
        f.multiply(thread.panels, n_panels, buffers.panel(b).from(u.position), u.n_columns, thread.products);
    }
    store_products(order, u, thread.products);
#ifdef GGML_EXT_TESTS
    n_panels_done.fetch_add(n_panels, std::memory_order_relaxed);
#endif
}

void multiply_gemm(const ggml_compute_params * params, const mul_mat & p, const gemm_functions & f, const column_order & order,
                   const gemm_buffers & buffers) {
    prepare_units(params, p, order);
    ggml_barrier(params->threadpool);
    quantize_columns(params, p, f, order, buffers);
    ggml_barrier(params->threadpool);

    int64_t max_columns = 0; // of a matrix
    for (int64_t m = 0; m < p.n_matrices; ++m) { max_columns = std::max<int64_t>(max_columns, order.first[m + 1] - order.first[m]); }
    int64_t n_columns = std::min(max_columns, MAX_UNIT_COLUMNS);
    const int64_t unit_rows   = (n_columns*p.n < LARGE_ACTIVATIONS ? 1 : MAX_UNIT_PANELS)*PANEL_ROWS;
    const int64_t n_row_units = (p.n_rows + unit_rows - 1)/unit_rows;
    // Each unit unpacks its weights, so columns are divided further only until all threads have work.
    while (n_row_units*((max_columns + n_columns - 1)/n_columns)*p.n_matrices < 4*params->nth && n_columns > 64) {
        n_columns = GGML_PAD(n_columns/2, 32);
    }
    const gemm_scope scope;
    each_unit(params, p, order, n_row_units*((max_columns + n_columns - 1)/n_columns), [&](int64_t m, int64_t i) {
        gemm_unit u = {m, i%n_row_units*unit_rows, order.first[m] + i/n_row_units*n_columns, 0, 0};
        if (u.position < order.first[m + 1]) {
            const auto row = [&](int64_t r) { return p.matrix(m) + std::min(r, p.n_rows)*p.src0->nb[1]; };
            const int64_t next = u.row + params->nth*unit_rows;
            u.n_rows    = (int) std::min(unit_rows, p.n_rows - u.row);
            u.n_columns = (int) std::min(n_columns, order.first[m + 1] - u.position);
            multiply_unit(p, f, order, buffers, u, row(next), row(next + unit_rows), buffers.threads[params->ith]);
        }
    });
}

// Return the functions of the GEMM if it computes this operation.
const gemm_functions * choose_gemm(const mul_mat & p) {
    static const bool is_enabled = ggml_ext_env_switch("GGML_CPU_TILED_MM", true);
    static const bool is_forced  = ggml_ext_env_switch("GGML_CPU_TILED_MM_FORCE", false);
    const gemm_functions * f = is_enabled ? find_gemm(p.src0->type) : nullptr;
    if (!f || is_forced) {
        return f;
    }
    // Experts have different numbers of columns, and the GEMM gains more with many than it loses with few.
    const int64_t min_columns = p.ids ? f->min_columns*2/3 : f->min_columns;
    return p.n_columns >= min_columns*std::min(p.n_matrices, p.n_columns) ? f : nullptr;
}
#endif

} // namespace

bool ggml_ext_mul_mat_work_size(int n_threads, const struct ggml_tensor * op, size_t * size) {
    if (!mul_mat::is_supported(op)) {
        return false;
    }
    const mul_mat p(op);
    buffer_parts parts(nullptr);
    column_order(p, parts);
    buffer_parts dot_parts = parts;
    dot_parts.add<char>(p.n_sources()*p.n_blocks*p.block_size); // also for the reference implementation
    *size = dot_parts.size() + ALIGNMENT;
#if defined(GGML_EXT_GEMM)
    if (const gemm_functions * f = choose_gemm(p)) {
        gemm_buffers(p, *f, n_threads, parts);
        *size = std::max(*size, parts.size() + ALIGNMENT);
    }
#else
    GGML_UNUSED(n_threads);
#endif
    return true;
}

bool ggml_ext_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    if (!mul_mat::is_supported(op)) {
        return false;
    }
    const mul_mat p(op);
    buffer_parts parts(params->wdata);
    const column_order order(p, parts);
#if defined(GGML_EXT_GEMM)
    if (const gemm_functions * f = params->use_ref ? nullptr : choose_gemm(p)) {
        const gemm_buffers buffers(p, *f, params->nth, parts);
        GGML_ASSERT(parts.size() <= params->wsize);
        multiply_gemm(params, p, *f, order, buffers);
        return true;
    }
#endif
    char * rows = parts.add<char>(p.n_sources()*p.n_blocks*p.block_size);
    GGML_ASSERT(parts.size() <= params->wsize);
    multiply_dots(params, p, order, rows);
    return true;
}
