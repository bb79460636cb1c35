// The rotation (ggml-ext-rotation.h) of 256 values in one simdgroup: one block, four blocks of 64 or eight of 32. Lane c of a block's L = n/8
// lanes holds the values L*i + c, i = 0 ... 7, as in unpack.metal. Butterflies at strides 1 to L/2 are shuffles, those at L to n/2 use
// registers. The order is the reference's, so the results are bit-equal without fast math.

constant uint32_t ggml_ext_signs[8] = GGML_EXT_SIGNS;

template <short n> static inline void ggml_ext_fwht(thread float * v, short lane) {
    FOR_UNROLL (short h = 1; h < n/GGML_EXT_N_PER_LANE; h *= 2) {
        FOR_UNROLL (short i = 0; i < GGML_EXT_N_PER_LANE; ++i) {
            const float other = simd_shuffle_xor(v[i], (ushort) h);
            v[i] = lane & h ? other - v[i] : v[i] + other;
        }
    }
    FOR_UNROLL (short h = 1; h < GGML_EXT_N_PER_LANE; h *= 2) {
        FOR_UNROLL (short i = 0; i < GGML_EXT_N_PER_LANE; ++i) {
            if (!(i & h)) {
                const float a = v[i], b = v[i + h];
                v[i]     = a + b;
                v[i + h] = a - b;
            }
        }
    }
    FOR_UNROLL (short i = 0; i < GGML_EXT_N_PER_LANE; ++i) {
        v[i] *= n == 256 ? 1.0f/16 : n == 64 ? 1.0f/8 : 0.17677669529663688f; // 1/sqrt(n)
    }
}

// Apply the signs S of R = H S.
template <short n> static inline void ggml_ext_flip_signs(thread float * v, short lane) {
    const short n_lanes = n/GGML_EXT_N_PER_LANE;
    FOR_UNROLL (short i = 0; i < GGML_EXT_N_PER_LANE; ++i) {
        const short first = n_lanes*i; // value of lane 0 in register i
        v[i] = as_type<float>(as_type<uint>(v[i]) ^ (ggml_ext_signs[first/32] >> (first%32 + lane%n_lanes)) << 31);
    }
}

template <short n> static inline void ggml_ext_rotate(thread float * v, short lane) {
    ggml_ext_flip_signs<n>(v, lane);
    ggml_ext_fwht<n>(v, lane);
}

template <short n> static inline void ggml_ext_rotate_back(thread float * v, short lane) {
    ggml_ext_fwht<n>(v, lane);
    ggml_ext_flip_signs<n>(v, lane);
}

// Rotate rows of activations in blocks of n. A simdgroup takes 256 values and skips those after the end of the row. It writes the values of a
// block lane by lane, value 8*c + g for weight L*g + c. This is the order of the codes: a sum over k may have any, and so eight weights of
// a lane meet eight neighbouring activations in mul_mv and mul_mm.
template <short n>
kernel void kernel_ext_rotate(
        constant ggml_ext_metal_kargs_rotate & args,
        device const char * src,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const short n_lanes = n/GGML_EXT_N_PER_LANE;

    const int first = GGML_EXT_N_PER_SIMDGROUP*(tgpig.x*(ntg.x/N_SIMDWIDTH) + sgitg);
    if (first >= args.ne0) {
        return; // uniform in the simdgroup
    }
    const int i1 = tgpig.y;
    const int i2 = tgpig.z%args.ne2;
    const int i3 = tgpig.z/args.ne2;

    const int  begin  = first + n*(tiisg/n_lanes) + tiisg%n_lanes;
    const bool inside = begin < args.ne0;

    device const float  * x = (device const float *) (src + i1*args.nb1 + i2*args.nb2 + i3*args.nb3) + begin;
    device       float4 * y = (device float4 *) ((device float *) dst + (((uint64_t) i3*args.ne2 + i2)*args.ne1 + i1)*args.ne0 + first) + 2*tiisg;

    float v[GGML_EXT_N_PER_LANE];
    FOR_UNROLL (short i = 0; i < GGML_EXT_N_PER_LANE; ++i) {
        v[i] = inside ? x[n_lanes*i] : 0.0f;
    }
    ggml_ext_rotate<n>(v, tiisg);
    if (inside) {
        float4 low, high;
        FOR_UNROLL (short i = 0; i < 4; ++i) {
            low[i]  = v[i];
            high[i] = v[i + 4];
        }
        y[0] = low;
        y[1] = high;
    }
}

typedef decltype(kernel_ext_rotate<256>) kernel_ext_rotate_t;
template [[host_name("kernel_ext_rotate_256")]] kernel kernel_ext_rotate_t kernel_ext_rotate<256>;
template [[host_name("kernel_ext_rotate_64")]]  kernel kernel_ext_rotate_t kernel_ext_rotate<64>;
template [[host_name("kernel_ext_rotate_32")]]  kernel kernel_ext_rotate_t kernel_ext_rotate<32>;
