// MUL_MAT and MUL_MAT_ID with ggml-ext types: few columns by dot products, many by the GEMM. ggml-cpu's traits.cpp calls these before its
// own kernels.
#include "ggml-ext-cpu.h"
#include "gemm.h"
#include "../ggml-ext-traits.h"
#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <atomic>

using namespace ggml_ext;

#ifdef GGML_EXT_TESTS
static std::atomic<int64_t> n_packed{0};

int64_t ggml_ext_cpu_n_panels(void) {
    return n_packed.load(std::memory_order_relaxed);
}
#endif

namespace {

// --- a product and its work buffer -------------------------------------------------------------------------

// Columns per unit of work of the GEMM: their products stay in a level 2 cache.
constexpr int64_t MAX_UNIT_COLUMNS = 512;
// Panels per unit if the activations, which are read once per unit, take a good part of such a cache. With fewer activations, one panel
// leaves the level 1 cache to them.
constexpr int     MAX_UNIT_PANELS = 4;
constexpr int64_t LARGE_ACTIVATIONS = 1 << 19; // bytes

// Aligned parts of a buffer, or their total size.
struct buffer_parts {
    char * begin, * end;
    explicit buffer_parts(void * p) : begin((char *) p), end(begin) {}

    template <typename T> T * add(size_t n) {
        char * part = (char *) GGML_PAD((uintptr_t) end, 64);
        end = part + n*sizeof(T);
        return (T *) part;
    }
    size_t size() const { return end - begin + 64; } // begin may be aligned less
};

struct product {
    const ggml_tensor * op, * src0, * src1, * ids;
    int64_t   n;          // weights per row
    int64_t   n_rows;     // of a matrix
    int64_t   n_matrices;
    int64_t   n_columns;  // of op: index i1 + (i2 + i3*ne2)*ne1
    int64_t   n_blocks;   // of 256 weights
    ggml_type activation;
    size_t    row_size;   // of quantized activations

    explicit product(const ggml_tensor * op)
        : op(op), src0(op->src[0]), src1(op->src[1]), ids(op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr), n(src0->ne[0]),
          n_rows(src0->ne[1]), n_matrices(src0->ne[2]*src0->ne[3]), n_columns(op->ne[1]*op->ne[2]*op->ne[3]), n_blocks((n + QK_K - 1)/QK_K),
          activation(ggml_get_type_traits_cpu(src0->type)->vec_dot_type), row_size(ggml_row_size(activation, n)) {}

    // Whether this file computes it. Others have activations that are quantized already, and upstream's loop over vec_dot computes them.
    static bool is_ours(const ggml_tensor * op) {
        return (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && is_weight_type(op->src[0]->type) &&
               op->src[1]->type == GGML_TYPE_F32 && op->src[1]->nb[0] == sizeof(float);
    }

    const char * matrix(int64_t m) const { return (const char *) src0->data + m%src0->ne[2]*src0->nb[2] + m/src0->ne[2]*src0->nb[3]; }

    int64_t matrix_of(int64_t i1, int64_t i2, int64_t i3) const {
        if (ids) {
            const int32_t m = *(const int32_t *) ((const char *) ids->data + i1*ids->nb[0] + i2*ids->nb[1]);
            GGML_ASSERT(m >= 0 && m < n_matrices);
            return m;
        }
        return i2/(op->ne[2]/src0->ne[2]) + i3/(op->ne[3]/src0->ne[3])*src0->ne[2];
    }

    // Rows of activations. Row i serves the columns with the same indices, and with ids column i1 takes row i1 % ne11.
    int64_t       n_sources() const { return ggml_nrows(src1); }
    const float * source(int64_t i) const {
        return (const float *) ((const char *) src1->data + i%src1->ne[1]*src1->nb[1] + i/src1->ne[1]%src1->ne[2]*src1->nb[2] +
                                i/src1->ne[1]/src1->ne[2]*src1->nb[3]);
    }
    // Call f(column) for each column of a source.
    template <typename F> void each_column(int64_t source, F f) const {
        for (int64_t i1 = source%src1->ne[1]; i1 < op->ne[1]; i1 += src1->ne[1]) { f(i1 + source/src1->ne[1]*op->ne[1]); }
    }
};

// Columns sorted by matrix.
struct column_order {
    int32_t * first;    // n_matrices + 1: matrix m has the places first[m] to first[m + 1]
    int32_t * place;    // of each column
    int32_t * source;   // at each place
    float  ** products; // at each place

