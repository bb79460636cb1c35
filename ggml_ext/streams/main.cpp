// ggml-ext-streams: run a model layer by layer, for sequential quantization and calibration (stream-pair.h). py/ggml_ext/_native/streams.py
// sends these lines:
//
//   exchange BYTES ONLY FILE   map FILE, through which both sides exchange arrays. ONLY is 1 for calibration, which runs the original model only
//                         and sends `collect`, and 0 for sequential quantization
//   bf16                  let the original model's products use BF16 in place of F16 if the CPU is faster with that
//   layer N               the streams are at the input of layer N. The output matrix follows the last layer as one more layer. With --mtp-layers,
//                         the layers that predict further tokens follow it; their input is the main model's hidden state (h_nextn)
//   set NAME TYPE FILE    replace the matrix NAME of the quantized model
//   inputs G C ADVANCE    write arrays of chunk C at group G of the layer; ADVANCE 1: and advance the original stream to the layer's output
//   collect C             write the inputs of chunk C at all groups of the layer, and advance the original stream to the layer's output
//   advance C             advance the streams of chunk C to the layer's output
//   learn N               allocate memory for the gradients of N chunks; 0: free it
//   begin C               forward pass of chunk C, then backward pass to the output of the last layer; labels.h has the loss
//   gradients C           write the gradients of chunk C at the layer's products; layers from the last to the first
//
// Each answer is a line of JSON: {"error": "..."} on failure, or {"not_finite": "..."} with the first tensor of the original model whose values
// are not finite. The first answer, before any line, describes the model.
//
// Usage: ggml-ext-streams -m MODEL -f TEXT -c TOKENS -b TOKENS [--chunks N] [-t N] [--mtp-layers] [-o FILE]
// -o: file for the streams, unlinked at once; without it they are in memory.

#include "stream-pair.h"

#include "arg.h"
#include "common.h"
#include "log.h"

#include <cstdio>
#include <iostream>
#include <sstream>
#include <unistd.h>

using json = nlohmann::ordered_json;

namespace {

json execute(ggml_ext::stream_pair & streams, std::istringstream & line) {
    std::string command, name, type, path;
    size_t      n_bytes = 0;
    int         a = 0, b = 0, c = 0;
    line >> command;
    if (command == "exchange" && line >> n_bytes >> a >> std::ws && std::getline(line, path)) {
        streams.set_exchange(path, n_bytes, a != 0);
    } else if (command == "bf16") {
        streams.prefer_bf16();
    } else if (command == "layer" && line >> a) {
        streams.enter_layer(a);
    } else if (command == "set" && line >> name >> type >> std::ws && std::getline(line, path)) {
        streams.replace_matrix(name, type, path);
    } else if (command == "inputs" && line >> a >> b >> c) {
        streams.export_inputs(a, b, c != 0);
    } else if (command == "collect" && line >> a) {
        streams.collect_inputs(a);
    } else if (command == "advance" && line >> a) {
        return streams.advance(a);
    } else if (command == "learn" && line >> a) {
        streams.allocate_gradients(a);
    } else if (command == "begin" && line >> a) {
        streams.begin_gradients(a);
    } else if (command == "gradients" && line >> a) {
        streams.export_gradients(a);
    } else {
        ggml_ext::fail("unknown or malformed command: " + line.str());
    }
    return json::object();
}

void print_usage(int, char ** argv) {
    printf("\n%s -m MODEL -f TEXT -c TOKENS -b TOKENS [--chunks N] [-t N] [--mtp-layers] [-o FILE]\n\nThis program is part of ggml-ext quantize.\n", argv[0]);
}

// Return the standard output for answers; what libraries print goes to the log.
FILE * take_output() {
    FILE * out = fdopen(dup(STDOUT_FILENO), "w");
    dup2(STDERR_FILENO, STDOUT_FILENO);
    return out;
}

void send(FILE * out, const json & answer) {
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
    params.no_extra_bufts = true; // repacked matrices cannot be transposed
    ggml_ext::overflow_watcher watcher;
    params.cb_eval           = ggml_ext::overflow_watcher::callback;
    params.cb_eval_user_data = &watcher;
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
            ggml_ext::fail("the text has " + std::to_string(tokens.size()) + " tokens, but a chunk takes " + std::to_string(params.n_ctx));
        }
        ggml_ext::mtp_layers  mtp(init->context(), params);
        ggml_ext::stream_pair streams(init->context(), mtp, watcher, tokens, params.n_ctx, n_chunks, params.out_file);
        send(out, streams.describe());
        for (std::string line; std::getline(std::cin, line);) {
            try {
                std::istringstream words(line);
                send(out, execute(streams, words));
            } catch (const ggml_ext::not_finite & e) {
                send(out, { { "not_finite", e.what() } });
            } catch (const std::exception & e) {
                send(out, { { "error", e.what() } });
            }
        }
    } catch (const std::exception & e) {
        send(out, { { "error", e.what() } });
        return 1;
    }
    llama_backend_free();
    return 0;
}
