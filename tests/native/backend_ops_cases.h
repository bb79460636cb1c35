// Cases of the ggml-ext types for upstream's test-backend-ops, included by make_test_cases_eval(): odd numbers of blocks, blocks of 64
// and 32 that end within 256 weights, odd numbers of rows, batches around the limits of vector kernels (8) and tiles (16, 32, 64, 128), broadcast and
// permuted operands, experts with no, one and many tokens, gate and bias fused into matrix-vector products.
#define X(NAME, name) GGML_TYPE_##NAME,
for (ggml_type type : { GGML_EXT_WEIGHT_TYPES(X) }) {
#undef X
    const int block = (int) ggml_blck_size(type), k_odd = block == 32 ? 416 : block == 64 ? 576 : 768;
    for (int k : block == 32 ? std::vector<int>{32, 160, 2848} : block == 64 ? std::vector<int>{64, 192, 576, 2880} : std::vector<int>{256, 768, 2816}) {
        for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 47, 63, 65, 80, 96, 112, 127, 129, 257, 512}) {
            test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 33, n, k, {1, 1}, {1, 1}));
        }
        for (int n : {1, 3, 8, 9, 65, 130}) {
            for (int m : {128, 257}) { // full tiles, and one row more than two
                test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, m, n, k, {1, 1}, {1, 1}));
            }
            // few rows in many batches: the test averages the error over outputs, and one output alone has the error of its activations
            for (int m : {1, 7}) {
                test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, m, n, k, {8, 4}, {1, 1}));
            }
        }
    }
    for (int n : {1, 5, 33}) {
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_odd, {2, 3}, {1, 1}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_odd, {2, 1}, {2, 3}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_odd, {2, 3}, {1, 1}, {0, 2, 1, 3}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_odd, {1, 1}, {1, 1}, {0, 1, 2, 3}, 1280));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_odd, {2, 1}, {1, 1}, {0, 1, 2, 3}, 0, 1, false, 20));
    }
    for (int n_used : {1, 4}) {
        for (bool broadcast : {false, true}) {
            for (int n : {1, 2, 3, 5, 8, 9, 17, 33, 65, 129, 300}) {
                test_cases.emplace_back(new test_mul_mat_id(type, GGML_TYPE_F32, 16, n_used, broadcast, 33, n, k_odd));
            }
        }
    }
    test_cases.emplace_back(new test_mul_mat_id(type, GGML_TYPE_F32, 64, 8, false, 129, 70, block == 32 ? 160 : block == 64 ? 320 : 256));
    for (int64_t n : {1, 2, 4, 8}) {
        for (bool use_id : {false, true}) {
            for (bool bias : {false, true}) {
                test_cases.emplace_back(new test_mul_mat_vec_fusion(type, GGML_GLU_OP_SWIGLU, n, 33, k_odd, use_id, 16, 8, false, bias, true, false, {1, 1}));
            }
        }
    }
    for (int n_ids : {1, 5}) {
        test_cases.emplace_back(new test_get_rows(type, k_odd, 9, n_ids, 1, 1, false));
        test_cases.emplace_back(new test_get_rows(type, k_odd, 9, n_ids, 3, 2, true));
    }
    test_cases.emplace_back(new test_cpy(type, GGML_TYPE_F32, {k_odd, 3, 2, 2}, {-1, -1, -1, -1}, {0, 3, 1, 2}));
}
