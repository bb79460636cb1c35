// Entry points of products for Python. Upstream's host code quantizes activations, selects kernels and launches them on the device that
// ptx_device() describes.
#include "host.h"
#include "mmq.cuh"
#include "mmvq.cuh"
#include "ggml-backend-impl.h"

static ggml_cuda_device_info info;

const ggml_cuda_device_info & ggml_cuda_info() { return info; }
// Upstream's MMQ reads up to 2 KB (a tile of activations) past its buffers, for experts and for batches of less than eight columns.
// Its pools hide that (docs/maintaining/upstream-bugs.md), so this one pads.
struct padded_pool : ggml_cuda_pool {
    void * alloc(size_t size, size_t * actual_size) override {
        void * p = nullptr;
        CUDA_CHECK(cudaMalloc(&p, size + 2048));
        *actual_size = size;
        return p;
    }
    void free(void * p, size_t) override { cudaFree(p); }
};
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) { return std::make_unique<padded_pool>(); }
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

int ptx_tile_columns; // tile columns J of the next mul_mat_q

// The fields of ggml_tensor that products use.
struct ptx_tensor {
    int64_t type, ne[4];
    size_t  nb[4];
    void *  data;
};

struct tensor : ggml_tensor {
    ggml_backend_buffer weights = {};
    tensor(const ptx_tensor & from, ggml_op op) : ggml_tensor() {
        weights.usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        type = (ggml_type) from.type;
        memcpy(ne, from.ne, sizeof(ne));
        memcpy(nb, from.nb, sizeof(nb));
        data         = from.data;
        this->op     = op;
        this->buffer = &weights;
    }
};

struct ptx_fusion {
    const ptx_tensor * gate, * bias, * gate_bias;
    int64_t glu_op;
};

extern "C" {

void ptx_device(int id, int cc, int nsm, size_t shared) {
    ptx_device_id = id;
    info.device_count = info.physical_device_count = id + 1;
    info.devices[id].cc        = cc;
    info.devices[id].nsm       = nsm;
    info.devices[id].smpb      = 48*1024;
    info.devices[id].smpbo     = shared;
    info.devices[id].warp_size = 32;
}

int ptx_mul_mat_vec(const ptx_tensor * w, const ptx_tensor * x, const ptx_tensor * ids, const ptx_tensor * y, const ptx_fusion * fusion) {
    return checked([&] {
        ggml_backend_cuda_context ctx(ptx_device_id);
        const ggml_op op = ids ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT;
        tensor src0(*w, GGML_OP_NONE), src1(*x, GGML_OP_NONE), dst(*y, op), src2(ids ? *ids : *x, GGML_OP_NONE);
        ggml_cuda_mm_fusion_args_host f = {};
        tensor gate(fusion && fusion->gate ? *fusion->gate : *w, GGML_OP_NONE), bias(fusion && fusion->bias ? *fusion->bias : *x, GGML_OP_NONE),
               gate_bias(fusion && fusion->gate_bias ? *fusion->gate_bias : *x, GGML_OP_NONE);
        if (fusion) {
            f.gate      = fusion->gate      ? &gate      : nullptr;
            f.x_bias    = fusion->bias      ? &bias      : nullptr;
            f.gate_bias = fusion->gate_bias ? &gate_bias : nullptr;
            f.glu_op    = (ggml_glu_op) fusion->glu_op;
        }
        ggml_cuda_mul_mat_vec_q(ctx, &src0, &src1, ids ? &src2 : nullptr, &dst, fusion ? &f : nullptr);
    });
}

int ptx_mul_mat(const ptx_tensor * w, const ptx_tensor * x, const ptx_tensor * ids, const ptx_tensor * y, int tile_columns) {
    return checked([&] {
        ptx_tile_columns = tile_columns;
        ggml_backend_cuda_context ctx(ptx_device_id);
        const ggml_op op = ids ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT;
        tensor src0(*w, GGML_OP_NONE), src1(*x, GGML_OP_NONE), dst(*y, op), src2(ids ? *ids : *x, GGML_OP_NONE);
        dst.src[0] = &src0;
        dst.src[1] = &src1;
        ggml_cuda_mul_mat_q(ctx, &src0, &src1, ids ? &src2 : nullptr, &dst);
    });
}

}
