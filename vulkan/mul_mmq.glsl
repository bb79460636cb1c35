// Functions that upstream's mul_mmq calls. The tile of the activations has ds as in memory (q8.glsl): shaders.h defines its type as uint.
void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const ext_words w = ext_load(ib / (QUANT_K/32), ib % (QUANT_K/32));
    [[unroll]] for (uint g = 0; g < 8; ++g) {
        buf_a[buf_ib].qs[g] = ext_ints(w, g);
    }
    buf_a[buf_ib].d = ext_scale(w);
#ifdef EXT_OFFSET
    buf_a[buf_ib].offset = ext_offset(w);
#endif
#ifdef EXT_GROUP_SCALE
    buf_a[buf_ib].scales = uint(ext_pack(ext_group_scale(w, 0), ext_group_scale(w, 2), ext_group_scale(w, 4), ext_group_scale(w, 6)));
#endif
}

void block_a_to_registers(const uint reg_ib, const uint buf_ib) {
    cache_a[reg_ib] = buf_a[buf_ib];
}

ACC_TYPE mmq_dot_product(const uint ib_a) {
    int sum = 0;
    [[unroll]] for (uint g = 0; g < 8; g += 2) {
        int pair = ext_dot(cache_a[ib_a].qs[g], cache_b.qs[g]) + ext_dot(cache_a[ib_a].qs[g + 1], cache_b.qs[g + 1]);
#ifdef EXT_GROUP_SCALE
        pair *= int(ext_get_byte(cache_a[ib_a].scales, g/2));
#endif
        sum += pair;
    }
    float product = float(sum);
#ifdef EXT_OFFSET
    product -= cache_a[ib_a].offset*ext_q8_sum(cache_b.ds);
#endif
    return ACC_TYPE(cache_a[ib_a].d*ext_q8_scale(cache_b.ds)*product);
}
