// Host code for ggml-ext types, included in the middle of ggml-vulkan.cpp, whose structs and functions it uses.
#pragma once

#include "ggml-ext-supports.h"
#include "types/codes.h"

static bool ggml_ext_vk_is_weight_type(ggml_type type) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES return true;
        default:              return false;
    }
}

// Block size of a rotated type, 0 for other types.
static int ggml_ext_vk_rotated_block(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return GGML_EXT_##NAME##_ROTATED ? GGML_EXT_##NAME##_BLOCK_SIZE : 0;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return 0;
    }
}

// Index of the pipelines that copy activations and rotate blocks of this size; 0: no rotation.
static constexpr int ggml_ext_vk_copy_index(int block) {
    return block == 0 ? 0 : block == 32 ? 1 : block == 64 ? 2 : 3;
}

// --- shared memory ---------------------------------------------------------------------------------------------------

// Bytes of a type's table in shared memory (trellis.glsl, ditto5.glsl).
static uint32_t ggml_ext_vk_table_bytes(ggml_type type) {
    switch (type) {
        GGML_EXT_TRELLIS_CASES  return 4096*sizeof(uint16_t);
        GGML_EXT_CODEBOOK_CASES return 32*sizeof(float);
        default:                return 0;
    }
}

// Bytes of shared memory of a device. Tests lower it.
static uint32_t ggml_ext_vk_shared_bytes(const vk_device & device) {
    static const char * limit = getenv("GGML_EXT_VK_SHARED_BYTES");
    return limit ? (uint32_t) atoi(limit) : device->properties.limits.maxComputeSharedMemorySize;
}

// Whether the table fits next to the smallest tiles of mul_mm, which need up to 13 KB. Devices with less than 32 KB of shared memory do
// not support the trellis types.
static bool ggml_ext_vk_table_fits(const vk_device & device, ggml_type type) {
    return ggml_ext_vk_table_bytes(type) < 1024 || ggml_ext_vk_shared_bytes(device) >= 32*1024;
}

// Table bytes for upstream's choice of tiles, 0 for an unsupported type: upstream rejects a device where the smallest tile of any type
// does not fit.
static uint32_t ggml_ext_vk_lut_size(const vk_device & device, ggml_type type) {
    return ggml_ext_vk_table_fits(device, type) ? ggml_ext_vk_table_bytes(type) : 0;
}

// Whether a tile of mul_mmq fits: up to 40 bytes for 32 weights (mul_mmq_tile.glsl), 36 for activations, and for experts the columns' ids.
static bool ggml_ext_vk_mmq_fits(const vk_device & device, const std::vector<uint32_t> & warptile, bool mul_mat_id, ggml_type type) {
    const uint32_t n_steps = mul_mat_id ? 1 : 4, ids = mul_mat_id ? 4*warptile[2] + 16*(warptile[0]/warptile[10]) : 0;
    return ggml_ext_vk_is_weight_type(type) && ggml_ext_vk_table_fits(device, type) &&
           n_steps*(40*warptile[1] + 36*warptile[2]) + ids + ggml_ext_vk_table_bytes(type) <= ggml_ext_vk_shared_bytes(device);
}

// Tests force reductions in shared memory on a device with subgroups.
static bool ggml_ext_vk_no_subgroups() {
    static const bool is_set = getenv("GGML_EXT_VK_NO_SUBGROUPS") != nullptr;
    return is_set;
}

// --- activations -----------------------------------------------------------------------------------------------------

static bool ggml_vk_should_use_mmvq(const vk_device & device, uint32_t m, uint32_t n, uint32_t k, ggml_type src0_type);

// Whether the device multiplies bytes fast. Tests force it: lavapipe has the instructions, but says that they are slow.
static bool ggml_ext_vk_has_fast_dot(bool is_accelerated) {
    return is_accelerated || getenv("GGML_EXT_VK_INTEGER_DOT") != nullptr;
}

// Whether integers take fewer operations than floats (kernel_counts.py). With one column they do not if each weight takes a look-up.
static bool ggml_ext_vk_gains_from_integers(ggml_type type, int64_t n_columns) {
    switch (type) {
#define GGML_EXT_X(NAME, name, K, V, ...) case GGML_TYPE_##NAME: return n_columns > 1 || V > 1;
        GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        GGML_EXT_CODEBOOK_CASES return n_columns > 1;
        default:                return true;
    }
}

