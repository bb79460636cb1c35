// A device that accepts every operation, as a backend without knowledge of the ggml-ext types may: does ggml correct its answers, and does an
// RPC client cache them?
#include "ggml-ext-rpc-support-key.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

static const char * registry_name;

extern "C" {

// Return whether a device of the named registry, or of none (NULL), may multiply weights of a type.
bool foreign_device_multiplies(const char * name, int type) {
    registry_name = name;
    ggml_backend_reg reg = {};
    reg.iface.get_name = [](ggml_backend_reg_t) { return registry_name; };
    ggml_backend_device device = {};
    device.reg = name ? &reg : nullptr;
    device.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };

    ggml_context * ctx = ggml_init({ 1 << 16, nullptr, true });
    ggml_tensor * weights = ggml_new_tensor_2d(ctx, (ggml_type) type, 256, 4);
    ggml_tensor * product = ggml_mul_mat(ctx, weights, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, 2));
    const bool supported = ggml_backend_dev_supports_op(&device, product);
    ggml_free(ctx);
    return supported;
}

// Return whether a view of such weights may be on the device.
bool foreign_device_views(const char * name, int type) {
    registry_name = name;
    ggml_backend_reg reg = {};
    reg.iface.get_name = [](ggml_backend_reg_t) { return registry_name; };
    ggml_backend_device device = {};
    device.reg = &reg;
    device.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    ggml_context * ctx = ggml_init({ 1 << 16, nullptr, true });
    ggml_tensor * weights = ggml_new_tensor_2d(ctx, (ggml_type) type, 256, 4);
    const bool supported = ggml_backend_dev_supports_op(&device, ggml_view_2d(ctx, weights, 256, 2, weights->nb[1], 0));
    ggml_free(ctx);
    return supported;
}

// Return whether a product is asked about again after another one; both are given as weights [columns][rows] and tokens.
bool rpc_asks_again(int type, const int64_t * first, const int64_t * second) {
    ggml_context * ctx = ggml_init({ 1 << 16, nullptr, true });
    const auto question = [&](const int64_t * shape) {
        ggml_tensor * weights = ggml_new_tensor_2d(ctx, (ggml_type) type, shape[0], shape[1]);
        return ggml_ext_rpc_support_key(0, ggml_mul_mat(ctx, weights, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, shape[0], shape[2])));
    };
    const bool again = question(first) != question(second);
    ggml_free(ctx);
    return again;
}

}
