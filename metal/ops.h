// Rotation of the activations of products with rotated types, into scratch memory after the result (host.h). Included in the middle
// of ggml-metal-ops.cpp, whose functions it uses.
#pragma once

#include "host.h"

// Copies of op and its src[1] with the rotated activations.
struct ggml_ext_metal_rotated {
    ggml_tensor op, src1;
};

// Encode the rotation of op->src[1] and return the copy of op that reads its result. Return op if its weights are not rotated.
static ggml_tensor * ggml_ext_metal_op_rotate(ggml_metal_op_t ctx, ggml_tensor * op, ggml_ext_metal_rotated & rotated) {
    const int block = ggml_ext_metal_rotated_block(op->src[0]->type);
    if (!block) {
        return op;
    }
    const ggml_tensor * x = op->src[1];
    GGML_ASSERT(x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[0] % block == 0);

    size_t n_bytes = ggml_nbytes(op);
    if (op->op == GGML_OP_MUL_MAT_ID) {
        n_bytes += ggml_metal_op_mul_mat_id_extra_tpe(op) + ggml_metal_op_mul_mat_id_extra_ids(op) +
                   ggml_metal_op_mul_mat_id_extra_amax(op);
    }

    rotated.op   = *op;
    rotated.src1 = *x;
    rotated.op.src[1] = &rotated.src1;
    rotated.src1.buffer   = op->view_src ? op->view_src->buffer : op->buffer;
    rotated.src1.view_src = nullptr;
    rotated.src1.data     = (char *) op->data + ggml_ext_metal_scratch_offset(n_bytes);
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        rotated.src1.nb[i] = rotated.src1.nb[i - 1]*rotated.src1.ne[i - 1];
    }

    char name[64];
    snprintf(name, sizeof(name), "kernel_ext_rotate_%d", block);
    ggml_metal_pipeline_with_params pipeline = ggml_metal_library_get_pipeline(ctx->lib, name);
    if (!pipeline.pipeline) {
        pipeline = ggml_metal_library_compile_pipeline(ctx->lib, name, name, nullptr);
    }

    ggml_ext_metal_kargs_rotate args = {
        /*.ne0 =*/ (int32_t) x->ne[0],
        /*.ne1 =*/ (int32_t) x->ne[1],
        /*.ne2 =*/ (int32_t) x->ne[2],
        /*.nb1 =*/ x->nb[1],
        /*.nb2 =*/ x->nb[2],
        /*.nb3 =*/ x->nb[3],
    };
    ggml_metal_encoder_set_pipeline(ctx->enc, pipeline);
    ggml_metal_encoder_set_bytes   (ctx->enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(x),             1);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(&rotated.src1), 2);
    const int n_per_threadgroup = 256*GGML_EXT_METAL_NSG_ROTATE;
    ggml_metal_encoder_dispatch_threadgroups(ctx->enc, (args.ne0 + n_per_threadgroup - 1)/n_per_threadgroup, args.ne1,
                                             (int) (x->ne[2]*x->ne[3]), 32*GGML_EXT_METAL_NSG_ROTATE, 1, 1);
    ggml_metal_op_concurrency_reset(ctx); // the product reads the rotated activations
    return &rotated.op;
}
