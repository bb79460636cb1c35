// Upstream's Metal backend as host code. This file replaces ggml-metal-device.m and ggml-metal-context.m, which are Objective-C, by a
// device with the translated kernels (runtime.h). The rest of the backend is upstream's patched source.
//
// Memory: a buffer ends or begins at an unreadable page, so accesses outside of it raise a signal.
// Concurrency: dispatches between two barriers of a command encoder run in reverse order, so a missing barrier gives wrong results.
#include "runtime.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal-common.h"
#include "ggml-metal-context.h"
#include "ggml-metal-device.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-ops.h"
#include "ggml-metal.h"
#include "metal/host.h"

#include <cstring>
#include <memory>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

using metal_host::kernels;

static int  buffer_alignment = 32;
static bool guard_front, has_library = true, has_simdgroup_mm = true;
static std::set<std::string> used_kernels;

// --- constants, pipelines, library ---

struct ggml_metal_cv { std::map<int, int> values; };

struct ggml_metal_pipeline {
    const metal_host::kernel_function * kernel;
    std::map<int, int> constants;
};

struct ggml_metal_device {
    ggml_metal_device_props props;
    ggml_metal_library_t    library;
    ggml_metal_fusion_info * fusion;
};

struct ggml_metal_library {
    ggml_metal_device_t    device;
    ggml_metal_pipelines_t pipelines;
};

ggml_metal_cv_t ggml_metal_cv_init(void) { return new ggml_metal_cv; }
void ggml_metal_cv_free(ggml_metal_cv_t cv) { delete cv; }
void ggml_metal_cv_set_int16(ggml_metal_cv_t cv, int16_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_bool (ggml_metal_cv_t cv, bool    value, int32_t idx) { cv->values[idx] = value; }

void ggml_metal_pipeline_free(ggml_metal_pipeline_t pipeline) { delete pipeline; }
int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params) { return 128; } // rows of 1024 and more need several threadgroups

ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) { return lib->device; }

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params result = {};
    result.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return result;
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t lib, const char * base, const char * name,
                                                                    ggml_metal_cv_t cv) {
    const auto kernel = kernels().find(base);
    if (kernel == kernels().end()) {
        GGML_ABORT("no kernel is named %s", base);
    }
    used_kernels.insert(base);
    ggml_metal_pipeline_with_params result = {};
    result.pipeline = new ggml_metal_pipeline{&kernel->second, cv ? cv->values : std::map<int, int>()};
    ggml_metal_pipelines_add(lib->pipelines, name, result.pipeline);
    return result;
}

// --- encoders ---

struct ggml_metal_encoder {
    bool concurrent;
    ggml_metal_pipeline_t pipeline;
    std::shared_ptr<std::vector<char>> bytes[8];
    void * buffers[8];
    size_t memory_bytes;
    std::vector<std::function<void()>> pending;
};

static void flush(ggml_metal_encoder_t encoder) {
    for (auto run = encoder->pending.rbegin(); run != encoder->pending.rend(); ++run) {
        (*run)();
    }
    encoder->pending.clear();
}

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool concurrent) {
    auto * encoder = new ggml_metal_encoder();
    encoder->concurrent = concurrent;
    return encoder;
}
void ggml_metal_encoder_free(ggml_metal_encoder_t encoder) { delete encoder; }
void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t, const char *) {}
void ggml_metal_encoder_debug_group_pop(ggml_metal_encoder_t) {}
void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, ggml_metal_pipeline_with_params pipeline) { encoder->pipeline = pipeline.pipeline; }
void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    encoder->bytes[idx]   = std::make_shared<std::vector<char>>((char *) data, (char *) data + size);
    encoder->buffers[idx] = encoder->bytes[idx]->data();
}
void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, ggml_metal_buffer_id buffer, int idx) {
    encoder->buffers[idx] = (char *) buffer.metal + buffer.offs;
}
void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int) { encoder->memory_bytes = size; }

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    const ggml_metal_encoder now = *encoder;
    encoder->pending.push_back([=] {
        for (const auto & [index, value] : now.pipeline->constants) {
            const auto range = metal_host::constants().equal_range(index);
            for (auto set = range.first; set != range.second; ++set) {
                set->second(value);
            }
        }
        void * buffers[8];
        memcpy(buffers, now.buffers, sizeof(buffers));
        metal_host::launch(*now.pipeline->kernel, {(unsigned) tg0, (unsigned) tg1, (unsigned) tg2},
                           {(unsigned) tptg0, (unsigned) tptg1, (unsigned) tptg2}, now.memory_bytes, buffers);
    });
    if (!encoder->concurrent) {
        flush(encoder);
    }
}
void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t encoder) { flush(encoder); }
void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t encoder) { flush(encoder); }

// --- the device ---

