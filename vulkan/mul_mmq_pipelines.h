// Pipelines of mul_mmq. Included in ggml_vk_load_shaders(). As for upstream's K-quants, devices with matrix cores use mul_mm instead.
if (device->integer_dot_product && device->fp16 && !device->coopmat_support && !device->coopmat2) {
    const std::vector<vk_tile_config> ext_tiles = {{s_warptile_mmq_int_k, s_mmq_wg_denoms, s_align}, {m_warptile_mmq_int_k, m_mmq_wg_denoms, m_align},
                                                   {l_warptile_mmq_int_k, l_mmq_wg_denoms, l_align}};
    // with subgroups of eight, K-quants' small tile for experts has half of the subgroups that its columns need
    const std::vector<vk_tile_config> ext_tiles_id = {{device->subgroup_size < 16 ? s_warptile_mmqid_int : s_warptile_mmqid_int_k, s_mmq_wg_denoms, s_align},
                                                      {m_warptile_mmqid_int_k, m_mmq_wg_denoms, m_align}, {l_warptile_mmqid_int_k, l_mmq_wg_denoms, l_align}};
    const bool ext_ballots = device->subgroup_ballot && device->subgroup_require_full_support && subgroup_min_size_16;
    const auto ext_create = [&](ggml_type type, bool is_id, const char * name, size_t len, const void * data) {
        const std::vector<vk_tile_config> tiles = filter_tc(is_id ? ext_tiles_id : ext_tiles, type, is_id, true);
        const bool pins = is_id && ext_ballots;
        if (!tiles.empty()) {
            create_mm_pipelines({type, GGML_TYPE_Q8_1, is_id, false}, tiles, name, len, data,
                                is_id ? sizeof(vk_mat_mat_id_push_constants) : sizeof(vk_mat_mat_push_constants), is_id ? mul_mat_id_param_count : 3,
                                [](const std::vector<uint32_t> & warptile, bool) { return warptile; }, false, pins, pins ? mul_mat_subgroup_size_16 : 0, false);
        }
    };
#define GGML_EXT_X(NAME, name) \
    ext_create(GGML_TYPE_##NAME, false, "matmul_" #name "_q8_1", matmul_##name##_q8_1_len, matmul_##name##_q8_1_data); \
    if (ext_ballots) { \
        ext_create(GGML_TYPE_##NAME, true, "matmul_id_subgroup_" #name "_q8_1", matmul_id_subgroup_##name##_q8_1_len, matmul_id_subgroup_##name##_q8_1_data); \
    } else { \
        ext_create(GGML_TYPE_##NAME, true, "matmul_id_" #name "_q8_1", matmul_id_##name##_q8_1_len, matmul_id_##name##_q8_1_data); \
    }
    GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
}
