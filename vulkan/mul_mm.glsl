// Body of upstream's load_a_to_shmem(): unpack LOAD_VEC_A = 8 weights, one lane. The copy of the activations has the order of the lanes too.
    const uint idx = pos_a + col * p.stride_a / LOAD_VEC_A + row;
    const uint k_pair = row * LOAD_VEC_A / 2;
    const ext_words w = ext_load_lane(idx / (QUANT_K/8), idx % (QUANT_K/8));
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        vec2 v = vec2(ext_values(w, 2*i).x, ext_values(w, 2*i + 1).x);
#ifdef EXT_OFFSET
        v -= ext_offset(w);
#endif
        v *= ext_scale(w);
        store_a(col, k_pair + i, FLOAT_TYPEV2(v));
    }
