// Cases of our types for upstream's test-backend-ops, inside its make_test_cases_eval(): rows of an odd number of blocks, those
// of blocks of 64 ending in the middle of 256 weights, odd numbers of rows, batches around the edges of vector kernels (8) and
// tiles (16, 32, 64, 128), broadcast and permuted operands, experts with no token, one and many, gate and bias fused into
// matrix-vector products.
#define X(NAME, name) GGML_TYPE_##NAME,
for (ggml_type type : { GGML_EXT_WEIGHT_TYPES(X) }) {
#undef X
    const bool of_64 = ggml_blck_size(type) == 64;
    const int  k_one = of_64 ? 576 : 768;
    for (int k : of_64 ? std::vector<int>{64, 192, 576, 2880} : std::vector<int>{256, 768, 2816}) {
        for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 47, 63, 65, 80, 96, 112, 127, 129, 257, 512}) {
            test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 33, n, k, {1, 1}, {1, 1}));
        }
        for (int n : {1, 3, 8, 9, 65, 130}) {
            for (int m : {128, 257}) { // whole tiles, and a row more than two
                test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, m, n, k, {1, 1}, {1, 1}));
            }
            // few rows in many batches: the error is one of all outputs, and of one alone it is that of its activations
            for (int m : {1, 7}) {
                test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, m, n, k, {8, 4}, {1, 1}));
            }
        }
    }
    for (int n : {1, 5, 33}) {
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_one, {2, 3}, {1, 1}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_one, {2, 1}, {2, 3}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_one, {2, 3}, {1, 1}, {0, 2, 1, 3}));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_one, {1, 1}, {1, 1}, {0, 1, 2, 3}, 1280));
        test_cases.emplace_back(new test_mul_mat(type, GGML_TYPE_F32, 17, n, k_one, {2, 1}, {1, 1}, {0, 1, 2, 3}, 0, 1, false, 20));
    }
    for (int n_used : {1, 4}) {
        for (bool broadcast : {false, true}) {
            for (int n : {1, 2, 3, 5, 8, 9, 17, 33, 65, 129, 300}) {
                test_cases.emplace_back(new test_mul_mat_id(type, GGML_TYPE_F32, 16, n_used, broadcast, 33, n, k_one));
            }
        }
    }
    test_cases.emplace_back(new test_mul_mat_id(type, GGML_TYPE_F32, 64, 8, false, 129, 70, of_64 ? 320 : 256));
    for (int64_t n : {1, 2, 4, 8}) {
        for (bool use_id : {false, true}) {
            for (bool bias : {false, true}) {
                test_cases.emplace_back(new test_mul_mat_vec_fusion(type, GGML_GLU_OP_SWIGLU, n, 33, k_one, use_id, 16, 8, false, bias, true, false, {1, 1}));
            }
        }
    }
    for (int n_ids : {1, 5}) {
        test_cases.emplace_back(new test_get_rows(type, k_one, 9, n_ids, 1, 1, false));
        test_cases.emplace_back(new test_get_rows(type, k_one, 9, n_ids, 3, 2, true));
    }
    test_cases.emplace_back(new test_cpy(type, GGML_TYPE_F32, {k_one, 3, 2, 2}, {-1, -1, -1, -1}, {0, 3, 1, 2}));
}
