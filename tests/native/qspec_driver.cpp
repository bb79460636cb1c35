// Test --spec-type qspec without a server: draft and verify, decode the same batches without drafts, then the same tokens one by one. Print
// as JSON what is equal.
//
//     ggml-ext-qspec MODEL TEXT [name=value ...]        names and defaults: struct options
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "common.h"
#include "llama-cpp.h"
#include "qspec/qspec.h"
#include "sampling.h"
#include "speculative.h"

struct options {
    int   gamma      = 3;
    int   sequences  = 1;
    int   prompt     = 32;  // tokens
    int   tokens     = 96;  // to emit, per sequence
    int   ctx        = 512; // cells, per sequence
    int   threads    = 1; // two would wait for each other on a busy machine
    int   flash_attn = 1;
    int   unified    = 1;
    float temp       = 0;
    int   seed       = 1;

    options(int argc, char ** argv) {
        const std::map<std::string, int *> ints = {
            {"gamma", &gamma}, {"sequences", &sequences}, {"prompt", &prompt}, {"tokens", &tokens}, {"ctx", &ctx},
            {"threads", &threads}, {"flash_attn", &flash_attn}, {"unified", &unified}, {"seed", &seed},
        };
        for (int i = 3; i < argc; i++) {
            const std::string arg = argv[i], name = arg.substr(0, arg.find('='));
            const char * value = argv[i] + std::min(arg.size(), name.size() + 1);
            if (name == "temp") {
                temp = atof(value);
            } else if (ints.count(name)) {
                *ints.at(name) = atoi(value);
            } else {
                fprintf(stderr, "error: unknown option %s\n", argv[i]);
                exit(1);
            }
        }
    }
};

// A decoded batch, its logits, and the position from which its cells were removed afterwards.
struct step {
    std::vector<common_batch::token> tokens;
    std::vector<std::vector<float>>  logits;
    std::vector<llama_pos>           removed; // per sequence, -1 for none
};

struct runner {
    llama_model * model;
    options       opts;
    int           n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_context_ptr context(int n_seq) const {
        auto params = llama_context_default_params();
        params.n_ctx           = opts.ctx*n_seq;
        params.n_batch         = 1024;
        params.n_seq_max       = n_seq;
        params.n_threads       = params.n_threads_batch = opts.threads;
        params.flash_attn_type = opts.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.kv_unified      = opts.unified != 0;
        llama_context_ptr ctx(llama_init_from_model(model, params));
        if (!ctx || !llama_set_act_prec(ctx.get(), LLAMA_ACT_PREC_F16)) {
            exit(1); // the log says why
        }
        return ctx;
    }

    common_sampler_ptr sampler() const {
        common_params_sampling params;
        params.temp = opts.temp;
        params.seed = opts.seed;
        return common_sampler_ptr(common_sampler_init(model, params));
    }

    step decode(llama_context * ctx, const std::vector<common_batch::token> & tokens) const {
        common_batch batch(ctx);
        for (const auto & token : tokens) {
            batch.add(token.id, token.pos[0], token.seq_id, token.output);
        }
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            fprintf(stderr, "error: a batch of %zu tokens cannot be decoded\n", tokens.size());
            exit(1);
        }
        step result = {tokens, {}, std::vector<llama_pos>(opts.sequences, -1)};
        for (size_t i = 0; i < tokens.size(); i++) {
            if (tokens[i].output) {
                const float * row = llama_get_logits_ith(ctx, i);
                result.logits.emplace_back(row, row + n_vocab);
            }
        }
        return result;
    }

    std::vector<uint8_t> state(llama_context * ctx) const {
        std::vector<uint8_t> all;
        for (int seq = 0; seq < opts.sequences; seq++) {
            std::vector<uint8_t> data(llama_state_seq_get_size(ctx, seq));
            llama_state_seq_get_data(ctx, data.data(), data.size(), seq);
            all.insert(all.end(), data.begin(), data.end());
        }
        return all;
    }
};

