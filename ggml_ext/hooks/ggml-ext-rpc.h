// Included in the middle of ggml-rpc.cpp, whose messages this uses. Upstream's client says yes to every operation, and a
// server whose device lacks kernels for it aborts. For our types, which most devices lack, the client asks:
// RPC_CMD_GET_ALLOC_SIZE carries a whole operation, and our server answers "0 bytes" to one that its device refuses.
#pragma once

#include "ggml-ext-supports.h"

#include <map>

// Answers are kept per operation and types, not per shape: a question in the middle of a run waits for all work of the server.
static bool ggml_ext_rpc_supports_op(const std::string & endpoint, uint32_t device, const ggml_tensor * op) {
    static std::mutex mutex;
    static std::map<std::pair<std::string, std::vector<uint32_t>>, bool> answers;

    std::vector<uint32_t> question = { device, (uint32_t) op->op, (uint32_t) op->type };
    for (const ggml_tensor * src : op->src) {
        question.push_back(src ? src->type : GGML_TYPE_COUNT);
    }
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = answers.find({ endpoint, question });
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
    return answers[{ endpoint, question }] = response.alloc_size != 0;
}
