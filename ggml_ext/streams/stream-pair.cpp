#include "stream-pair.h"

#include "llama-graph-cut.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <strings.h>

using json = nlohmann::ordered_json;

namespace ggml_ext {

stream_pair::stream_pair(llama_context * ctx, mtp_layers & mtp, overflow_watcher & watcher, std::vector<llama_token> tokens, int n_context,
                         int n_chunks, const std::string & file)
    : ctx(ctx), mtp(mtp), watcher(watcher), tokens(std::move(tokens)), file(file), n_context(n_context), n_chunks(n_chunks),
      n_layers(llama_model_n_layer(llama_get_model(ctx))) {
    ggml_ext_set_graph_cut([this](ggml_cgraph * graph) { return edit_graph(graph); });
    compute(0, NONE);
    for (int i = 0; i < mtp.size() && error.empty(); ++i) {
        layer = n_layers + 1 + i;
        compute(0, NONE);
    }
    layer = 0;
    for (auto & groups : kept_group) {
        groups.resize(n_chunks);
    }
}

stream_pair::~stream_pair() { ggml_ext_set_graph_cut({}); }

json stream_pair::describe() const {
    if (!error.empty()) {
        return { { "error", error } };
    }
    const auto main_end = description.begin() + n_layers + 1;
    return { { "chunks", n_chunks }, { "context", n_context }, { "layers", json(json::array_t(description.begin(), main_end)) },
             { "mtp_layers", json(json::array_t(main_end, description.end())) }, { "no_gradients", gradient_error } };
}

void stream_pair::set_exchange(const std::string & path, size_t n_bytes, bool only_original) {
    for (int model : { ORIGINAL, QUANTIZED }) {
        const bool is_used = !only_original || model == ORIGINAL;
        stream[model] = mapping(file, is_used ? (size_t) n_chunks * chunk_bytes : 1, true);
        selections[model] = mapping(file, std::max<size_t>(1, is_used ? (size_t) n_chunks * selection_bytes : 0), true);
        kept[model]   = mapping(file, std::max<size_t>(1, only_original ? 0 : (size_t) n_chunks * kept_bytes[model]), true);
    }
    exchange = mapping(path, n_bytes, false);
}

void stream_pair::enter_layer(int n) {
    layer             = check_index("layer", n, (int) description.size());
    is_original_ahead = false;
    for (auto & groups : kept_group) {
        std::fill(groups.begin(), groups.end(), 0);
    }
    for (auto it = replacements.begin(); it != replacements.end();) {
        it = it->second->layer < layer && it->second->layer >= 0 ? replacements.erase(it) : std::next(it);
    }
}

void stream_pair::replace_matrix(const std::string & name, const std::string & type, const std::string & path) {
    const auto matrix = matrices.find(name);
    ggml_type  id     = GGML_TYPE_COUNT;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * type_name = ggml_type_name((ggml_type) i); // mixed case, unlike the command line's
        id = type_name && strcasecmp(type.c_str(), type_name) == 0 ? (ggml_type) i : id;
    }
    if (matrix == matrices.end() || id == GGML_TYPE_COUNT) {
        fail("no matrix " + name + ", or no type " + type);
    }
    const int group = find_group(name);
    for (int & g : kept_group[QUANTIZED]) {
        g = g <= group ? g : 0; // what depends on the matrix is computed again
    }
    auto & added = replacements[name] = std::make_unique<replacement>(matrix->second, id, layer_of.at(name));
    added->read(path);
}

// The first group of the layer that uses the matrix, or 0.
int stream_pair::find_group(const std::string & weight) const {
    for (size_t g = 0; g < description[layer].size(); ++g) {
        for (const json & product : description[layer][g]["products"]) {
            if (product["weight"] == weight) {
                return (int) g;
            }
        }
    }
    return 0;
}

// --- running the model -----------------------------------------------------------------------------------------------

// Compute the selected targets of the layer, none behind the inputs of end_group, from the stream of one model.
void stream_pair::run_layer(int chunk, int model, int end_group) {
    layer_input = stream_data(model, chunk);
    run_purpose = purpose::layer;
    start_group = kept_group[model][chunk] < end_group ? kept_group[model][chunk] : 0;
    compute(chunk, model);
}

