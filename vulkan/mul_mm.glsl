// Body of upstream's load_a_to_shmem(): unpack LOAD_VEC_A = 4 weights of one group.
    const uint idx = pos_a + col * p.stride_a / LOAD_VEC_A + row;
    const uint k_pair = row * LOAD_VEC_A / 2;
    const uint in_block = idx % (QUANT_K/4), n_words = QUANT_K/32;
    const ext_words w = ext_load(idx / (QUANT_K/4), in_block % n_words);
    vec4 v = ext_values(w, in_block / n_words);
#ifdef EXT_OFFSET
    v -= ext_offset(w);
#endif
    v *= ext_scale(w);
    store_a(col, k_pair,     FLOAT_TYPEV2(v.xy));
    store_a(col, k_pair + 1, FLOAT_TYPEV2(v.zw));
