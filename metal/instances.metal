// Kernels of one type. scripts/build/metal_library.py writes these lines for each type, with its name in place of NAME.
template [[host_name("kernel_get_rows_NAME")]]        kernel ggml_ext_get_rows_t  kernel_ext_get_rows<block_NAME>;
template [[host_name("kernel_mul_mv_NAME_f32")]]      kernel ggml_ext_mul_mv_t    kernel_ext_mul_mv<block_NAME, 1>;
template [[host_name("kernel_mul_mv_NAME_f32_r1_2")]] kernel ggml_ext_mul_mv_t    kernel_ext_mul_mv<block_NAME, 2>;
template [[host_name("kernel_mul_mv_NAME_f32_r1_3")]] kernel ggml_ext_mul_mv_t    kernel_ext_mul_mv<block_NAME, 3>;
template [[host_name("kernel_mul_mv_NAME_f32_r1_4")]] kernel ggml_ext_mul_mv_t    kernel_ext_mul_mv<block_NAME, 4>;
template [[host_name("kernel_mul_mv_id_NAME_f32")]]   kernel ggml_ext_mul_mv_id_t kernel_ext_mul_mv_id<block_NAME>;
template [[host_name("kernel_mul_mm_NAME_f32")]]      kernel ggml_ext_mul_mm_t    kernel_mul_mm<GGML_EXT_MUL_MM(block_NAME)>;
template [[host_name("kernel_mul_mm_id_NAME_f32")]]   kernel ggml_ext_mul_mm_id_t kernel_mul_mm_id<GGML_EXT_MUL_MM(block_NAME)>;