void stream_pair::compute(int chunk, int model) {
    this->chunk = chunk;
    this->model = model;
    llama_memory_clear(llama_get_memory(ctx), true);
    common_batch batch(ctx);
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
    for (int i = 0; i < n_context; ++i) {
        const bool is_bos = i == 0 && llama_vocab_get_add_bos(vocab); // as llama-imatrix begins its chunks
        batch.add(is_bos ? llama_vocab_bos(vocab) : tokens[(size_t) chunk * n_context + i], i, 0, true);
    }
    if (is_mtp()) {
        const std::vector<float> none(model == NONE ? (size_t) n_context * mtp.n_embd() : 0);
        if (!mtp.run(layer - n_layers - 1, batch, model == NONE ? none.data() : (const float *) layer_input)) {
            fail("llama.cpp cannot run MTP layer " + std::to_string(layer - n_layers - 1));
        }
        llama_synchronize(mtp.context());
    } else if (const int code = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get())) {
        fail("llama_process: " + std::to_string(code));
    }
    llama_synchronize(ctx);
    if (!error.empty() && model != NONE) {
        fail(error);
    }
}

// The graph cut (llama-graph-cut.h): reduce the graph to what the run is for.
std::function<void()> stream_pair::edit_graph(ggml_cgraph * graph) {
    parts = {};
    const bool is_read = is_mtp() ? parts.read(graph, 0, layer - 1) : parts.read(graph, n_layers);
    if (!is_read || (model == NONE && !parts.check())) {
        error = parts.error();
    } else if (model == NONE && is_mtp()) {
        description.push_back(describe_layer(0, layer));
    } else if (model == NONE) {
        read_description();
    }
    if (model == NONE || !error.empty()) {
        parts.cut(-1, {}, {}, {});
        return [] {};
    }
    parts.find_groups(is_mtp() ? 0 : layer);
    if (run_purpose == purpose::full) {
        for (int k = 0; k < n_layers; ++k) {
            const auto kept = parts.outputs(k);
            std::for_each(kept.begin(), kept.end(), keep_value);
        }
        keep_value(parts.nodes(n_layers).back());
        return [] {};
    }
    return cut_layer(graph);
}

std::function<void()> stream_pair::cut_layer(ggml_cgraph * graph) {
    std::map<std::string, ggml_tensor *> weights;
    if (model == ORIGINAL) {
        round_matrices();
    }
    for (const auto & r : model == ORIGINAL ? rounded.all() : replacements) {
        weights[r.first] = r.second->tensor;
    }
    const ggml_ext::layer & current = this->current();
    const int  k     = is_mtp() ? 0 : layer;
    const auto nodes = parts.nodes(k);
    const bool differentiates = run_purpose == purpose::gradients;
    const auto start = parts.find_boundary(k, differentiates ? 0 : start_group);
    start_values     = start.values;
    if (!parts.cut(k, start, differentiates ? std::vector<ggml_tensor *>{ nodes.back() } : select_targets(current), weights)) {
        error = parts.error();
    } else if (differentiates) {
        transpose_matrices();
        back = backward([this](const ggml_tensor * w) { return transposed.find(w); });
        if (!back.build(nodes, current)) {
            error = back.error();
            return [] {};
        }
        back.append(graph);
    }
    separate_plans();
    return [this, input = current.start, differentiates] {
        if (input) {
            ggml_backend_tensor_set(input, layer_input, 0, chunk_bytes);
        }
        set_selections();
        set_kept_values();
        if (differentiates) {
            ggml_backend_tensor_set(back.seed(), seed.data(), 0, seed.size()*sizeof(float));
        }
    };
}

// Whether the CPU multiplies BF16 faster than F16.
static bool has_bf16_products() {
    const auto reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    const auto get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature * f = get ? get(reg) : nullptr; f && f->name; ++f) {
        if (strcmp(f->name, "AVX512_BF16") == 0) {
            return strcmp(f->value, "1") == 0;
        }
    }
    return false;
}

