// LoRA adapters of a model with column scales (py/ggml_ext/_formats/column_scales.py). The file holds W' = diag(1/r) W diag(s), so that an adapter
// B A of W becomes diag(1/r) B A diag(s). The model's metadata have a line per tensor and axis: the name, "columns" for s or "rows" for r, and a
// character per value, 2^((code - 79) / 8).
#pragma once

#include "ggml-backend.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#define GGML_EXT_COLUMN_SCALES "ggml_ext.column_scales"
#define GGML_EXT_SCALED_FOR "ggml_ext.scaled_for" // of an adapter with scales: the hash of those of its model

// FNV-1a, 64 bits, as 16 hexadecimal digits.
inline std::string ggml_ext_hash(const std::string & text) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const unsigned char c : text) {
        hash = (hash ^ c) * 0x100000001b3;
    }
    char digits[17];
    snprintf(digits, sizeof(digits), "%016llx", (unsigned long long) hash);
    return digits;
}

// Multiply the elements of a row by scales of the columns, or each row by the inverse of its scale.
inline void ggml_ext_scale_rows(ggml_tensor * t, const std::string & powers, bool by_column) {
    if ((int64_t) powers.size() != t->ne[by_column ? 0 : 1]) {
        throw std::runtime_error(std::string("the column scales of the model do not fit ") + t->name);
    }
    const ggml_type_traits * traits = ggml_get_type_traits(t->type);
    if (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_BF16) {
        throw std::runtime_error(std::string("the model has column scales, which adapters need in f32, f16 or bf16, but ") + t->name + " is " +
                                 ggml_type_name(t->type));
    }
    const int64_t        n = t->ne[0];
    std::vector<uint8_t> data(ggml_nbytes(t));
    std::vector<float>   row(n);
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    for (int64_t i = 0; i < ggml_nrows(t); ++i) {
        uint8_t * stored = data.data() + i * t->nb[1];
        const auto scale = [&](int64_t j) { return std::exp2(((unsigned char) powers[j] - 79) / 8.0f); };
        if (t->type == GGML_TYPE_F32) {
            std::copy((float *) stored, (float *) stored + n, row.begin());
        } else {
            traits->to_float(stored, row.data(), n);
        }
        for (int64_t j = 0; j < n; ++j) {
            row[j] = by_column ? row[j] * scale(j) : row[j] / scale(i);
        }
        if (t->type == GGML_TYPE_F32) {
            std::copy(row.begin(), row.end(), (float *) stored);
        } else {
            traits->from_float_ref(row.data(), stored, n);
        }
    }
    ggml_backend_tensor_set(t, data.data(), 0, data.size());
}

// Scale the weights of an adapter, by the name of the model's tensor, for a model with these metadata.
template <class Weights>
void ggml_ext_scale_adapter(const std::unordered_map<std::string, std::string> & model, const std::unordered_map<std::string, std::string> & adapter,
                            const Weights & weights) {
    const auto entry = model.find(GGML_EXT_COLUMN_SCALES), scaled_for = adapter.find(GGML_EXT_SCALED_FOR);
    if (scaled_for != adapter.end() && (entry == model.end() || scaled_for->second != ggml_ext_hash(entry->second))) {
        throw std::runtime_error("the adapter was converted for a model with other column scales: pass the adapter of the original model");
    }
    if (entry == model.end() || scaled_for != adapter.end()) {
        return;
    }
    std::istringstream lines(entry->second);
    for (std::string name, axis, powers; lines >> name >> axis >> powers;) {
        const auto weight = weights.find(name);
        if (weight != weights.end()) {
            ggml_ext_scale_rows(axis == "columns" ? weight->second.a : weight->second.b, powers, axis == "columns");
        }
    }
}
