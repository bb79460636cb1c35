// The unpack contract in Metal. A block of n = 256 or 64 weights lies in L = n/8 lanes: lane c has byte c of every plane of
// bits, that is the weights L*g + c, g = 0 ... 7. A type specialises ggml_ext_unpacker<block>:
//   n, n_groups, rotated   of types.toml
//   has_table              value() looks up a table of 4096 entries: codes() in constant memory, minus offset()
//   load(x, c)             takes what lane c needs of a block
//   value(g, table)        code minus offset of weight L*g + c, exact; the table in constant or in threadgroup memory
//   scale(x, g)            what that is multiplied with
// Everything else in this folder follows: rows by index (get_rows.metal), products (mul_mv.metal, and dequantize.metal for
// upstream's mul_mm). The integers are those of types/<type>.h.

template <typename B> struct ggml_ext_unpacker;

// A lane's eight weights, and the lanes of a simdgroup: one block of 256, or four of 64 side by side.
enum { GGML_EXT_N_PER_LANE = 8, GGML_EXT_N_PER_SIMDGROUP = 256 };

template <typename B> struct ggml_ext_lanes {
    enum { n = ggml_ext_unpacker<B>::n, n_lanes = n/GGML_EXT_N_PER_LANE, n_blocks = GGML_EXT_N_PER_SIMDGROUP/n };
};

// Scales of one byte: types/e5m3.h.
static inline float ggml_ext_e5m3(uint8_t d) {
    return (float) as_type<half>((ushort) (d << 7))*(1.0f/256);
}

// Entries of a trellis code's table: codes in constant memory; half(code - offset), which is exact, in threadgroup memory.
static inline float ggml_ext_entry(constant const uint8_t * table, ushort i, float offset) {
    return (float) table[i] - offset;
}
static inline float ggml_ext_entry(threadgroup const half * table, ushort i, float offset) {
    (void) offset;
    return (float) table[i];
}

// The table of a type; of types without one there is nothing to look up.
template <typename B, bool has_table> struct ggml_ext_table {
    static constant const uint8_t * codes() { return nullptr; }
    static void fill(threadgroup half * table, short i, short n_threads) {
        (void) table;
        (void) i;
        (void) n_threads;
    }
};
template <typename B> struct ggml_ext_table<B, true> {
    static constant const uint8_t * codes() { return ggml_ext_unpacker<B>::codes(); }
    // by all threads of a threadgroup; a barrier has to follow
    static void fill(threadgroup half * table, short i, short n_threads) {
        for (short k = 4*i; k < 4096; k += 4*n_threads) {
            FOR_UNROLL (short j = 0; j < 4; ++j) {
                table[k + j] = (half) ggml_ext_entry(codes(), k + j, ggml_ext_unpacker<B>::offset());
            }
        }
    }
};
