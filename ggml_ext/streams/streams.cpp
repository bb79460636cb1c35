// The inputs of a model's weight matrices, of two streams through its layers: that of the model as it is, and that behind matrices which
// have been replaced by quantized ones so far. What py/ggml_ext/_native/streams.py asks for, line by line:
//
//   exchange FILE BYTES   where arrays are put: a file that is mapped by both sides
//   layer N               the streams are before layer N; matrices replaced in layers before are forgotten
//   set NAME TYPE FILE    the matrix NAME behind which the second stream goes on has these bytes
//   inputs G C LAST       arrays of chunk C at the products of group G of the layer (described at the start): input of the first stream,
//                         then of the second; of experts the ids, both; residual of each product that has one, both. LAST 1: the first
//                         stream goes on behind the layer in the same pass
//   advance C             both streams of chunk C, or the second after LAST, go on behind the layer; the answer has the energy of the first
//                         there and that of the difference, without the first token, whose energy is of another order
//   learn N               room for the gradients of N chunks at the streams behind all layers
//   backward C            finds those of chunk C of the model as it is. The loss is -log of the probability of tokens drawn from the
//                         model's own distribution, so that their second moments are Fisher's information
//   gradients C           arrays of chunk C at the layer: the gradient of each product's output but those of experts, in their order
//
// An answer is a line of JSON, with what is wrong {"error": "..."}, or {"not_finite": "..."} with the first tensor of the model as it is whose
// values are not finite. The first answer describes the model.
//
// Use: ggml-ext-streams -m MODEL -f TEXT -c TOKENS -b TOKENS [--chunks N] [-t N] [-o FILE]
// -o: the streams lie in this file, which has no name any more once it is open; without it in memory.

#include "backward.h"
#include "labels.h"
#include "llama-graph-cut.h"
#include "mapping.h"
#include "replacement.h"

#include "arg.h"
#include "common.h"
#include "llama.h"
#include "log.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <strings.h>
#include <unistd.h>

using json = nlohmann::ordered_json;

namespace {

using ggml_ext::fail;
using ggml_ext::mapping;
using ggml_ext::replacement;

// The model as it is has values that are not finite; what() says where they begin.
struct not_finite : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// -Inf alone is no fault of tensors within a graph: masks have it.
bool is_overflow(float x) { return std::isnan(x) || x == INFINITY; }

// Looks at the tensors of a graph as they are computed, once it is told to.
class watcher {
public:
    bool        is_on = false;
    std::string found; // the first whose values are not finite

    static bool heard(ggml_tensor * t, bool asks, void * self) {
        watcher & w = *(watcher *) self;
        return asks ? w.is_on && w.found.empty() && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) : w.look(t);
    }

private:
    // False where nothing more is to be computed.
    bool look(const ggml_tensor * t) {
        std::vector<float> values(ggml_nelements(t));
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
        if (std::any_of(values.begin(), values.end(), is_overflow)) {
            found = t->name;
            for (int i = 0; i < GGML_MAX_SRC && t->src[i]; ++i) {
                found += (i ? ", " : " of ") + std::string(t->src[i]->name);
            }
        }
        return found.empty();
    }
};

class streams {
public:
    streams(llama_context * ctx, watcher & watch, std::vector<llama_token> tokens, int n_context, int n_chunks, const std::string & file)
        : ctx(ctx), watch(watch), tokens(std::move(tokens)), file(file), n_context(n_context), n_chunks(n_chunks),
          n_layers(llama_model_n_layer(llama_get_model(ctx))) {
        ggml_ext_set_graph_cut([this](ggml_cgraph * graph) { return on_graph(graph); });
        compute(0, -1); // a graph of no nodes: to be described
        if (!wrong.empty()) {
            return;
        }
        for (auto & s : stream) {
            s = mapping(file, (size_t) n_chunks * chunk_bytes, true);
        }
    }
    ~streams() { ggml_ext_set_graph_cut({}); }

    json describe() const {
        return wrong.empty() ? json{ { "chunks", n_chunks }, { "context", n_context }, { "layers", description }, { "no_gradients", not_differentiated } }
                             : json{ { "error", wrong } };
    }

