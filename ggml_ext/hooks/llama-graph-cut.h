// Running a part of a model's graph: what libllama calls once a graph is built (ggml_ext/streams/graph-cut.cpp).
#pragma once

#include <functional>

#include "llama.h"

class llm_graph_result;
struct ggml_cgraph;

// Edits a graph before memory is found for it, and returns what fills the inputs that it made, to be called when they have memory.
using ggml_ext_graph_cut = std::function<std::function<void()>(ggml_cgraph * graph)>;

// For all contexts of the process. An empty cut (the default) leaves graphs as they are.
LLAMA_API void ggml_ext_set_graph_cut(ggml_ext_graph_cut cut);

void ggml_ext_cut_graph(llm_graph_result & result);