ggml_metal_device_t ggml_metal_device_init(int index, int) {
    auto * device = new ggml_metal_device();
    auto & props  = device->props;
    props.device  = index;
    snprintf(props.name, sizeof(props.name), "MTL%d", index);
    snprintf(props.desc, sizeof(props.desc), "Metal's kernels as host code");
    props.max_buffer_size            = (size_t) 1 << 34;
    props.max_working_set_size       = (size_t) 1 << 34;
    props.max_theadgroup_memory_size = 32768;
    props.has_simdgroup_reduction    = true;
    props.has_simdgroup_mm           = true;
    props.has_unified_memory         = true;
    props.use_shared_buffers         = true;
    props.op_offload_min_batch_size  = 32;
    device->library = new ggml_metal_library{device, ggml_metal_pipelines_init()};
    device->fusion  = ggml_metal_fusion_info_init(true, 0);
    return device;
}
void ggml_metal_device_free(ggml_metal_device_t device) {
    ggml_metal_pipelines_free(device->library->pipelines);
    delete device->library;
    delete device;
}
const char * ggml_metal_device_id_token(enum ggml_metal_device_id) { return "host"; }
ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t device) { return device->library; }
const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t device) {
    device->props.has_simdgroup_mm = has_simdgroup_mm;
    return &device->props;
}
ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t device) { return device->fusion; }
void ggml_metal_device_get_memory(ggml_metal_device_t, size_t * free, size_t * total) { *free = *total = (size_t) 1 << 34; }

// Like the patch of ggml-metal-device.m; for upstream types, products that have a translated kernel.
bool ggml_metal_device_supports_op(ggml_metal_device_t device, const ggml_tensor * op) {
    if (ggml_ext_op_needs_kernels(op)) {
        return has_library && ggml_ext_metal_supports_op(op, device->props.has_simdgroup_reduction);
    }
    if (op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) {
        return ggml_ext_op_names_memory(op);
    }
    const std::string name = std::string("kernel_mul_mv_") + ggml_type_name(op->src[0]->type) + "_f32";
    const int64_t n = op->op == GGML_OP_MUL_MAT ? op->ne[1] : 1;
    return op->src[1]->type == GGML_TYPE_F32 && kernels().count(name) && (n == 1 || n > 8); // 2 to 8: mul_mv_ext
}

struct ggml_metal_event {};
ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t) { return new ggml_metal_event; }
void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t event) { delete event; }
void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

// --- buffers ---

struct ggml_metal_buffer {
    void * base = nullptr;
    size_t size = 0;
    char * mapping = nullptr; // pages; the first and the last are not readable
    size_t mapping_bytes = 0;
};

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t, size_t size, bool) {
    const size_t page = sysconf(_SC_PAGESIZE), used = (size + page)/page*page;
    auto * buffer = new ggml_metal_buffer();
    buffer->mapping_bytes = used + 2*page;
    buffer->mapping = (char *) mmap(nullptr, buffer->mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    GGML_ASSERT(buffer->mapping != MAP_FAILED);
    mprotect(buffer->mapping, page, PROT_NONE);
    mprotect(buffer->mapping + page + used, page, PROT_NONE);
    memset(buffer->mapping + page, 0xa5, used);
    buffer->size = size;
    buffer->base = buffer->mapping + page + (guard_front ? 0 : used - GGML_PAD(size, buffer_alignment));
    return buffer;
}
ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t, void * ptr, size_t size, size_t) {
    auto * buffer = new ggml_metal_buffer();
    buffer->base = ptr;
    buffer->size = size;
    return buffer;
}
void ggml_metal_buffer_free(ggml_metal_buffer_t buffer) {
    if (buffer->mapping) {
        munmap(buffer->mapping, buffer->mapping_bytes);
    }
    delete buffer;
}
void * ggml_metal_buffer_get_base(ggml_metal_buffer_t buffer) { return buffer->base; }
bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t) { return true; }
void ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset((char *) tensor->data + offset, value, size);
}
void ggml_metal_buffer_set_tensor(ggml_metal_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy((char *) tensor->data + offset, data, size);
}
void ggml_metal_buffer_get_tensor(ggml_metal_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}
bool ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t, const ggml_tensor *, ggml_tensor *) { return false; }
void ggml_metal_buffer_clear(ggml_metal_buffer_t buffer, uint8_t value) { memset(buffer->base, value, buffer->size); }
ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buffer, const ggml_tensor * tensor) {
    const size_t offset = (char *) tensor->data - (char *) buffer->base;
    GGML_ASSERT(offset + ggml_nbytes(tensor) <= buffer->size && "tensor outside of its buffer");
    return {buffer->base, offset};
}

// --- the backend's context ---

struct ggml_metal { ggml_metal_device_t device; };