void stream_pair::prefer_bf16() { rounds_matrices = has_bf16_products(); }

// Make the BF16 matrices of the layer that the original model's products use in place of F16. The output matrix is used once only.
void stream_pair::round_matrices() {
    if (rounds_matrices && layer < n_layers) {
        rounded.make(layer, parts.layers()[layer], [this](const ggml_tensor * w) {
            auto made = w->type == GGML_TYPE_F16 ? std::make_unique<replacement>(w, GGML_TYPE_BF16, layer) : nullptr;
            if (made) {
                made->round_from(w);
            }
            return made;
        });
    }
}

// Transpose the matrices of the layer in the type that the products use. The output matrix, which is large, is transposed in the graph.
void stream_pair::transpose_matrices() {
    if (layer < n_layers) {
        transposed.make(layer, parts.layers()[layer], [this](const ggml_tensor * w) {
            const bool is_plain = ggml_n_dims(w) == 2 && (w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16);
            auto made = is_plain ? std::make_unique<replacement>(w, w->type, layer, true) : nullptr;
            if (made) {
                made->transpose_from(w);
            }
            return made;
        });
    }
}

// Make ggml plan the memory of each graph separately. It reuses the plan of the last graph if both have as many nodes and leafs, of the same
// sizes. But a plan also depends on the targets: one for other targets would overwrite them. An input that nothing uses makes the difference.
void stream_pair::separate_plans() {
    if (parts.size() == run_size) {
        unused.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        parts.make_input(ggml_new_tensor_1d(unused.get(), GGML_TYPE_F32, 1));
    }
    run_size = parts.size();
}

static size_t count_bytes(const std::vector<ggml_tensor *> & tensors) {
    return std::accumulate(tensors.begin(), tensors.end(), (size_t) 0, [](size_t n, const ggml_tensor * t) { return n + ggml_nbytes(t); });
}

void stream_pair::read_description() {
    description = json::array();
    for (int k = 0; k < (int) parts.layers().size(); ++k) {
        description.push_back(describe_layer(k, k));
    }
    const ggml_tensor * hidden = find_hidden_state();
    const ggml_tensor * end = parts.layers()[0].end;
    n_embd         = ggml_nelements(end) / n_context;
    chunk_bytes    = ggml_nbytes(end);
    selection_bytes = count_bytes(parts.selections());
    gradient_error = find_gradient_error();
    // the quantized stream begins with the token embeddings
    for (const ggml_tensor * w : parts.embeddings()) {
        matrices.emplace(w->name, w);
        layer_of[w->name] = -1;
    }
    const bool fits = hidden && hidden->type == GGML_TYPE_F32 && ggml_is_contiguous(hidden) && ggml_nbytes(hidden) == chunk_bytes;
    if (mtp.size() && !fits) {
        error = "its MTP layers need other hidden states than the output of the last layer";
    }
}

// Describe the groups of layer k of the graph, and register its weights. number: that of the layer among all. The description of an MTP layer ends
// at the first product with a matrix of the main model: the output matrix.
json stream_pair::describe_layer(int k, int number) {
    parts.find_groups(k);
    const auto is_known = [&](const product & p) { return number > n_layers && matrices.count(p.weight()); };
    json groups = json::array();
    for (const auto & g : parts.layers()[k].groups) {
        if (std::any_of(g.products.begin(), g.products.end(), is_known)) {
            break;
        }
        json products = json::array();
        for (const auto & p : g.products) {
            const ggml_tensor * w = p.node->src[0];
            products.push_back({ { "weight", w->name }, { "rows", w->ne[1] }, { "scale", p.residual ? p.scale : 0.0f } });
        }
        groups.push_back({ { "columns", g.x->ne[0] }, { "inputs", ggml_nelements(g.x) / g.x->ne[0] }, { "used", g.ids ? g.ids->ne[0] : 0 },
                           { "experts", g.ids ? g.products[0].node->src[0]->ne[2] : 0 }, { "products", products } });
    }
    const int n_groups = (int) groups.size();
    for (int g = 1; g < n_groups; ++g) {
        const size_t n_bytes = count_bytes(parts.find_boundary(k, g).values);
        kept_bytes[QUANTIZED] = std::max(kept_bytes[QUANTIZED], n_bytes);
        if (g < n_groups - 1) { // at the last group, the original model advances to the layer's output
            kept_bytes[ORIGINAL] = std::max(kept_bytes[ORIGINAL], n_bytes);
        }
    }
    // products and, because column scales change them too, all other weights, such as norms
    for (const ggml_tensor * node : parts.nodes(k)) {
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            if (const ggml_tensor * w = node->src[j]; is_weight(w) && (number <= n_layers || !matrices.count(w->name))) {
                matrices[w->name] = w;
                layer_of[w->name] = number;
            }
        }
    }
    return groups;
}

