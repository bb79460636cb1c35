// The name of a file of ggml-ext types in the loader's log and in llama_model_desc(). general.file_type has only the requested type;
// fallbacks, quant mixes and overrides change the content, so the bits are counted here.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cctype>
#include <cstdio>
#include <cstring>
#include <string>

// The quant mix, such as "ITQ3_T_M", from the key that the quantizer writes; empty if the key does not match the type.
static inline std::string ggml_ext_recipe_name(const gguf_context * metadata, enum ggml_type type) {
    const int64_t key = gguf_find_key(metadata, "ggml_ext.type");
    if (key < 0 || gguf_get_kv_type(metadata, key) != GGUF_TYPE_STRING) {
        return "";
    }
    std::string recipe = gguf_get_val_str(metadata, key);
    if (recipe.size() > 32 || recipe.rfind(std::string(ggml_type_name(type)) + "_", 0) != 0) { // llama-quantize copies keys of its source
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

// Whether a type is another one in shorter blocks: ITQ3_T64 and ITQ3_T32 for ITQ3_T, ITQ3_T32 for ITQ3_T64.
static inline bool ggml_ext_is_shorter(enum ggml_type type, enum ggml_type of) {
    const std::string name = ggml_type_name(type), longer = ggml_type_name(of);
    const std::string code = longer.substr(0, longer.find("64"));
    return (name == code + "64" || name == code + "32") && ggml_blck_size(type) < ggml_blck_size(of);
}

// Describe a file:
//   "ITQ3_T - 3.0625 bpw"                     all block weights have the file's type
//   "ITQ3_T - 3.14 bpw"                       some of them have ITQ3_T64 or ITQ3_T32 instead, for rows that ITQ3_T does not fit
//   "ITQ3_T, mixed - 4.14 bpw, 5.07 in all"   they have other types too: bits per weight of the blocks and of all tensors
//   "ITQ3_T_M - 3.30 bpw, 3.92 in all"        a quant mix
// name: the enum's, possibly with a prefix; weights: the loader's map from names to objects with a tensor.
template <typename Weights>
std::string ggml_ext_ftype_name(const std::string & name, int ftype, const Weights & weights, const gguf_context * metadata) {
    const char * title = nullptr;
    enum ggml_type type = GGML_TYPE_COUNT; // file types have the ids of tensor types
    switch (ftype) {
#define X(NAME, name_) case GGML_TYPE_##NAME: type = GGML_TYPE_##NAME; title = GGML_EXT_##NAME##_TITLE; break;
        GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return name; // an upstream type
    }

    double bits = 0, bits_expected = 0, n_weights = 0, bits_all = 0, n_weights_all = 0;
    bool   has_other_types = false, has_shorter = false;
    for (const auto & it : weights) {
        const ggml_tensor * tensor = it.second.tensor;
        const std::string & tensor_name = it.first;
        bits_all      += 8.0*ggml_nbytes(tensor);
        n_weights_all += ggml_nelements(tensor);
        const bool is_weight = tensor_name.size() > 6 && tensor_name.compare(tensor_name.size() - 6, 6, "weight") == 0;
        if (is_weight && ggml_n_dims(tensor) >= 2 && tensor_name.find("blk.") != std::string::npos) { // like Plan.blocks_bpw()
            const bool is_shorter = ggml_ext_is_shorter(tensor->type, type);
            const enum ggml_type expected_type = is_shorter ? tensor->type : type;
            bits          += 8.0*ggml_nbytes(tensor);
            bits_expected += 8.0*ggml_type_size(expected_type)/ggml_blck_size(expected_type)*ggml_nelements(tensor);
            n_weights     += ggml_nelements(tensor);
            has_other_types = has_other_types || (ggml_is_quantized(tensor->type) && tensor->type != expected_type);
            has_shorter = has_shorter || is_shorter;
        }
    }
    if (n_weights == 0) {
        return name;
    }
    const std::string prefix = name.substr(0, name.size() - strcspn(title, " "));
    char text[64];
    // 1 %: small matrices that stay in floats, such as expert routing
    if (!has_other_types && bits < 1.01*bits_expected) {
        snprintf(text, sizeof(text), " - %.2f bpw", bits/n_weights);
        return has_shorter ? name + text : prefix + title;
    }
    const std::string recipe = ggml_ext_recipe_name(metadata, type);
    snprintf(text, sizeof(text), " - %.2f bpw, %.2f in all", bits/n_weights, bits_all/n_weights_all);
    return (recipe.empty() ? name + ", mixed" : prefix + recipe) + text;
}
