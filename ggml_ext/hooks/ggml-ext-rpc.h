// Included in the middle of ggml-rpc.cpp, whose messages it uses. Upstream's client accepts every operation, and a server whose
// device lacks a kernel aborts. For ggml-ext types the client asks first: RPC_CMD_GET_ALLOC_SIZE carries a complete operation, and
// our server answers 0 bytes if its device refuses it.
#pragma once

#include "ggml-ext-rpc-support-key.h"

#include <map>

static bool ggml_ext_rpc_supports_op(const std::string & endpoint, uint32_t device, const ggml_tensor * op) {
    static std::mutex mutex;
    static std::map<std::pair<std::string, std::vector<int64_t>>, bool> answers;

    const std::pair<std::string, std::vector<int64_t>> key = { endpoint, ggml_ext_rpc_support_key(device, op) };
    std::lock_guard<std::mutex> lock(mutex);
    const auto entry = answers.find(key);
    if (entry != answers.end()) {
        return entry->second;
    }

    // no buffers: a tensor may have none yet, or that of another device
    const auto describe = [](const ggml_tensor * tensor) {
        rpc_tensor result = serialize_tensor(tensor);
        result.buffer = 0;
        result.data   = 0;
        return result;
    };
    auto request = std::make_shared<rpc_msg_get_alloc_size_req>();
    request->device = device;
    request->tensor = describe(op);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        request->srcs[i] = describe(op->src[i]);
    }
    rpc_msg_get_alloc_size_rsp response;
    get_dispatcher(endpoint)->send(RPC_CMD_GET_ALLOC_SIZE, request, sizeof(*request), &response, sizeof(response));
    return answers[key] = response.alloc_size != 0;
}