// What the current layer passes on: its output, and its selections; of the output matrix the hidden state for MTP layers. Nothing without
// has_end().
std::vector<ggml_tensor *> stream_pair::layer_outputs() const {
    return !has_end() ? std::vector<ggml_tensor *>() : layer < n_layers ? parts.outputs(layer) : std::vector<ggml_tensor *>{ find_hidden_state() };
}

ggml_tensor * stream_pair::find_hidden_state() const {
    auto nodes = parts.nodes(n_layers);
    nodes.push_back(parts.layers()[n_layers].start); // in some graphs it is the output of the last layer
    const auto match = std::find_if(nodes.begin(), nodes.end(), [](const ggml_tensor * t) { return strcmp(t->name, "h_nextn") == 0; });
    return match == nodes.end() ? nullptr : *match;
}

// --- inputs of products ----------------------------------------------------------------------------------------------

template <class F> static void each_input(const group & g, const F & f) {
    f(g.x);
    if (g.ids) {
        f(g.ids);
    }
}

template <class F> static void each_array(const group & g, const F & f) {
    each_input(g, f);
    for (const auto & p : g.products) {
        if (p.residual) {
            f(p.residual);
        }
    }
}

void stream_pair::export_inputs(int group, int chunk, bool advance_original) {
    check_index("group", group, (int) description[layer].size());
    check_index("chunk", chunk, n_chunks);
    is_original_ahead = advance_original;
    for (int model : { ORIGINAL, QUANTIZED }) {
        const bool advances = advance_original && model == ORIGINAL && has_end();
        select_targets = [&](const ggml_ext::layer & l) {
            end_values   = advances ? std::vector<ggml_tensor *>() : parts.find_boundary(is_mtp() ? 0 : layer, group).values;
            auto targets = advances ? layer_outputs() : end_values;
            each_array(l.groups.at(group), [&](ggml_tensor * t) { targets.push_back(t); });
            return targets;
        };
        run_layer(chunk, model, group);
        keep_values(group);
        size_t offset = 0;
        each_array(current().groups.at(group), [&](ggml_tensor * t) { offset = export_array(t, offset, model, 2); });
        if (advances) {
            store_stream(chunk, ORIGINAL);
        }
    }
}

void stream_pair::collect_inputs(int chunk) {
    check_index("chunk", chunk, n_chunks);
    const size_t n_groups = layer == n_layers ? 0 : description[layer].size();
    const auto   each     = [&](const ggml_ext::layer & l, const auto & f) {
        std::for_each(l.groups.begin(), l.groups.begin() + n_groups, [&](const group & g) { each_input(g, f); });
    };
    select_targets = [&](const ggml_ext::layer & l) {
        end_values.clear();
        std::vector<ggml_tensor *> targets = layer_outputs();
        each(l, [&](ggml_tensor * t) { targets.push_back(t); });
        return targets;
    };
    run_layer(chunk, ORIGINAL, 0);
    size_t offset = 0;
    each(current(), [&](const ggml_tensor * t) { offset = export_array(t, offset, 0, 1); });
    if (has_end()) {
        store_stream(chunk, ORIGINAL);
    }
}

