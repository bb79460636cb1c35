// The unpack interface in Metal. A block of n = 256, 64 or 32 weights has L = n/8 lanes. Lane c has byte c of every bit plane: the
// weights L*g + c, g = 0 ... 7. A type specializes ggml_ext_unpacker<block>:
//   n, n_groups, rotated   from types.toml
//   has_table              value() looks up a table of 4096 entries: codes() in constant memory, or entries that `table` makes of them
//   load(x, c)             loads the data of lane c
//   load_group(x, c, g)    loads what value(g) of lane c needs; only for types that are not rotated
//   value(g, table)        code - offset of weight L*g + c, exact; the table is in constant or threadgroup memory
//   scale(x, g)            the factor of the value
// The integers equal those of types/<type>.h.

template <typename B> struct ggml_ext_unpacker;

// A lane has eight weights, a simdgroup one block of 256, four blocks of 64 or eight of 32.
enum { GGML_EXT_N_PER_LANE = 8, GGML_EXT_N_PER_SIMDGROUP = 256 };

template <typename B> struct ggml_ext_lanes {
    enum { n = ggml_ext_unpacker<B>::n, n_lanes = n/GGML_EXT_N_PER_LANE, n_blocks = GGML_EXT_N_PER_SIMDGROUP/n };
};

// One-byte scale (types/e5m3.h).
static inline float ggml_ext_e5m3(uint8_t d) {
    return (float) as_type<half>((ushort) (d << 7))*(1.0f/256);
}

// The table of a type; empty for types without one.
template <typename B, bool has_table> struct ggml_ext_table {
    typedef half entry;
    static constant const uint8_t * codes() { return nullptr; }
    static void fill(threadgroup half * table, short i, short n_threads) {
        (void) table;
        (void) i;
        (void) n_threads;
    }
};
template <typename B> struct ggml_ext_table<B, true> {
    typedef typename ggml_ext_unpacker<B>::table table_t;
    typedef typename table_t::entry              entry;
    static constant const typename table_t::code * codes() { return ggml_ext_unpacker<B>::codes(); }
    // called by all threads of a threadgroup, before a barrier
    static void fill(threadgroup entry * table, short i, short n_threads) {
        for (short k = 4*i; k < 4096; k += 4*n_threads) {
            FOR_UNROLL (short j = 0; j < 4; ++j) {
                table[k + j] = table_t::make(codes()[k + j], ggml_ext_unpacker<B>::offset());
            }
        }
    }
};
