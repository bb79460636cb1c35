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
        std::map<std::string, std::string> defines = {{data_a_key, "1"}, {"B_TYPE", "float"}, {"B_TYPEV2", "vec2"}, {"B_TYPEV4", "vec4"}, {"D_TYPE", "float"}};
        if (!reduction.empty()) {
            defines[reduction == "_subgroup" ? "USE_SUBGROUP_ADD" : "USE_SUBGROUP_ADD_NO_SHMEM"] = "1";
        }
        ggml_ext_shader("mul_mat_vec_" + type + "_f32_f32" + reduction, "ggml_ext_mul_mat_vec.comp", defines);
        defines["MUL_MAT_ID"] = "1";
        ggml_ext_shader("mul_mat_vec_id_" + type + "_f32_f32" + reduction, "ggml_ext_mul_mat_vec.comp", defines);
    }
    ggml_ext_shader("get_rows_" + type,          "ggml_ext_get_rows.comp", {{data_a_key, "1"}, {"B_TYPE", "int"}, {"D_TYPE", "float16_t"}});
    ggml_ext_shader("get_rows_" + type + "_f32", "ggml_ext_get_rows.comp", {{data_a_key, "1"}, {"B_TYPE", "int"}, {"D_TYPE", "float"}});
}

static void ggml_ext_activation_shaders() {
    for (const std::string block : {"32", "64", "256"}) {
        ggml_ext_shader("ggml_ext_rotate_" + block + "_f32", "ggml_ext_rotate.comp", {{"EXT_ROTATION", block}, {"A_TYPE", "float"}, {"D_TYPE", "float"}});
        ggml_ext_shader("ggml_ext_rotate_" + block + "_f16", "ggml_ext_rotate.comp", {{"EXT_ROTATION", block}, {"EXT_ORDER", block}, {"A_TYPE", "float"}, {"D_TYPE", "float16_t"}});
    }
    ggml_ext_shader("ggml_ext_reorder_256_f16", "ggml_ext_reorder.comp", {{"EXT_ORDER", "256"}, {"A_TYPE", "float"}, {"D_TYPE", "float16_t"}});
}