// Write an array to the exchange, the i-th of n copies. Return the offset after all of them.
size_t stream_pair::export_array(const ggml_tensor * t, size_t offset, int index, int n_copies) {
    const size_t n_bytes = (size_t) ggml_nelements(t) * ggml_type_size(t->type), end = offset + n_copies * n_bytes;
    if (end > exchange.size()) {
        fail("the exchange is too small");
    }
    copy_rows(t, exchange.data() + offset + index * n_bytes);
    return end;
}

// Keep the values at the inputs of a group. There is no room for those of the original model at the last group, where it usually advances.
void stream_pair::keep_values(int group) {
    if (end_values.empty() || count_bytes(end_values) > kept_bytes[model]) {
        return;
    }
    char * dst = kept_data();
    for (const ggml_tensor * t : end_values) {
        ggml_backend_tensor_get(t, dst, 0, ggml_nbytes(t));
        dst += ggml_nbytes(t);
    }
    kept_group[model][chunk] = group;
}

// Set the values that a run begins with.
void stream_pair::set_kept_values() const {
    const char * src = kept_data();
    for (ggml_tensor * t : start_values) {
        ggml_backend_tensor_set(t, src, 0, ggml_nbytes(t));
        src += ggml_nbytes(t);
    }
}

json stream_pair::advance(int chunk) {
    check_index("chunk", chunk, n_chunks);
    check_index("layer", layer, n_layers + has_end()); // the output matrix has an output only for MTP layers, and these have none
    for (int model = is_original_ahead ? QUANTIZED : ORIGINAL; model <= QUANTIZED; ++model) {
        select_targets = [this](const ggml_ext::layer &) { return layer_outputs(); };
        run_layer(chunk, model, (int) description[layer].size());
        store_stream(chunk, model);
    }
    double energy = 0, difference = 0;
    for (size_t i = n_embd; i < chunk_bytes / sizeof(float); ++i) {
        const double x = ((const float *) stream_data(ORIGINAL, chunk))[i], d = x - ((const float *) stream_data(QUANTIZED, chunk))[i];
        energy += x * x;
        difference += d * d;
    }
    return { { "energy", energy }, { "difference", difference } };
}

void stream_pair::store_stream(int chunk, int model) {
    float * dst = (float *) stream_data(model, chunk);
    const auto passed = layer_outputs();
    ggml_backend_tensor_get(passed[0], dst, 0, chunk_bytes);
    store_selections({ passed.begin() + 1, passed.end() });
    if (model == ORIGINAL) {
        check_finite(chunk, layer, dst);
    } else if (!is_finite(dst)) {
        fail("the stream behind layer " + std::to_string(layer) + " of the quantized model is not finite");
    }
}

// Call f(tensor, data of the chunk of this run) for some of the selections.
template <class F> void stream_pair::each_selection(const std::vector<ggml_tensor *> & some, const F & f) const {
    char * data = selections[model].data() + (size_t) chunk * selection_bytes;
    for (ggml_tensor * t : parts.selections()) {
        if (std::find(some.begin(), some.end(), t) != some.end()) {
            f(t, data);
        }
        data += ggml_nbytes(t);
    }
}

void stream_pair::store_selections(const std::vector<ggml_tensor *> & some) const {
    each_selection(some, [](const ggml_tensor * t, char * data) { ggml_backend_tensor_get(t, data, 0, ggml_nbytes(t)); });
}

void stream_pair::set_selections() const {
    each_selection(current().selections, [](ggml_tensor * t, const char * data) { ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t)); });
}

bool stream_pair::is_finite(const float * x) const {
    return std::all_of(x, x + chunk_bytes / sizeof(float), [](float value) { return std::isfinite(value); });
}

// x: output of layer k in the original model.
void stream_pair::check_finite(int chunk, int k, const float * x) {
    if (!is_finite(x)) {
        fail_not_finite(chunk, "the stream behind layer " + std::to_string(k));
    }
}

// Run the original model again to find the first tensor that is not finite. place: reported if none is.
void stream_pair::fail_not_finite(int chunk, const std::string & place) {
    run_purpose   = purpose::full;
    watcher.is_on = true;
    compute(chunk, ORIGINAL);
    throw not_finite(watcher.first_tensor.empty() ? place : watcher.first_tensor);
}

} // namespace ggml_ext