    column_order(const product & p, buffer_parts & parts)
        : first(parts.add<int32_t>(p.n_matrices + 1)), place(parts.add<int32_t>(p.n_columns)), source(parts.add<int32_t>(p.n_columns)),
          products(parts.add<float *>(p.n_columns)) {}

    void sort(const product & p) const {
        std::fill_n(first, p.n_matrices + 1, 0);
        each_column(p, [&](int64_t, int64_t i1, int64_t i2, int64_t i3) { ++first[p.matrix_of(i1, i2, i3) + 1]; });
        for (int64_t m = 0; m < p.n_matrices; ++m) { first[m + 1] += first[m]; }
        each_column(p, [&](int64_t column, int64_t i1, int64_t i2, int64_t i3) { // first[m] moves to the end of m
            const int32_t at = first[p.matrix_of(i1, i2, i3)]++;
            place[column] = at;
            source[at]    = (int32_t) (i1%p.src1->ne[1] + (i2 + i3*p.op->ne[2])*p.src1->ne[1]);
            products[at]  = (float *) ((char *) p.op->data + i1*p.op->nb[1] + i2*p.op->nb[2] + i3*p.op->nb[3]);
        });
        for (int64_t m = p.n_matrices; m > 0; --m) { first[m] = first[m - 1]; }
        first[0] = 0;
    }

private:
    template <typename F> static void each_column(const product & p, F f) {
        int64_t column = 0;
        for (int64_t i3 = 0; i3 < p.op->ne[3]; ++i3) {
            for (int64_t i2 = 0; i2 < p.op->ne[2]; ++i2) {
                for (int64_t i1 = 0; i1 < p.op->ne[1]; ++i1) { f(column++, i1, i2, i3); }
            }
        }
    }
};

// Call f(m, i) for this thread's units: i = 0 .. n_units - 1 of each matrix with columns. Each thread begins with unit ith.
template <typename F>
void each_unit(const ggml_compute_params * params, const product & p, const column_order & order, int64_t n_units, F f) {
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

// Sort the columns and let threads take units. All threads call this, and the barrier follows.
void prepare_units(const ggml_compute_params * params, const product & p, const column_order & order) {
    if (params->ith == 0) {
        order.sort(p);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
}

// --- few columns -------------------------------------------------------------------------------------------

// First block that thread ith quantizes in row `row`; it ends where the next thread begins. A row of Q8_KR64 is written in full, so the
// threads take turns by row.
int64_t first_block(const product & p, int64_t ith, int64_t nth, int64_t row) {
    const int64_t n_blocks = p.n/ggml_blck_size(p.activation);
    return p.activation == GGML_TYPE_Q8_KR64 ? (ith > row%nth ? n_blocks : 0) : ith*n_blocks/nth;
}

constexpr int MAX_DOT_COLUMNS = 16; // per call, two passes of ggml_ext_dot_columns()

void multiply_dots(const ggml_compute_params * params, const product & p, const column_order & order, char * rows) {
    const auto    from_float = ggml_ext_study_from_float(p.op, p.activation, ggml_get_type_traits_cpu(p.activation)->from_float);
    const int64_t ith = params->ith, nth = params->nth, block = ggml_blck_size(p.activation);
    prepare_units(params, p, order);
    for (int64_t i = 0; i < p.n_sources(); ++i) {
        const int64_t begin = first_block(p, ith, nth, i), end = first_block(p, ith + 1, nth, i);
        from_float(p.source(i) + begin*block, rows + i*p.row_size + begin*ggml_type_size(p.activation), (end - begin)*block);
    }
    ggml_barrier(params->threadpool);

    // Small matrices are divided among the threads: in units of 64, two threads would share 576 rows 5:4. Smaller units cost an atomic
    // addition each and load the columns again.
    const bool    small    = p.n_rows < 16*64 || p.n_rows < 4*nth*64 || ggml_is_numa();
    const int64_t n_units  = small ? nth : (p.n_rows + 63)/64;
    const int64_t per_unit = (p.n_rows + n_units - 1)/n_units;
    each_unit(params, p, order, n_units, [&](int64_t m, int64_t unit) {
        const int64_t row = unit*per_unit, n_rows = std::min(per_unit, p.n_rows - row);
        for (int64_t i = order.first[m]; n_rows > 0 && i < order.first[m + 1]; i += MAX_DOT_COLUMNS) {
            const int    n_columns = (int) std::min<int64_t>(MAX_DOT_COLUMNS, order.first[m + 1] - i);
            const void * y[MAX_DOT_COLUMNS];
            float      * s[MAX_DOT_COLUMNS];
            for (int c = 0; c < n_columns; ++c) {
                y[c] = rows + order.source[i + c]*p.row_size;
                s[c] = order.products[i + c] + row;
            }
            ggml_ext_dot_columns(p.src0->type, p.n, s, p.matrix(m) + row*p.src0->nb[1], p.src0->nb[1], n_rows, y, n_columns);
        }
    });
}

// --- many columns ------------------------------------------------------------------------------------------

#if defined(GGML_EXT_GEMM)
struct gemm_buffers {
    struct scratch { // of a thread
        weight_panel panels[MAX_UNIT_PANELS];
        alignas(64) float products[MAX_UNIT_COLUMNS*MAX_UNIT_PANELS*PANEL_ROWS];
    };
    char    * columns;
    scratch * threads;
    int64_t   stride; // columns, and those that tiles read beyond the last
    int       n_scales;

    gemm_buffers(const product & p, const gemm_functions & f, int n_threads, buffer_parts & parts)
        : stride(p.n_columns + 16), n_scales(f.n_scales) {
        columns = parts.add<char>(p.n_blocks*panel_size());
        threads = parts.add<scratch>(n_threads);
    }
    size_t panel_size() const { return GGML_PAD(stride*column_size(n_scales), 64); }

    column_panel panel(int64_t block) const {
        char * codes = columns + block*panel_size();
        float * d = (float *) (codes + stride*QK_K);
        return {(int8_t *) codes, d, d + stride, stride};
    }
};

void quantize_columns(const ggml_compute_params * params, const product & p, const gemm_functions & f, const column_order & order,
                      const gemm_buffers & buffers) {
    const auto    from_float = ggml_ext_study_from_float(p.op, p.activation, ggml_get_type_traits_cpu(p.activation)->from_float);
    const int64_t n_units = p.n_sources()*p.n_blocks;
    for (int64_t u = n_units*params->ith/params->nth; u < n_units*(params->ith + 1)/params->nth; ++u) {
        const int64_t source = u/p.n_blocks, block = u%p.n_blocks;
        union {
            block_q8_K    q8_k;
            block_q8_kr64 q8_kr64;
        } quantized;
        from_float(p.source(source) + block*QK_K, &quantized, std::min<int64_t>(QK_K, p.n - block*QK_K));
        p.each_column(source, [&](int64_t column) { f.pack_column(&quantized, buffers.panel(block).from(order.place[column])); });
    }
}

// Rows of a matrix and the columns at some places.
struct gemm_unit {
    int64_t matrix, row, place;
    int     n_rows, n_columns;
};

// Write the products [panel][column][row] of a unit.
void store_products(const column_order & order, const gemm_unit & u, const float * products) {
    for (int c = 0; c < u.n_columns; ++c) {
        constexpr int AHEAD = 8; // columns, whose products are in other pages
        const float * later = order.products[u.place + std::min(c + AHEAD, u.n_columns - 1)] + u.row;
        for (int r = 0; r < u.n_rows; r += 16) { __builtin_prefetch(later + r, 1); }
        float * out = order.products[u.place + c] + u.row;
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

// Multiply. `next` are rows that the thread probably multiplies after these, as many bytes as `end` allows: memory sends them meanwhile.
void multiply_unit(const product & p, const gemm_functions & f, const column_order & order, const gemm_buffers & buffers,
                   const gemm_unit & u, const char * next, const char * end, gemm_buffers::scratch & scratch) {
    const int     panel_blocks = QK_K/ggml_blck_size(p.src0->type);
    const int64_t n_blocks = p.n/ggml_blck_size(p.src0->type);
    const size_t  nb1 = p.src0->nb[1];
    const int     n_panels = (u.n_rows + PANEL_ROWS - 1)/PANEL_ROWS;
    const char  * x = p.matrix(u.matrix) + u.row*nb1;
    memset(scratch.products, 0, sizeof(float)*n_panels*u.n_columns*PANEL_ROWS);
    for (int64_t b = 0; b < p.n_blocks; ++b, x += panel_blocks*ggml_type_size(p.src0->type)) {
        const char * part_end = std::min(next + u.n_rows*nb1/p.n_blocks, end);
        for (; next < part_end; next += 64) { __builtin_prefetch(next, 0, 2); }
        for (int i = 0; i < n_panels; ++i) {
            f.pack_rows(x + i*PANEL_ROWS*nb1, nb1, u.n_rows - i*PANEL_ROWS, n_blocks - b*panel_blocks, scratch.panels[i]);
        }
        f.multiply(scratch.panels, n_panels, buffers.panel(b).from(u.place), u.n_columns, scratch.products);
    }
    store_products(order, u, scratch.products);
#ifdef GGML_EXT_TESTS
    n_packed.fetch_add(n_panels, std::memory_order_relaxed);
#endif
}

void multiply_gemm(const ggml_compute_params * params, const product & p, const gemm_functions & f, const column_order & order,
                   const gemm_buffers & buffers) {
    prepare_units(params, p, order);
    ggml_barrier(params->threadpool);
    quantize_columns(params, p, f, order, buffers);
    ggml_barrier(params->threadpool);

    int64_t most = 0; // columns of a matrix
    for (int64_t m = 0; m < p.n_matrices; ++m) { most = std::max<int64_t>(most, order.first[m + 1] - order.first[m]); }
    const int64_t unit_rows = (most*p.n < LARGE_ACTIVATIONS ? 1 : MAX_UNIT_PANELS)*PANEL_ROWS;
    const int64_t n_row_units = (p.n_rows + unit_rows - 1)/unit_rows;
    // Dividing the columns unpacks the weights again, so only as far as all threads have work.
    int64_t n_columns = std::min(most, MAX_UNIT_COLUMNS);
    while (n_row_units*((most + n_columns - 1)/n_columns)*p.n_matrices < 4*params->nth && n_columns > 64) {
        n_columns = GGML_PAD(n_columns/2, 32);
    }
    gemm_buffers::scratch & scratch = buffers.threads[params->ith];
    const gemm_scope scope;
    each_unit(params, p, order, n_row_units*((most + n_columns - 1)/n_columns), [&](int64_t m, int64_t i) {
        gemm_unit u = {m, i%n_row_units*unit_rows, order.first[m] + i/n_row_units*n_columns, 0, 0};
        if (u.place < order.first[m + 1]) {
            u.n_rows    = (int) std::min(unit_rows, p.n_rows - u.row);
            u.n_columns = (int) std::min(n_columns, order.first[m + 1] - u.place);
            const char * matrix = p.matrix(m), * end = matrix + p.n_rows*p.src0->nb[1];
            multiply_unit(p, f, order, buffers, u, matrix + (u.row + params->nth*unit_rows)*p.src0->nb[1], end, scratch);
        }
    });
}

// Return the type's functions if the GEMM computes this product.
const gemm_functions * gemm_for(const product & p) {
    static const bool enabled = ggml_ext_env_switch("GGML_CPU_TILED_MM", true), forced = ggml_ext_env_switch("GGML_CPU_TILED_MM_FORCE", false);
    const gemm_functions * f = enabled ? gemm_of(p.src0->type) : nullptr;
    if (!f || forced) {
        return f;
    }
    // Experts have different numbers of columns, and the GEMM gains more with many than it loses with few.
    const int64_t least = p.ids ? f->min_columns*2/3 : f->min_columns;
    return p.n_columns >= least*std::min(p.n_matrices, p.n_columns) ? f : nullptr;
}
#endif

} // namespace

bool ggml_ext_mul_mat_work_size(int n_threads, const struct ggml_tensor * op, size_t * size) {
    if (!product::is_ours(op)) {
        return false;
    }
    const product p(op);
    buffer_parts parts(nullptr);
    column_order(p, parts);
    buffer_parts dots = parts;
    dots.add<char>(p.n_sources()*p.row_size); // also for the reference
    *size = dots.size();
#if defined(GGML_EXT_GEMM)
    if (const gemm_functions * f = gemm_for(p)) {
        gemm_buffers(p, *f, n_threads, parts);
        *size = std::max(*size, parts.size());
    }
#else
    GGML_UNUSED(n_threads);
#endif
    return true;
}

bool ggml_ext_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    if (!product::is_ours(op)) {
        return false;
    }
    const product p(op);
    buffer_parts parts(params->wdata);
    const column_order order(p, parts);
#if defined(GGML_EXT_GEMM)
    if (const gemm_functions * f = params->use_ref ? nullptr : gemm_for(p)) {
        multiply_gemm(params, p, *f, order, gemm_buffers(p, *f, params->nth, parts));
        return true;
    }
#endif
    multiply_dots(params, p, order, parts.add<char>(p.n_sources()*p.row_size));
    return true;
}
