// Run a part of a model's graph: libllama calls ggml_ext_cut_graph() after building a graph (ggml_ext/streams/graph-cut.cpp).
#pragma once

#include <functional>

#include "llama.h"

class llm_graph_result;
struct ggml_cgraph;

// Edits a graph before its memory is allocated. Returns a function that fills the inputs it added, to call after allocation.
using ggml_ext_graph_cut = std::function<std::function<void()>(ggml_cgraph * graph)>;

// Set the cut for all contexts of the process; an empty one (the default) disables it.
LLAMA_API void ggml_ext_set_graph_cut(ggml_ext_graph_cut cut);

void ggml_ext_cut_graph(llm_graph_result & result);