ggml_metal_t ggml_metal_init(ggml_metal_device_t device) { return new ggml_metal{device}; }
void ggml_metal_free(ggml_metal_t ctx) { delete ctx; }
const char * ggml_metal_get_name(ggml_metal_t ctx) { return ctx->device->props.name; }
void ggml_metal_synchronize(ggml_metal_t) {}
void ggml_metal_set_tensor_async(ggml_metal_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy((char *) tensor->data + offset, data, size);
}
void ggml_metal_get_tensor_async(ggml_metal_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}
bool ggml_metal_cpy_tensor_async(ggml_metal_t, ggml_metal_t, const ggml_tensor *, ggml_tensor *) { return false; }
ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, ggml_cgraph * graph) {
    ggml_metal_op_t op = ggml_metal_op_init(ctx->device, nullptr, graph, ctx->device->fusion, 0, graph->n_nodes, true, false, 0);
    for (int i = 0; i < ggml_metal_op_n_nodes(op);) {
        i += ggml_metal_op_encode(op, i);
    }
    ggml_metal_op_free(op);
    return GGML_STATUS_SUCCESS;
}
void ggml_metal_graph_optimize(ggml_metal_t, ggml_cgraph * graph) { ggml_graph_optimize(graph); }
void ggml_metal_event_record(ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_event_wait(ggml_metal_t, ggml_metal_event_t) {}
ggml_metal_event_t ggml_metal_get_ev_cpy(ggml_metal_t) { return nullptr; }
void ggml_metal_set_n_cb(ggml_metal_t, int) {}
void ggml_metal_set_abort_callback(ggml_metal_t, ggml_abort_callback, void *) {}
bool ggml_metal_supports_family(ggml_metal_t, int) { return false; }
void ggml_metal_capture_next_compute(ggml_metal_t) {}

// --- for Python ---

static std::vector<ggml_backend_buffer_t> buffers; // of the last call of metal_host_compute()

static ggml_backend_dev_t host_device() { return ggml_backend_reg_dev_get(ggml_backend_metal_reg(), 0); }

extern "C" {

void metal_host_set(int order, int broken_barrier, bool front, bool library, bool simdgroup_mm) {
    metal_host::order          = order;
    metal_host::broken_barrier = broken_barrier;
    guard_front      = front;
    has_library      = library;
    has_simdgroup_mm = simdgroup_mm;
}

// Get up to n source lines of the barriers passed since the last call. Returns their number.
int metal_host_barriers(int * lines, int n) {
    int count = 0;
    for (const auto & [line, n_passed] : metal_host::barriers) {
        if (count < n) {
            lines[count++] = line;
        }
    }
    metal_host::barriers.clear();
    return count;
}

// Names of all kernels, or of the used ones, one per line.
const char * metal_host_kernels(bool used) {
    static std::string names;
    names.clear();
    if (used) {
        for (const auto & name : used_kernels) {
            names += name + "\n";
        }
    } else {
        for (const auto & kernel : kernels()) {
            names += kernel.first + "\n";
        }
    }
    return names.c_str();
}

bool metal_host_supports(const ggml_tensor * op) { return ggml_backend_dev_supports_op(host_device(), op); }

size_t metal_host_alloc_size(const ggml_tensor * op) {
    return ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(host_device()), op);
}

// Compute a graph with each tensor in its own buffer. data: contents of the leaves; nodes may be views. Returns false if the backend
// does not support a node.
bool metal_host_compute(ggml_tensor ** leaves, const void ** data, int n_leaves, ggml_tensor ** nodes, int n_nodes, ggml_cgraph * graph) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(host_device());
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_free(buffer);
    }
    buffers.clear();
    const auto allocate = [&](ggml_tensor * tensor) {
        buffer_alignment = ggml_is_quantized(tensor->type) ? 2 : 32; // blocks need 2, upstream's buffers have 32
        buffers.push_back(ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, tensor)));
        ggml_backend_tensor_alloc(buffers.back(), tensor, ggml_backend_buffer_get_base(buffers.back()));
    };
    for (int i = 0; i < n_leaves; ++i) {
        allocate(leaves[i]);
        ggml_backend_tensor_set(leaves[i], data[i], 0, ggml_nbytes(leaves[i]));
    }
    bool supported = true;
    for (int i = 0; i < n_nodes; ++i) {
        if (nodes[i]->view_src) {
            ggml_backend_view_init(nodes[i]);
        } else {
            allocate(nodes[i]);
        }
        supported = supported && metal_host_supports(nodes[i]);
    }
    if (supported) {
        ggml_backend_t backend = ggml_backend_dev_init(host_device(), nullptr);
        supported = ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS;
        ggml_backend_free(backend);
    }
    return supported;
}

void metal_host_read(const ggml_tensor * tensor, void * out) { ggml_backend_tensor_get(tensor, out, 0, ggml_nbytes(tensor)); }

} // extern "C"