static common_batch::token entry(llama_token id, llama_pos pos, llama_seq_id seq, bool output) {
    common_batch::token token = {};
    token.id     = id;
    token.pos[0] = pos;
    token.seq_id = seq;
    token.output = output;
    return token;
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL TEXT [name=value ...]\n", argv[0]);
        return 1;
    }
    const options opts(argc, argv);
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) { fputs(text, stderr); } }, nullptr);
    llama_backend_init();
    llama_model_ptr model(llama_model_load_from_file(argv[1], llama_model_default_params()));
    if (!model) {
        return 1;
    }
    const runner run = {model.get(), opts};
    std::ifstream file(argv[2]);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto all = common_tokenize(llama_model_get_vocab(model.get()), text.substr(0, 16*opts.prompt*(opts.sequences + 1)), true, false);
    if ((int) all.size() < opts.prompt*opts.sequences) {
        fprintf(stderr, "error: %s: %zu tokens, %d needed\n", argv[2], all.size(), opts.prompt*opts.sequences);
        return 1;
    }

    // with drafts
    auto ctx = run.context(opts.sequences);
    common_params params;
    params.n_parallel           = opts.sequences;
    params.speculative.types    = {COMMON_SPECULATIVE_TYPE_QSPEC};
    params.speculative.draft.n_max = opts.gamma;
    if (!ggml_ext_qspec_init(params, ctx.get())) {
        return 1;
    }
    common_speculative_ptr spec(common_speculative_init(params.speculative, opts.sequences));

    std::vector<step> steps;
    std::vector<llama_tokens> emitted(opts.sequences), drafts(opts.sequences), prompts(opts.sequences);
    std::vector<common_sampler_ptr> samplers;
    std::vector<common_batch::token> tokens;
    for (int seq = 0; seq < opts.sequences; seq++) {
        prompts[seq].assign(all.begin() + seq*opts.prompt, all.begin() + (seq + 1)*opts.prompt);
        for (int i = 0; i < opts.prompt; i++) {
            tokens.push_back(entry(prompts[seq][i], i, seq, i == opts.prompt - 1));
        }
    }
    steps.push_back(run.decode(ctx.get(), tokens));
    for (int seq = 0; seq < opts.sequences; seq++) {
        samplers.push_back(run.sampler());
        emitted[seq] = {common_sampler_sample(samplers[seq].get(), ctx.get(), (seq + 1)*opts.prompt - 1)};
        common_sampler_accept(samplers[seq].get(), emitted[seq][0], true);
        common_speculative_begin(spec.get(), seq, prompts[seq]);
    }
    long n_drafted = 0, n_rejected = 0, n_rounds = 0;
    std::vector<long> accepted_at(opts.gamma);
    while (true) {
        std::vector<int> active;
        for (int seq = 0; seq < opts.sequences; seq++) {
            drafts[seq].clear();
            auto & dp = common_speculative_get_draft_params(spec.get(), seq);
            dp.drafting = (int) emitted[seq].size() < opts.tokens;
            if (dp.drafting) {
                active.push_back(seq);
                dp = {true, -1, llama_pos(opts.prompt + emitted[seq].size() - 1), emitted[seq].back(), &prompts[seq], &drafts[seq]};
            }
        }
        if (active.empty()) {
            break;
        }
        common_speculative_draft(spec.get());
        tokens.clear();
        std::vector<std::vector<int>> places(opts.sequences);
        for (int seq : active) {
            llama_tokens ids = {emitted[seq].back()};
            ids.insert(ids.end(), drafts[seq].begin(), drafts[seq].end());
            for (size_t i = 0; i < ids.size(); i++) {
                places[seq].push_back(tokens.size());
                tokens.push_back(entry(ids[i], opts.prompt + emitted[seq].size() - 1 + i, seq, true));
            }
        }
        steps.push_back(run.decode(ctx.get(), tokens));
        for (int seq : active) {
            const auto ids = common_sampler_sample_and_accept_n(samplers[seq].get(), ctx.get(), places[seq], drafts[seq]);
            common_speculative_accept(spec.get(), seq, ids.size() - 1);
            emitted[seq].insert(emitted[seq].end(), ids.begin(), ids.end());
            steps.back().removed[seq] = opts.prompt + emitted[seq].size() - 1;
            llama_memory_seq_rm(llama_get_memory(ctx.get()), seq, steps.back().removed[seq], -1);
            n_rounds++;
            n_drafted  += drafts[seq].size();
            n_rejected += drafts[seq].size() + 1 - ids.size();
            for (size_t i = 0; i + 1 < ids.size(); i++) {
                accepted_at[i]++;
            }
        }
    }
    const auto state = run.state(ctx.get());

    // the same batches without drafts
    ctx = run.context(opts.sequences);
    long n_different = 0;
    for (const auto & before : steps) {
        const auto after = run.decode(ctx.get(), before.tokens);
        for (size_t i = 0; i < before.logits.size(); i++) {
            n_different += memcmp(before.logits[i].data(), after.logits[i].data(), run.n_vocab*sizeof(float)) != 0;
        }
        for (int seq = 0; seq < opts.sequences; seq++) {
            if (before.removed[seq] >= 0) {
                llama_memory_seq_rm(llama_get_memory(ctx.get()), seq, before.removed[seq], -1);
            }
        }
    }
    const bool same_state = run.state(ctx.get()) == state;

    // the same tokens one by one
    std::vector<std::map<llama_pos, const std::vector<float> *>> verified(opts.sequences); // logits of the last verification of each position
    for (const auto & before : steps) {
        size_t row = 0;
        for (const auto & token : before.tokens) {
            const auto seq = token.seq_id;
            const bool kept = before.removed[seq] < 0 || token.pos[0] < before.removed[seq];
            if (token.output) {
                if (kept) {
                    verified[seq][token.pos[0]] = &before.logits[row];
                }
                row++;
            }
        }
    }
    std::string divergences;
    double difference = 0;
    long n_emitted = 0;
    for (int seq = 0; seq < opts.sequences; seq++) {
        ctx = run.context(1);
        auto sampler = run.sampler();
        tokens.clear();
        for (int i = 0; i < opts.prompt; i++) {
            tokens.push_back(entry(prompts[seq][i], i, 0, i == opts.prompt - 1));
        }
        for (size_t i = 0; i < emitted[seq].size(); i++, n_emitted++) {
            const auto logits = run.decode(ctx.get(), tokens).logits[0];
            const auto & other = *verified[seq].at(tokens.back().pos[0]);
            for (int j = 0; j < run.n_vocab; j++) {
                difference = std::max(difference, (double) fabsf(logits[j] - other[j]));
            }
            const llama_token id = common_sampler_sample(sampler.get(), ctx.get(), tokens.size() - 1);
            if (id != emitted[seq][i]) {
                auto best = logits;
                std::partial_sort(best.begin(), best.begin() + 2, best.end(), std::greater<float>());
                divergences += string_format("%s{\"sequence\": %d, \"token\": %zu, \"gap\": %.9g}", divergences.empty() ? "" : ", ", seq, i, best[0] - best[1]);
            }
            common_sampler_accept(sampler.get(), emitted[seq][i], true);
            tokens = {entry(emitted[seq][i], opts.prompt + i, 0, true)};
        }
    }

    std::string per_position;
    for (long n : accepted_at) {
        per_position += (per_position.empty() ? "" : ", ") + std::to_string(n);
    }
    printf("{\"rounds\": %ld, \"drafted\": %ld, \"rejected\": %ld, \"accepted_at\": [%s], \"emitted\": %ld, \"different_logits\": %ld, "
           "\"same_state\": %s, \"state_bytes\": %zu, \"batch_difference\": %.9g, \"divergences\": [%s]}\n",
           n_rounds, n_drafted, n_rejected, per_position.c_str(), n_emitted, n_different, same_state ? "true" : "false", state.size(),
           difference, divergences.c_str());
    return 0;
}
