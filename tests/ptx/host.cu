// The entry points of products for Python, for a device that ptx_device() describes: upstream's own host code quantises activations, chooses kernels and launches them.
#include "host.h"
#include "mmq.cuh"
#include "mmvq.cuh"
#include "ggml-backend-impl.h"

static ggml_cuda_device_info info;

const ggml_cuda_device_info & ggml_cuda_info() { return info; }
// Upstream's pools hand out pieces of larger buffers, and its MMQ reads behind them: up to a tile of activations, 2 KB, where it reckons
// what to leave by the columns of one expert's tokens, or of a batch of less than eight (docs/maintaining/upstream-bugs.md).
struct plain_pool : ggml_cuda_pool {
    void * alloc(size_t size, size_t * actual_size) override {
        void * p = nullptr;
        CUDA_CHECK(cudaMalloc(&p, size + 2048));
        *actual_size = size;
        return p;
    }
    void free(void * p, size_t) override { cudaFree(p); }
};
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) { return std::make_unique<plain_pool>(); }
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

int ptx_tile_columns; // J of the next mul_mat_q

// ggml_tensor's fields that the products look at.
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
