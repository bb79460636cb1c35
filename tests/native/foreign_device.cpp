// A device that says yes to every operation, as a backend may that knows nothing of our types: what ggml makes of its answers. And for what
// the client of an RPC server keeps them.
#include "ggml-ext-rpc-support-key.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

static const char * registry_name;

extern "C" {

// Whether a device of a registry with that name, or of none (NULL), may multiply weights of a type.
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
    const bool found = ggml_backend_dev_supports_op(&device, product);
    ggml_free(ctx);
    return found;
}

// Whether a view of such weights may lie there.
bool foreign_device_views(const char * name, int type) {
    registry_name = name;
    ggml_backend_reg reg = {};
    reg.iface.get_name = [](ggml_backend_reg_t) { return registry_name; };
    ggml_backend_device device = {};
    device.reg = &reg;
    device.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    ggml_context * ctx = ggml_init({ 1 << 16, nullptr, true });
    ggml_tensor * weights = ggml_new_tensor_2d(ctx, (ggml_type) type, 256, 4);
    const bool found = ggml_backend_dev_supports_op(&device, ggml_view_2d(ctx, weights, 256, 2, weights->nb[1], 0));
    ggml_free(ctx);
    return found;
}

// Whether a product is asked about again after another one, both by weights [columns][rows] and tokens.
bool rpc_asks_again(int type, const int64_t * known, const int64_t * asked) {
    ggml_context * ctx = ggml_init({ 1 << 16, nullptr, true });
    const auto question = [&](const int64_t * of) {
        ggml_tensor * weights = ggml_new_tensor_2d(ctx, (ggml_type) type, of[0], of[1]);
        return ggml_ext_rpc_support_key(0, ggml_mul_mat(ctx, weights, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, of[0], of[2])));
    };
    const bool again = question(known) != question(asked);
    ggml_free(ctx);
    return again;
}

}
