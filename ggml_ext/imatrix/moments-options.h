// Options of llama-imatrix, kept out of common_params so that common.h is unchanged.
#pragma once

#include <string>

struct ggml_ext_moments_options {
    std::string kind;        // --moments: "block" or "full"; empty: none
    std::string layers;      // --layers: "A-B"; empty: all
    int         columns = 0; // --moments-columns; 0: no limit
    bool        mtp_layers = false; // --mtp-layers: load them, and collect their inputs
};

ggml_ext_moments_options & ggml_ext_get_moments_options(); // in common/arg.cpp