    json answer(std::istringstream & line) {
        std::string what, name, type, path;
        size_t      n = 0;
        int         a = 0, b = 0, c = 0;
        line >> what;
        if (what == "exchange" && line >> n >> std::ws && std::getline(line, path)) {
            exchange = mapping(path, n, false);
        } else if (what == "layer" && line >> a) {
            layer    = checked("layer", a, n_layers + 1);
            is_ahead = false;
            for (auto it = replaced.begin(); it != replaced.end();) {
                it = it->second->layer < layer && it->second->layer >= 0 ? replaced.erase(it) : std::next(it);
            }
        } else if (what == "set" && line >> name >> type >> std::ws && std::getline(line, path)) {
            set(name, type, path);
        } else if (what == "inputs" && line >> a >> b >> c) {
            inputs(checked("group", a, (int) description[layer].size()), checked("chunk", b, n_chunks), c != 0);
        } else if (what == "advance" && line >> a) {
            checked("chunk", a, n_chunks);
            checked("layer", layer, n_layers); // behind the last there is no stream
            for (int s = is_ahead ? 1 : 0; s < 2; ++s) {
                wanted = [](const ggml_ext::layer & l) { return std::vector<ggml_tensor *>{ l.end }; };
                run(a, s);
                keep(a, s);
            }
            return compare(a);
        } else if (what == "learn" && line >> a) {
            checked("chunk", a - 1, n_chunks);
            learned   = mapping(file, (size_t) a * n_layers * chunk_bytes / 2, true);
            n_learned = a;
        } else if (what == "backward" && line >> a) {
            learn_gradients(checked("chunk", a, n_learned));
        } else if (what == "gradients" && line >> a) {
            checked("layer", layer, n_layers);
            gradients(checked("chunk", a, n_learned));
        } else {
            fail("what is this: " + line.str());
        }
        return json::object();
    }

private:
    // i, which a line names.
    static int checked(const char * what, int i, int n) {
        if (i < 0 || i >= n) {
            fail("there is no " + std::string(what) + " " + std::to_string(i) + " of " + std::to_string(n));
        }
        return i;
    }

