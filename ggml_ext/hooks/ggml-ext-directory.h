// For ggml-backend-reg.cpp: the directory to search for backends.
#pragma once

#include <filesystem>

#ifndef _WIN32
#include <dlfcn.h>
#endif

// Get the directory of the library that contains this function, or `fallback` if unknown. Its backends are next to it, even if the
// program is elsewhere, as Python is for llama-cpp-python.
static std::filesystem::path ggml_ext_library_directory(const std::filesystem::path & fallback) {
#ifndef _WIN32
    Dl_info info;
    if (dladdr(reinterpret_cast<const void *>(&ggml_ext_library_directory), &info) && info.dli_fname) {
        const auto directory = std::filesystem::path(info.dli_fname).parent_path();
        if (!directory.empty()) {
            return directory;
        }
    }
#endif
    return fallback;
}
