// Where backends are looked for, for ggml-backend-reg.cpp.
#pragma once

#include <filesystem>

#ifndef _WIN32
#include <dlfcn.h>
#endif

// The folder of the library that this is compiled into: its backends lie beside it, also where another folder's program has loaded it,
// as Python does for llama-cpp-python. `otherwise` where that cannot be found out.
static std::filesystem::path ggml_ext_library_folder(const std::filesystem::path & otherwise) {
#ifndef _WIN32
    Dl_info info;
    if (dladdr(reinterpret_cast<const void *>(&ggml_ext_library_folder), &info) && info.dli_fname) {
        const auto folder = std::filesystem::path(info.dli_fname).parent_path();
        if (!folder.empty()) {
            return folder;
        }
    }
#endif
    return otherwise;
}
