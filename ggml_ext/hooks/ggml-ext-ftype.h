// What the loader's log and llama_model_desc() call a file of our types. general.file_type says which type was asked for;
// rows that it does not fit, mixed files and overrides decide what the file holds, so the bits are counted here.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cctype>
#include <cstdio>
#include <cstring>
#include <string>

// The recipe of a mixed file, "ITQ3_T_M", from the key that the quantizer writes; empty if there is none for this type.
static inline std::string ggml_ext_recipe_name(const gguf_context * metadata, enum ggml_type type) {
    const int64_t key = gguf_find_key(metadata, "ggml_ext.type");
    if (key < 0 || gguf_get_kv_type(metadata, key) != GGUF_TYPE_STRING) {
        return "";
    }
    std::string recipe = gguf_get_val_str(metadata, key);
    if (recipe.size() > 32 || recipe.rfind(std::string(ggml_type_name(type)) + "_", 0) != 0) { // llama-quantize keeps old keys
        return "";
    }
    for (char & c : recipe) {
        if (!isalnum((unsigned char) c) && c != '_') {
            return "";
        }
        c = (char) toupper((unsigned char) c);
    }
    return recipe;
}

// "ITQ3_T - 3.0625 bpw" where the matrices of the blocks are of the file's type, whatever embeddings and output are, as for
// stock types, and "ITQ3_T - 3.14 bpw" where some or all are ITQ3_T64, the same code for rows that the type does not fit;
// otherwise "ITQ3_T, mixed - 4.14 bpw, 5.07 in all" or "ITQ3_T_M - 3.30 bpw, 3.92 in all": bits a weight of the matrices of
// the blocks and of all tensors.
// name: that of the enum, perhaps with a prefix; weights: the loader's map of names to what has a tensor.
template <typename Weights>
std::string ggml_ext_ftype_name(const std::string & name, int ftype, const Weights & weights, const gguf_context * metadata) {
    const char * title = nullptr;
    enum ggml_type type = GGML_TYPE_COUNT; // ids of files and tensors are the same
    switch (ftype) {
#define X(NAME, name_) case GGML_TYPE_##NAME: type = GGML_TYPE_##NAME; title = GGML_EXT_##NAME##_TITLE; break;
        GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return name; // a stock type
    }

    const std::string in_64 = std::string(ggml_type_name(type)) + "64";
    double bits = 0, bits_of_type = 0, n_weights = 0, bits_all = 0, n_weights_all = 0;
    bool   others = false, shorter = false;
    for (const auto & it : weights) {
        const ggml_tensor * tensor = it.second.tensor;
        const std::string & tensor_name = it.first;
        bits_all      += 8.0*ggml_nbytes(tensor);
        n_weights_all += ggml_nelements(tensor);
        const bool is_weight = tensor_name.size() > 6 && tensor_name.compare(tensor_name.size() - 6, 6, "weight") == 0;
        if (is_weight && ggml_n_dims(tensor) >= 2 && tensor_name.find("blk.") != std::string::npos) { // as Plan.blocks_bpw()
            const bool is_shorter = in_64 == ggml_type_name(tensor->type);
            const enum ggml_type of_type = is_shorter ? tensor->type : type;
            bits         += 8.0*ggml_nbytes(tensor);
            bits_of_type += 8.0*ggml_type_size(of_type)/ggml_blck_size(of_type)*ggml_nelements(tensor);
            n_weights    += ggml_nelements(tensor);
            others  = others || (ggml_is_quantized(tensor->type) && tensor->type != of_type);
            shorter = shorter || is_shorter;
        }
    }
    if (n_weights == 0) {
        return name;
    }
    const std::string prefix = name.substr(0, name.size() - strcspn(title, " "));
    char text[64];
    // small matrices that stay in floats, such as expert routing, add some thousandths
    if (!others && bits < 1.01*bits_of_type) {
        snprintf(text, sizeof(text), " - %.2f bpw", bits/n_weights);
        return shorter ? name + text : prefix + title;
    }
    const std::string recipe = ggml_ext_recipe_name(metadata, type);
    snprintf(text, sizeof(text), " - %.2f bpw, %.2f in all", bits/n_weights, bits_all/n_weights_all);
    return (recipe.empty() ? name + ", mixed" : prefix + recipe) + text;
}