// Types of the activations that products read. Q8_1 stands for q8.glsl. mul_mat_vec takes it where upstream takes it for K-quants with n columns or tokens,
// ggml_vk_should_use_mmvq(), mul_mm wherever it has the pipelines. Their keys have it as the type of src1.
static ggml_type ggml_ext_vk_vec_y_type(const vk_device & device, const ggml_tensor * w, const ggml_tensor * x, int64_t n, int64_t n_columns) {
    return device->integer_dot_product && ggml_ext_vk_is_weight_type(w->type) && ggml_vk_should_use_mmvq(device, w->ne[1], n, w->ne[0], w->type) &&
        (ggml_ext_vk_gains_from_integers(w->type, n_columns) || device->mmvq_mode == 1) ? GGML_TYPE_Q8_1 : x->type;
}
static ggml_type ggml_ext_vk_mm_y_type(const vk_device & device, const ggml_tensor * w, bool mul_mat_id) {
    return w->type == GGML_TYPE_BF16 ? GGML_TYPE_BF16 :
        ggml_ext_vk_is_weight_type(w->type) && device->pipeline_matmul.count({w->type, GGML_TYPE_Q8_1, mul_mat_id, false}) ? GGML_TYPE_Q8_1 : GGML_TYPE_F16;
}

// Whether a product reads its activations from a copy in prealloc_y. Rotated types always do, because the copy rotates. mul_mm does for all types,
// because its shaders only take activations in the order of the codes, and so do products of integers.
static bool ggml_ext_vk_copies_y(const ggml_tensor * w, ggml_type y_type) {
    return ggml_ext_vk_is_weight_type(w->type) && (y_type != GGML_TYPE_F32 || ggml_ext_vk_rotated_block(w->type) != 0);
}

// Get the pipeline of that copy, in place of ggml_vk_get_cpy_pipeline().
static vk_pipeline ggml_ext_vk_get_y_pipeline(ggml_backend_vk_context * ctx, const ggml_tensor * w, const ggml_tensor * x, const ggml_tensor * dst,
                                              ggml_type y_type) {
    const int block = ggml_ext_vk_rotated_block(w->type), to = y_type == GGML_TYPE_F32 ? 0 : y_type == GGML_TYPE_F16 ? 1 : 2;
    if (!ggml_ext_vk_is_weight_type(w->type) || (block == 0 && to == 0)) {
        return ggml_vk_get_cpy_pipeline(ctx, x, dst, y_type);
    }
    GGML_ASSERT(x->type == GGML_TYPE_F32 && (block != 0 || ggml_blck_size(w->type) == 256));
    return ctx->device->pipeline_ggml_ext_copy[ggml_ext_vk_copy_index(block)][to];
}

// --- supported operations --------------------------------------------------------------------------------------------

// Whether the device has pipelines of mul_mm. It has none where VK_NV_cooperative_matrix2 is used without VK_KHR_cooperative_matrix
// (coopmat2.h); then log a warning once.
static bool ggml_ext_vk_has_mul_mm(const vk_device & device, ggml_type type, bool mul_mat_id) {
    if (device->pipeline_matmul.count({type, GGML_TYPE_F16, mul_mat_id, false})) {
        return true;
    }
    static const bool warned = [] {
        GGML_LOG_WARN("ggml_vulkan: types of ggml-ext have no kernels for products on this device and run on the CPU; if GGML_VK_DISABLE_COOPMAT is "
                      "set, set GGML_VK_DISABLE_COOPMAT2=1 too\n");
        return true;
    }();
    return !warned;
}

// Whether the device has a kernel for op. Called only for operations on ggml-ext types.
static bool ggml_ext_vk_supports_op(const vk_device & device, const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    if (!w || !x || !ggml_ext_vk_is_weight_type(w->type) || !ggml_ext_vk_table_fits(device, w->type) || w->nb[0] != ggml_type_size(w->type)) {
        return false;
    }
    switch (op->op) {
        case GGML_OP_MUL_MAT_ID:
            if (op->src[2]->ne[3] != x->ne[3] || ggml_get_op_params_i32(op, 3) == GGML_PREC_F32 ||
                !(device->mul_mat_id_s[w->type] || device->mul_mat_id_m[w->type] || device->mul_mat_id_l[w->type])) {
                return false; // upstream's rule
            }
            break;
        case GGML_OP_MUL_MAT:
            if (w->ne[3] != x->ne[3]) {
                return false;
            }
            break;
        case GGML_OP_GET_ROWS:
            return x->type == GGML_TYPE_I32 && (op->type == GGML_TYPE_F32 || op->type == GGML_TYPE_F16);
        default:
            return false;
    }
    if (x->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || !ggml_vk_dim01_contiguous(w)) {
        return false;
    }
    return ggml_ext_vk_has_mul_mm(device, w->type, op->op == GGML_OP_MUL_MAT_ID);
}