    void set(const std::string & name, const std::string & type, const std::string & path) {
        const auto matrix = matrices.find(name);
        ggml_type  id     = GGML_TYPE_COUNT;
        for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
            const char * of = ggml_type_name((ggml_type) i); // q4_K, as no command line has it
            id = of && strcasecmp(type.c_str(), of) == 0 ? (ggml_type) i : id;
        }
        if (matrix == matrices.end() || id == GGML_TYPE_COUNT) {
            fail("no matrix " + name + ", or no type " + type);
        }
        replaced[name] = std::make_unique<replacement>(matrix->second, id, path, layer_of.at(name));
    }

    // Runs a chunk through what is wanted of the layer; s: 0 the model as it is, 1 behind replaced matrices.
    void run(int chunk, int s) {
        before = place(s, chunk);
        doing  = purpose::layer;
        compute(chunk, s);
    }

    // s: or -1 for nothing.
    void compute(int chunk, int s) {
        which = s;
        llama_memory_clear(llama_get_memory(ctx), true);
        llama_batch batch = llama_batch_init(n_context, 0, 1);
        const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
        for (int i = 0; i < n_context; ++i) {
            const bool first = i == 0 && llama_vocab_get_add_bos(vocab); // as llama-imatrix begins its chunks
            batch.token[i]     = first ? llama_vocab_bos(vocab) : tokens[(size_t) chunk * n_context + i];
            batch.pos[i]       = i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        batch.n_tokens = n_context;
        const int code = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (code) {
            fail("llama_decode: " + std::to_string(code));
        }
        llama_synchronize(ctx);
        if (!wrong.empty() && s >= 0) {
            fail(wrong);
        }
    }

    std::function<void()> on_graph(ggml_cgraph * graph) {
        parts = {};
        if (!parts.read(graph, n_layers) || (which < 0 && !parts.check())) {
            wrong = parts.why();
        } else if (which < 0) {
            learn();
        }
        if (which < 0 || !wrong.empty()) {
            parts.cut(-1, {}, {});
            return [] {};
        }
        parts.find_groups(layer);
        std::map<std::string, ggml_tensor *> weights;
        if (which == 1) {
            for (const auto & r : replaced) {
                weights[r.first] = r.second->tensor;
            }
        }
        if (doing == purpose::whole) {
            for (int k = 0; k < n_layers; ++k) {
                ggml_ext::keep(parts.layers()[k].end);
            }
            ggml_ext::keep(parts.nodes(n_layers).back());
            return [] {};
        }
        const ggml_ext::layer & of = parts.layers()[layer];
        const auto nodes = parts.nodes(layer);
        const bool differentiates = doing == purpose::gradients;
        if (!parts.cut(layer, differentiates ? std::vector<ggml_tensor *>{ nodes.back() } : wanted(of), weights)) {
            wrong = parts.why();
        } else if (differentiates) {
            back = {};
            if (!back.build(nodes, of)) {
                wrong = back.why();
                return [] {};
            }
            back.append(graph);
        }
        return [this, start = of.start, differentiates] {
            if (start) {
                ggml_backend_tensor_set(start, before, 0, chunk_bytes);
            }
            if (differentiates) {
                ggml_backend_tensor_set(back.seed(), seed.data(), 0, seed.size()*sizeof(float));
            }
        };
    }

    // Of all layers; on a graph that is whole.
    std::string why_not_differentiated() {
        for (size_t k = 0; k < parts.layers().size(); ++k) {
            ggml_ext::backward of_layer;
            if (!of_layer.build(parts.nodes((int) k), parts.layers()[k])) {
                return of_layer.why();
            }
        }
        return {};
    }

    char * learned_at(int k, int chunk) const { return learned.data() + ((size_t) k * n_learned + chunk) * chunk_bytes / 2; }

    void learn_gradients(int chunk) {
        doing = purpose::whole;
        compute(chunk, 0);
        std::vector<std::vector<float>> hidden(n_layers);
        for (int k = 0; k < n_layers; ++k) {
            hidden[k].resize(chunk_bytes / sizeof(float));
            ggml_backend_tensor_get(parts.layers()[k].end, hidden[k].data(), 0, chunk_bytes);
            check_finite(chunk, k, hidden[k].data());
        }
        const ggml_tensor * logits = parts.nodes(n_layers).back();
        seed.resize(ggml_nelements(logits));
        ggml_backend_tensor_get(logits, seed.data(), 0, ggml_nbytes(logits));
        if (std::any_of(seed.begin(), seed.end(), is_overflow)) {
            fail_not_finite(chunk, "the output");
        }
        ggml_ext::differentiate_logits(seed.data(), logits->ne[0], n_context, (uint64_t) chunk * n_context);
        doing = purpose::gradients;
        for (layer = n_layers; layer > 0; --layer) {
            before = hidden[layer - 1].data();
            compute(chunk, 0);
            seed.resize(chunk_bytes / sizeof(float));
            ggml_backend_tensor_get(back.of(parts.layers()[layer].start), seed.data(), 0, chunk_bytes);
            ggml_fp32_to_bf16_row(seed.data(), (ggml_bf16_t *) learned_at(layer - 1, chunk), (int64_t) seed.size());
        }
    }

    void gradients(int chunk) {
        seed.resize(chunk_bytes / sizeof(float));
        ggml_bf16_to_fp32_row((const ggml_bf16_t *) learned_at(layer, chunk), seed.data(), (int64_t) seed.size());
        before = place(0, chunk);
        doing  = purpose::gradients;
        compute(chunk, 0);
        char * to = exchange.data();
        for (const auto & g : parts.layers()[layer].groups) {
            for (const auto & p : g.products) {
                if (g.ids) {
                    continue;
                }
                const size_t n_bytes = (size_t) ggml_nelements(p.node) * sizeof(float);
                if (to + n_bytes > exchange.data() + exchange.size()) {
                    fail("the exchange is too small");
                }
                if (const ggml_tensor * of = back.of(p.node)) {
                    ggml_ext::get_rows(of, to);
                } else {
                    memset(to, 0, n_bytes);
                }
                to += n_bytes;
            }
        }
    }

    char * place(int s, int chunk) const { return stream[s].data() + (size_t) chunk * chunk_bytes; }

    void learn() {
        description = json::array();
        for (int k = 0; k < (int) parts.layers().size(); ++k) {
            parts.find_groups(k);
            json groups = json::array();
            for (const auto & g : parts.layers()[k].groups) {
                json products = json::array();
                for (const auto & p : g.products) {
                    const ggml_tensor * w = p.node->src[0];
                    matrices[w->name]     = w;
                    layer_of[w->name]     = k;
                    products.push_back({ { "weight", w->name }, { "rows", w->ne[1] }, { "scale", p.residual ? p.scale : 0.0f } });
                }
                groups.push_back({ { "columns", g.x->ne[0] }, { "inputs", ggml_nelements(g.x) / g.x->ne[0] }, { "used", g.ids ? g.ids->ne[0] : 0 },
                                   { "experts", g.ids ? g.products[0].node->src[0]->ne[2] : 0 }, { "products", products } });
            }
            description.push_back(groups);
        }
        const ggml_tensor * end = parts.layers()[0].end;
        n_stream    = ggml_nelements(end) / n_context;
        chunk_bytes = ggml_nbytes(end);
        not_differentiated = why_not_differentiated();
        // token embeddings, which the second stream begins with
        for (const ggml_tensor * w : parts.embeddings()) {
            matrices.emplace(w->name, w);
            layer_of[w->name] = -1;
        }
    }

    void inputs(int g, int chunk, bool last) {
        is_ahead = last;
        for (int s = 0; s < 2; ++s) {
            wanted = [&](const ggml_ext::layer & l) {
                std::vector<ggml_tensor *> targets;
                each_array(l.groups.at(g), [&](ggml_tensor * t) { targets.push_back(t); });
                if (last && s == 0 && l.end) {
                    targets.push_back(l.end);
                }
                return targets;
            };
            run(chunk, s);
            char * to   = exchange.data();
            size_t left = exchange.size();
            each_array(parts.layers()[layer].groups.at(g), [&](ggml_tensor * t) { // of the first stream, then of the second
                const size_t n_bytes = (size_t) ggml_nelements(t) * ggml_type_size(t->type);
                if (2 * n_bytes > left) {
                    fail("the exchange is too small");
                }
                ggml_ext::get_rows(t, to + s * n_bytes);
                to += 2 * n_bytes;
                left -= 2 * n_bytes;
            });
            if (last && s == 0 && parts.layers()[layer].end) {
                keep(chunk, 0);
            }
        }
    }

    template <class F> static void each_array(const ggml_ext::group & g, const F & f) {
        f(g.x);
        if (g.ids) {
            f(g.ids);
        }
        for (const auto & p : g.products) {
            if (p.residual) {
                f(p.residual);
            }
        }
    }

    void keep(int chunk, int s) {
        float * to = (float *) place(s, chunk);
        ggml_backend_tensor_get(parts.layers()[layer].end, to, 0, chunk_bytes);
        if (s == 0) {
            check_finite(chunk, layer, to);
        } else if (!is_finite(to)) {
            fail("the stream behind layer " + std::to_string(layer) + " of the quantized model is not finite");
        }
    }

    bool is_finite(const float * x) const {
        return std::all_of(x, x + chunk_bytes / sizeof(float), [](float value) { return std::isfinite(value); });
    }

    // x: the stream behind layer k of the model as it is.
    void check_finite(int chunk, int k, const float * x) {
        if (!is_finite(x)) {
            fail_not_finite(chunk, "the stream behind layer " + std::to_string(k));
        }
    }

    // Runs the model as it is once more, to say which of its tensors is the first. otherwise: what is said if none is found.
    [[noreturn]] void fail_not_finite(int chunk, const std::string & otherwise) {
        doing       = purpose::whole;
        watch.is_on = true;
        compute(chunk, 0);
        throw not_finite(watch.found.empty() ? otherwise : watch.found);
    }

    json compare(int chunk) const {
        double energy = 0, difference = 0;
        for (size_t i = n_stream; i < chunk_bytes / sizeof(float); ++i) {
            const double x = ((const float *) place(0, chunk))[i], d = x - ((const float *) place(1, chunk))[i];
            energy += x * x;
            difference += d * d;
        }
        return { { "energy", energy }, { "difference", difference } };
    }

    // What a run is for.
    enum class purpose { layer, whole, gradients };

    llama_context *          ctx;
    watcher &                watch;
    std::vector<llama_token> tokens;
    std::string              file;
    int                      n_context, n_chunks, n_layers, layer = 0, which = -1, n_learned = 0;
    purpose                  doing = purpose::layer;
    const void *             before = nullptr; // the stream before the layer
    bool                     is_ahead = false; // the first stream, of all chunks
    int64_t                  n_stream = 0;
    size_t                   chunk_bytes = 0;
    mapping                  stream[2], learned, exchange;
    std::vector<float>       seed; // the gradient behind the layer
    json                     description;
    std::string              wrong, not_differentiated;
    ggml_ext::layered_graph  parts; // of the last run
    ggml_ext::backward       back;
    std::function<std::vector<ggml_tensor *>(const ggml_ext::layer &)> wanted;

    std::map<std::string, const ggml_tensor *>          matrices;
    std::map<std::string, int>                          layer_of;
    std::map<std::string, std::unique_ptr<replacement>> replaced;
};

