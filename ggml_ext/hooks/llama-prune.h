// Update the metadata about layers for --prune-layers of llama-quantize. Upstream only sets block_count, and a file with arrays of one
// value per layer does not load (docs/maintaining/upstream-bugs.md).
#pragma once

#include "gguf.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

// metadata: still with the old block_count; pruned: layer indices.
static void ggml_ext_prune_metadata(gguf_context * metadata, const std::string & arch, const std::vector<int> & pruned) {
    const auto is_kept = [&](size_t il) { return std::find(pruned.begin(), pruned.end(), (int) il) == pruned.end(); };
    const auto get_u32 = [&](const std::string & key) -> uint32_t {
        const int64_t id = gguf_find_key(metadata, key.c_str());
        return id >= 0 && gguf_get_kv_type(metadata, id) == GGUF_TYPE_UINT32 ? gguf_get_val_u32(metadata, id) : 0;
    };
    // reduce a count of layers, at the start of the model or ending at layer `end`
    const auto shorten = [&](const std::string & key, uint32_t end = 0) {
        const uint32_t n = get_u32(key), first = end > n ? end - n : 0;
        uint32_t n_kept = 0;
        for (uint32_t i = 0; i < n; ++i) {
            n_kept += is_kept(first + i);
        }
        if (n_kept < n) {
            gguf_set_val_u32(metadata, key.c_str(), n_kept);
        }
    };
    const uint32_t n_all = get_u32(arch + ".block_count"), n_nextn = get_u32(arch + ".nextn_predict_layers"), n_layer = n_all - std::min(n_all, n_nextn);

    std::vector<std::string> keys; // setting a value reorders keys
    for (int64_t id = 0; id < gguf_get_n_kv(metadata); ++id) {
        keys.push_back(gguf_get_key(metadata, id));
    }
    for (const std::string & key : keys) {
        const int64_t id = gguf_find_key(metadata, key.c_str());
        // dimension_sections always has four values
        if (key.rfind(arch + ".", 0) != 0 || key == arch + ".rope.dimension_sections" || gguf_get_kv_type(metadata, id) != GGUF_TYPE_ARRAY) {
            continue;
        }
        const size_t    n    = gguf_get_arr_n(metadata, id);
        const gguf_type type = gguf_get_arr_type(metadata, id);
        const size_t    size = type == GGUF_TYPE_BOOL ? 1 : type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32 || type == GGUF_TYPE_FLOAT32 ? 4 : 0;
        if (size == 0 || (n != n_all && n != n_layer)) {
            continue;
        }
        const char *      data = (const char *) gguf_get_arr_data(metadata, id);
        std::vector<char> kept;
        for (size_t il = 0; il < n; ++il) {
            if (is_kept(il)) {
                kept.insert(kept.end(), data + il*size, data + (il + 1)*size);
            }
        }
        gguf_set_arr_data(metadata, key.c_str(), type, kept.data(), kept.size()/size);
    }
    shorten(arch + ".leading_dense_block_count");
    shorten(arch + ".hash_layer_count");
    shorten(arch + ".attention.shared_kv_layers", n_all);
    shorten(arch + ".nextn_predict_layers", n_all);
}
