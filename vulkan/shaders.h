// ggml-ext shaders. vulkan-shaders-gen.cpp includes this before its list of types.
#include "ggml-ext-types.h"

#define GGML_EXT_SHADER_NAME(NAME, name) #name,

static bool is_ggml_ext(const std::string & type) {
    for (const char * name : {GGML_EXT_WEIGHT_TYPES(GGML_EXT_SHADER_NAME)}) {
        if (type == name) {
            return true;
        }
    }
    return false;
}

namespace { // upstream defines it below
void string_to_spv(std::string name, const std::string & source, const std::map<std::string, std::string> & defines, bool fp16, bool coopmat,
                   bool coopmat2, bool f16acc, const std::string & suffix);
}

static void ggml_ext_shader(const std::string & name, const std::string & source, std::map<std::string, std::string> defines) {
    defines.insert({{"FLOAT_TYPE", "float"}, {"FLOAT_TYPEV2", "vec2"}});
    string_to_spv(name, source, defines, true, false, false, false, "");
}

// mul_mat_vec and get_rows of one type. Upstream's loops compile mul_mm.
static void ggml_ext_shaders(const std::string & type, const std::string & data_a_key) {
    for (const std::string reduction : {"", "_subgroup", "_subgroup_no_shmem"}) {
        std::map<std::string, std::string> defines = {{data_a_key, "1"}, {"D_TYPE", "float"}};
        if (!reduction.empty()) {
            defines[reduction == "_subgroup" ? "USE_SUBGROUP_ADD" : "USE_SUBGROUP_ADD_NO_SHMEM"] = "1";
        }
        for (const std::string id : {"", "id_"}) {
            const std::string name = "mul_mat_vec_" + id + type;
            std::map<std::string, std::string> floats = {{"B_TYPE", "float"}, {"B_TYPEV2", "vec2"}, {"B_TYPEV4", "vec4"}};
            floats.insert(defines.begin(), defines.end());
            ggml_ext_shader(name + "_f32_f32" + reduction, "ggml_ext_mul_mat_vec.comp", floats);
            if (reduction != "_subgroup") { // upstream's tables list it, but no pipeline uses it
                std::map<std::string, std::string> integers = {{"EXT_INTEGER", "1"}, {"B_TYPE", "ext_q8"}};
                integers.insert(defines.begin(), defines.end());
                ggml_ext_shader(name + "_q8_1_f32" + reduction, "ggml_ext_mul_mat_vec.comp", integers);
            }
            defines["MUL_MAT_ID"] = "1";
        }
    }
    ggml_ext_shader("get_rows_" + type,          "ggml_ext_get_rows.comp", {{data_a_key, "1"}, {"B_TYPE", "int"}, {"D_TYPE", "float16_t"}});
    ggml_ext_shader("get_rows_" + type + "_f32", "ggml_ext_get_rows.comp", {{data_a_key, "1"}, {"B_TYPE", "int"}, {"D_TYPE", "float"}});
}

// mul_mmq of one type: its tiles hold scales as floats, and those of the activations as they are in memory (mul_mmq.glsl)
static void ggml_ext_mmq_shader(const std::string & matmul, const std::string & type, const std::string & data_a_key,
                                std::map<std::string, std::string> defines) {
    defines.insert({{data_a_key, "1"}, {"EXT_INTEGER", "1"}, {"D_TYPE", "float"}, {"FLOAT_TYPEV2", "uint"}});
    ggml_ext_shader(matmul + "_" + type + "_q8_1", "mul_mmq.comp", defines);
}

// Copies of activations: to F32 for mul_mat_vec (rotated types only), to F16 for mul_mm, to integers.
static void ggml_ext_activation_shaders() {
    for (const auto & [name, block, rotation] : {std::array<const char *, 3>{"rotate_32", "32", "32"}, {"rotate_64", "64", "64"}, {"rotate_256", "256", "256"},
                                                 {"copy_256", "256", "0"}}) {
        const std::string prefix = std::string("ggml_ext_") + name;
        const std::map<std::string, std::string> defines = {{"EXT_BLOCK", block}, {"EXT_ROTATION", rotation}, {"A_TYPE", "float"}};
        const auto compile = [&](const char * type, std::map<std::string, std::string> more) {
            more.insert(defines.begin(), defines.end());
            ggml_ext_shader(prefix + type, "ggml_ext_rotate.comp", more);
        };
        if (rotation != std::string("0")) {
            compile("_f32", {{"D_TYPE", "float"}});
        }
        compile("_f16",  {{"D_TYPE", "float16_t"}, {"EXT_ORDER", "1"}});
        compile("_q8_1", {{"D_TYPE", "ext_q8"}, {"EXT_QUANTIZE", "1"}});
    }
}