void print_usage(int, char ** argv) {
    printf("\n%s -m MODEL -f TEXT -c TOKENS -b TOKENS [--chunks N] [-t N] [-o FILE]\n\na part of ggml-ext quantize --propagate\n", argv[0]);
}

// Answers go to where the program's output did; what libraries print goes to the log.
FILE * take_output() {
    FILE * out = fdopen(dup(STDOUT_FILENO), "w");
    dup2(STDERR_FILENO, STDOUT_FILENO);
    return out;
}

void say(FILE * out, const json & answer) {
    fprintf(out, "%s\n", answer.dump().c_str());
    fflush(out);
}

} // namespace

int main(int argc, char ** argv) {
    FILE * out = take_output();
    common_params params;
    params.n_ctx  = 512;
    params.escape = false;
    common_init();
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_IMATRIX, print_usage)) {
        return 1;
    }
    params.n_batch = params.n_ubatch = params.n_ctx; // a chunk is one graph
    params.n_parallel = 1;
    params.warmup     = false;
    params.no_extra_bufts = true; // matrices in an order that only products know cannot be transposed
    watcher watch;
    params.cb_eval           = watcher::heard;
    params.cb_eval_user_data = &watch;
    llama_backend_init();
    llama_numa_init(params.numa);
    auto init = common_init_from_params(params);
    if (!init->model() || !init->context()) {
        return 1;
    }
    try {
        const std::vector<llama_token> tokens = common_tokenize(init->context(), params.prompt, true, params.parse_special);
        int n_chunks = (int) tokens.size() / params.n_ctx;
        n_chunks     = params.n_chunks > 0 ? std::min(n_chunks, params.n_chunks) : n_chunks;
        if (n_chunks == 0) {
            fail("the text has " + std::to_string(tokens.size()) + " tokens, but a chunk takes " + std::to_string(params.n_ctx));
        }
        streams both(init->context(), watch, tokens, params.n_ctx, n_chunks, params.out_file);
        say(out, both.describe());
        for (std::string line; std::getline(std::cin, line);) {
            try {
                std::istringstream words(line);
                say(out, both.answer(words));
            } catch (const not_finite & e) {
                say(out, { { "not_finite", e.what() } });
            } catch (const std::exception & e) {
                say(out, { { "error", e.what() } });
            }
        }
    } catch (const std::exception & e) {
        say(out, { { "error", e.what() } });
        return 1;
    }
    llama_backend_free();
    return 0;
}
