"""Generated from ggml_ext/upstream.toml by scripts/build/gen_types.py; do not edit.

The pinned llama.cpp.
"""

LLAMA_CPP_VERSION = "0.5.0-dev"
GGML_VERSION = "0.25.3"