// --- pipelines of mul_mm ---------------------------------------------------------------------------------------------

// Arguments of GGML_EXT_WEIGHT_TYPES in the branches of ggml_vk_load_shaders(), whose lambdas they call. They follow upstream's lines
// for types with look-up tables and F16 activations. coopmat2.h uses them too.
#define GGML_EXT_VK_MM_CM1(NAME, name)                                                                                          \
    if (device->coopmat_acc_f16_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, true}, tc_mmq, "matmul_" #name "_f16_f16acc",                       \
                   matmul_##name##_f16_f16acc_cm1_len, matmul_##name##_f16_f16acc_cm1_data, sizeof(vk_mat_mat_push_constants), 3); \
    }                                                                                                                           \
    if (device->coopmat_acc_f32_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                             \
                   matmul_##name##_f16_cm1_len, matmul_##name##_f16_cm1_data, sizeof(vk_mat_mat_push_constants), 3);            \
    }
#define GGML_EXT_VK_MM_ID_CM1(NAME, name)                                                                                       \
    if (device->coopmat_acc_f16_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, true}, tc_mmq_id, "matmul_id_subgroup_" #name "_f16_f16acc",         \
                   matmul_id_subgroup_##name##_f16_f16acc_cm1_len, matmul_id_subgroup_##name##_f16_f16acc_cm1_data,             \
                   sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count);                                               \
    }                                                                                                                           \
    if (device->coopmat_acc_f32_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmq_id, "matmul_id_subgroup_" #name "_f16",               \
                   matmul_id_subgroup_##name##_f16_cm1_len, matmul_id_subgroup_##name##_f16_cm1_data,                           \
                   sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count);                                               \
    }

#define GGML_EXT_VK_MM_FP16(NAME, name)                                                                                         \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, true}, tc_mmq, "matmul_" #name "_f16_f16acc",                            \
              SPV_DOT2_F16ACC(matmul_##name##_f16), sizeof(vk_mat_mat_push_constants), 3);                                      \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                                  \
              SPV_DOT2(matmul_##name##_f16), sizeof(vk_mat_mat_push_constants), 3);
// mul_mat_id, with subgroup ballots and the subgroup's size, or without (0)
#define GGML_EXT_VK_MM_ID_FP16_AS(NAME, kernel, subgroup_size)                                                                 \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, true}, tc_mmqid, #kernel "_f16acc", SPV_DOT2_F16ACC(kernel),             \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);                                    \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmqid, #kernel, SPV_DOT2(kernel),                             \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);
#define GGML_EXT_VK_MM_ID_SUBGROUP_FP16(NAME, name) GGML_EXT_VK_MM_ID_FP16_AS(NAME, matmul_id_subgroup_##name##_f16, mul_mat_subgroup_size)
#define GGML_EXT_VK_MM_ID_FP16(NAME, name)          GGML_EXT_VK_MM_ID_FP16_AS(NAME, matmul_id_##name##_f16, 0)

#define GGML_EXT_VK_MM_FP32(NAME, name)                                                                                        \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                                 \
              matmul_##name##_f16_fp32_len, matmul_##name##_f16_fp32_data, sizeof(vk_mat_mat_push_constants), 3);
#define GGML_EXT_VK_MM_ID_FP32_AS(NAME, kernel, subgroup_size)                                                                 \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmqid, #kernel, kernel##_fp32_len, kernel##_fp32_data,        \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);
#define GGML_EXT_VK_MM_ID_SUBGROUP_FP32(NAME, name) GGML_EXT_VK_MM_ID_FP32_AS(NAME, matmul_id_subgroup_##name##_f16, mul_mat_subgroup_size)
#define GGML_EXT_VK_MM_ID_FP32(NAME, name)          GGML_EXT_VK_MM_ID_FP32_AS(NAME, matmul_id_##name##_f16, 0)
