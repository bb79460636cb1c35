// Pipelines of mul_mat_vec, get_rows and the copies of activations. Included in ggml_vk_load_shaders(), in its loop over workgroup sizes w.
{
    // Each subgroup has rows of its own and shares the table. Without subgroup arithmetic, or if a subgroup is smaller than the threads
    // of a block, the workgroup has the rows. Both values of w give the same pipelines.
    const bool     ext_subgroups   = use_subgroups && device->subgroup_size >= 8 && !ggml_ext_vk_no_subgroups();
    const uint32_t ext_n_subgroups = ext_subgroups ? 4 : 1;
    const uint32_t ext_workgroup   = ext_subgroups ? ext_n_subgroups*subgroup_size : subgroup_size16;
    const uint32_t ext_pin         = ext_subgroups ? subgroup_size : 0;
    // limited by registers: 4 rows of 8 columns need 240 on AMD
    const auto ext_rows = [&](uint32_t n_columns) { return device->vendor_id == VK_VENDOR_ID_INTEL || n_columns > 4 ? 2u : 4u; };
#define GGML_EXT_VK_MUL_MAT_VEC(NAME, name, y_type) \
    for (uint32_t i = 0; i < mul_mat_vec_max_cols; ++i) { \
        const uint32_t rows = ext_rows(i + 1); \
        ggml_vk_create_pipeline(device, device->pipeline_dequant_mul_mat_vec_##y_type##_f32[w][GGML_TYPE_##NAME][i], "mul_mat_vec_" #name "_" #y_type "_f32", \
            GGML_EXT_VK_SHADER(mul_mat_vec_##name##_##y_type##_f32), "main", mul_mat_vec_num_bindings, sizeof(vk_mat_vec_push_constants), \
            {rows*ext_n_subgroups, 1, 1}, {ext_workgroup, rows, i + 1}, 1, true, ext_subgroups, ext_pin); \
    }
#define GGML_EXT_VK_MUL_MAT_VEC_ID(NAME, name, pipelines, y_type) \
    ggml_vk_create_pipeline(device, device->pipelines[w][GGML_TYPE_##NAME], "mul_mat_vec_id_" #name "_" #y_type "_f32", \
        GGML_EXT_VK_SHADER(mul_mat_vec_id_##name##_##y_type##_f32), "main", mul_mat_vec_id_num_bindings, sizeof(vk_mat_vec_id_push_constants), \
        {ext_rows(1)*ext_n_subgroups, 1, 1}, {ext_workgroup, ext_rows(1)}, 1, true, ext_subgroups, ext_pin);
#define GGML_EXT_VK_SHADER(name) ext_subgroups ? name##_subgroup_no_shmem_len : name##_len, ext_subgroups ? name##_subgroup_no_shmem_data : name##_data
#define GGML_EXT_X(NAME, name) \
    GGML_EXT_VK_MUL_MAT_VEC(NAME, name, f32) \
    GGML_EXT_VK_MUL_MAT_VEC_ID(NAME, name, pipeline_dequant_mul_mat_vec_id_f32, f32) \
    if (device->integer_dot_product) { \
        GGML_EXT_VK_MUL_MAT_VEC(NAME, name, q8_1) \
        GGML_EXT_VK_MUL_MAT_VEC_ID(NAME, name, pipeline_dequant_mul_mat_vec_id_q8_1_f32, q8_1) \
    } \
    if (w == 0) { \
        ggml_vk_create_pipeline(device, device->pipeline_get_rows[GGML_TYPE_##NAME], "get_rows_" #name, get_rows_##name##_len, \
            get_rows_##name##_data, "main", 3, sizeof(vk_op_binary_push_constants), {1024, 1, 1}, {}, 1); \
        ggml_vk_create_pipeline(device, device->pipeline_get_rows_f32[GGML_TYPE_##NAME], "get_rows_" #name "_f32", get_rows_##name##_f32_len, \
            get_rows_##name##_f32_data, "main", 3, sizeof(vk_op_binary_push_constants), {1024, 1, 1}, {}, 1); \
    }
    GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
#undef GGML_EXT_VK_MUL_MAT_VEC
#undef GGML_EXT_VK_MUL_MAT_VEC_ID
#undef GGML_EXT_VK_SHADER
    if (w == 0) {
#define GGML_EXT_X(block, to, name) \
        ggml_vk_create_pipeline(device, device->pipeline_ggml_ext_copy[ggml_ext_vk_copy_index(block)][to], "ggml_ext_" #name, ggml_ext_##name##_len, \
            ggml_ext_##name##_data, "main", 2, sizeof(vk_op_unary_push_constants), {512, 1, 1}, {}, 1);
        GGML_EXT_X(0,   1, copy_256_f16)
        GGML_EXT_X(0,   2, copy_256_q8_1)
        GGML_EXT_X(32,  0, rotate_32_f32)
        GGML_EXT_X(32,  1, rotate_32_f16)
        GGML_EXT_X(32,  2, rotate_32_q8_1)
        GGML_EXT_X(64,  0, rotate_64_f32)
        GGML_EXT_X(64,  1, rotate_64_f16)
        GGML_EXT_X(64,  2, rotate_64_q8_1)
        GGML_EXT_X(256, 0, rotate_256_f32)
        GGML_EXT_X(256, 1, rotate_256_f16)
        GGML_EXT_X(256, 2, rotate_256_q8_1)
#undef GGML_EXT_X
    }
}
