// Included in the middle of ggml-rpc.cpp, whose messages this uses. Upstream's client says yes to every operation, and a
// server whose device lacks kernels for it aborts. For our types, which most devices lack, the client asks:
// RPC_CMD_GET_ALLOC_SIZE carries a whole operation, and our server answers "0 bytes" to one that its device refuses.
#pragma once

#include "ggml-ext-rpc-question.h"

#include <map>

static bool ggml_ext_rpc_supports_op(const std::string & endpoint, uint32_t device, const ggml_tensor * op) {
    static std::mutex mutex;
    static std::map<std::pair<std::string, std::vector<int64_t>>, bool> answers;

    const std::pair<std::string, std::vector<int64_t>> question = { endpoint, ggml_ext_rpc_question(device, op) };
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = answers.find(question);
    if (known != answers.end()) {
        return known->second;
    }

    // without buffers: the tensors may have none yet, or lie in those of another device
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
    return answers[question] = response.alloc_size != 0;
}
