#include "moments.h"

#include "moments-options.h"

#include "log.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

static const char * const KEY_KIND    = "imatrix.moments";
static const char * const KEY_BLOCK   = "imatrix.moments.block_size";
static const char * const KEY_TENSORS = "imatrix.moments.tensors";
static const char * const KEY_INPUTS  = "imatrix.moments.inputs";
static const std::string SUMS = ".in_moments", COUNTS = ".moment_counts";

static constexpr double MIB = 1024.0 * 1024.0;

void ggml_ext_moments::input::allocate() {
    sums.resize(n_values * n_mat);
    counts.resize(n_mat);
}

// --- options -----------------------------------------------------------------------------------------------------------------

static bool parse_layers(const std::string & text, int & first, int & last) {
    int end = 0;
    return text.find_first_not_of("0123456789-") == std::string::npos && text.size() < 16 && text.find('-') != 0 &&
           sscanf(text.c_str(), "%d-%d%n", &first, &last, &end) == 2 && end == (int) text.size() && last >= first &&
           text.find("--") == std::string::npos;
}

bool ggml_ext_moments::configure(bool format_dat, bool text_is_given) {
    has_text = text_is_given;
    const ggml_ext_moments_options & options = ggml_ext_get_moments_options();
    if (!options.kind.empty() && options.kind != "block" && options.kind != "full") {
        LOG_ERR("error: --moments %s: must be block (of each 256 columns) or full (of all)\n", options.kind.c_str());
        return false;
    }
    if (!options.layers.empty() && (options.kind.empty() || !has_text)) {
        LOG_ERR("error: --layers %s: selects layers for --moments, but there is no %s\n", options.layers.c_str(),
                options.kind.empty() ? "--moments block or --moments full" : "text: give -f FILE");
        return false;
    }
    if (options.columns && options.kind != "full") {
        LOG_ERR("error: --moments-columns %d: limits --moments full, which is missing\n", options.columns);
        return false;
    }
    if (!options.layers.empty() && !parse_layers(options.layers, first_layer, last_layer)) {
        LOG_ERR("error: --layers %s: must be A-B, the first and the last layer counted from 0, such as 0-15\n", options.layers.c_str());
        return false;
    }
    if (!options.kind.empty() && format_dat) {
        LOG_ERR("error: --moments %s: the dat format cannot hold second moments; remove --output-format dat\n", options.kind.c_str());
        return false;
    }
    kind      = options.kind;
    kind_from = "--moments";
    collects  = !kind.empty() && has_text;
    return true;
}

// Available bytes without swapping, or -1 if the system does not tell.
static double available_memory() {
    std::ifstream info("/proc/meminfo");
    for (std::string line; std::getline(info, line);) {
        double kib;
        if (sscanf(line.c_str(), "MemAvailable: %lf kB", &kib) == 1) {
            return 1024.0 * kib;
        }
    }
    return -1;
}

// --- files -------------------------------------------------------------------------------------------------------------------

static std::vector<std::string> strings(const gguf_context * file, const char * key) {
    std::vector<std::string> result;
    const int64_t id = gguf_find_key(file, key);
    if (id >= 0 && gguf_get_kv_type(file, id) == GGUF_TYPE_ARRAY && gguf_get_arr_type(file, id) == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < gguf_get_arr_n(file, id); ++i) {
            result.push_back(gguf_get_arr_str(file, id, i));
        }
    }
    return result;
}

// Pass n floats of a tensor to add(i, value), in pieces, as files may exceed the memory. Stop if add() returns false.
template <typename F>
static bool each_float(std::ifstream & data, const gguf_context * file, const std::string & name, int64_t n, const F & add) {
    std::vector<float> piece(1 << 16);
    data.seekg((std::streamoff) (gguf_get_data_offset(file) + gguf_get_tensor_offset(file, gguf_find_tensor(file, name.c_str()))));
    for (int64_t i = 0; i < n; i += (int64_t) piece.size()) {
        const int64_t m = std::min<int64_t>(piece.size(), n - i);
        if (!data.read((char *) piece.data(), m * sizeof(float))) {
            return false;
        }
        for (int64_t j = 0; j < m; ++j) {
            if (!add(i + j, piece[j])) {
                return false;
            }
        }
    }
    return true;
}

bool ggml_ext_moments::load(const std::string & path) {
    std::ifstream data(path, std::ios::binary);
    char magic[4] = {};
    data.read(magic, sizeof(magic));
    const bool is_gguf = memcmp(magic, GGUF_MAGIC, sizeof(magic)) == 0; // the older format has no Hessians

    ggml_context * ctx = nullptr;
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> file(
        is_gguf ? gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ &ctx }) : nullptr, gguf_free);
    std::unique_ptr<ggml_context, context_free> ctx_owner(ctx);

    const int64_t key = file ? gguf_find_key(file.get(), KEY_KIND) : -1;
    const std::string file_kind = key < 0 ? "" : gguf_get_kv_type(file.get(), key) != GGUF_TYPE_STRING ? "?" : gguf_get_val_str(file.get(), key);
    const char * const name = path.c_str();
    if (file_kind.empty()) {
        if (!kind.empty()) {
            LOG_ERR("error: --in-file %s: has no second moments, but %s has (%s): their tokens would be missing; collect it again with "
                    "--moments %s, or remove it\n", name, kind_from.c_str(), kind.c_str(), kind.c_str());
            return false;
        }
        file_without = path;
        return true;
    }
    if (kind.empty() && !file_without.empty()) {
        LOG_ERR("error: --in-file %s: has no second moments, but %s has (%s): its tokens would be missing; collect it again with "
                "--moments %s, or remove it\n", file_without.c_str(), name, file_kind.c_str(), file_kind.c_str());
        return false;
    }
    if (file_kind != "block" && file_kind != "full") {
        LOG_ERR("error: --in-file %s: %s is neither \"block\" nor \"full\"; collect it again\n", name, KEY_KIND);
        return false;
    }
    if (!kind.empty() && kind != file_kind) {
        LOG_ERR("error: --in-file %s: its second moments are \"%s\", those of %s \"%s\": both must be the same\n", name, file_kind.c_str(),
                kind_from.c_str(), kind.c_str());
        return false;
    }
    if (has_text && !collects) {
        LOG_ERR("error: --in-file %s: has second moments (%s), which this run would not add to: add --moments %s\n", name, file_kind.c_str(),
                file_kind.c_str());
        return false;
    }
    kind      = file_kind;
    kind_from = path;

    const int64_t key_block = gguf_find_key(file.get(), KEY_BLOCK);
    if (key_block < 0 || gguf_get_kv_type(file.get(), key_block) != GGUF_TYPE_UINT32 ||
        gguf_get_val_u32(file.get(), key_block) != GGML_EXT_MOMENTS_BLOCK) {
        LOG_ERR("error: --in-file %s: %s must be %d; collect it again\n", name, KEY_BLOCK, GGML_EXT_MOMENTS_BLOCK);
        return false;
    }
    const std::vector<std::string> tensors = strings(file.get(), KEY_TENSORS), owners = strings(file.get(), KEY_INPUTS);
    if (tensors.size() != owners.size()) {
        LOG_ERR("error: --in-file %s: %s has %zu names and %s %zu; collect it again\n", name, KEY_TENSORS, tensors.size(), KEY_INPUTS,
                owners.size());
        return false;
    }
    double needed = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const ggml_tensor * sums = ggml_get_tensor(ctx, (tensors[i] + SUMS).c_str());
        needed += sums && !inputs.count(tensors[i]) ? ggml_nbytes(sums) : 0;
    }
    if (const double available = available_memory(); available >= 0 && needed > available) {
        LOG_ERR("error: --in-file %s: its second moments need %.1f MiB and %.1f MiB of memory are available\n", name, needed / MIB,
                available / MIB);
        return false;
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        const auto known = input_of.emplace(tensors[i], owners[i]);
        if (known.first->second != owners[i]) {
            LOG_ERR("error: --in-file %s: tensor %s shares the input of %s, elsewhere that of %s: not the same model\n", name,
                    tensors[i].c_str(), owners[i].c_str(), known.first->second.c_str());
            return false;
        }
        if (tensors[i] != owners[i]) {
            if (std::find(tensors.begin(), tensors.end(), owners[i]) == tensors.end()) {
                LOG_ERR("error: --in-file %s: tensor %s shares the input of %s, which is not listed; collect it again\n", name,
                        tensors[i].c_str(), owners[i].c_str());
                return false;
            }
            continue;
        }
        const ggml_tensor * sums   = ggml_get_tensor(ctx, (tensors[i] + SUMS).c_str());
        const ggml_tensor * counts = ggml_get_tensor(ctx, (tensors[i] + COUNTS).c_str());
        if (!sums || !counts || sums->type != GGML_TYPE_F32 || counts->type != GGML_TYPE_F32 || ggml_n_dims(sums) > 2 ||
            ggml_nelements(counts) != sums->ne[1]) {
            LOG_ERR("error: --in-file %s: tensor %s: needs %s and %s in F32, a count for each matrix; collect it again\n", name,
                    tensors[i].c_str(), SUMS.c_str(), COUNTS.c_str());
            return false;
        }
        input & dst = inputs[tensors[i]];
        if (dst.sums.empty()) {
            dst.n_values = sums->ne[0];
            dst.n_mat    = sums->ne[1];
            dst.allocate();
        } else if (dst.n_values != sums->ne[0] || dst.n_mat != sums->ne[1]) {
            LOG_ERR("error: --in-file %s: tensor %s has %lld x %lld second moments, elsewhere %lld x %lld: not the same model, or another --moments-columns\n", name,
                    tensors[i].c_str(), (long long) sums->ne[0], (long long) sums->ne[1], (long long) dst.n_values, (long long) dst.n_mat);
            return false;
        }
        const auto add_sum   = [&](int64_t j, float v) { dst.sums[j]   += v; return std::isfinite(v); };
        const auto add_count = [&](int64_t j, float v) { dst.counts[j] += std::lround(v); return v >= 0 && v < 1e15f; };
        if (!each_float(data, file.get(), sums->name, ggml_nelements(sums), add_sum) ||
            !each_float(data, file.get(), counts->name, dst.n_mat, add_count)) {
            LOG_ERR("error: --in-file %s: tensor %s: truncated, or not finite; collect it again\n", name, tensors[i].c_str());
            return false;
        }
    }
    return true;
}

bool ggml_ext_moments::write_file(gguf_context * file, const std::string & path) const {
    FILE * out = ggml_fopen(path.c_str(), "wb");
    if (!out) {
        return false;
    }
    const bool written = gguf_write_to_file_ptr(file, out, false);
    return fclose(out) == 0 && written; // buffered data may not fit the disk
}

void ggml_ext_moments::write(gguf_context * file, const std::string & path) {
    // tensors that point to the sums, as a copy might not fit
    std::unique_ptr<ggml_context, context_free> ctx(
        ggml_init({ /*.mem_size =*/ (2 * inputs.size() + 1) * ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
    std::vector<std::vector<float>> all_counts;
    if (!kind.empty() && !computing) {
        std::vector<const char *> tensors, owners;
        for (const auto & entry : input_of) {
            if (!inputs.at(entry.second).sums.empty()) {
                tensors.push_back(entry.first.c_str());
                owners.push_back(entry.second.c_str());
            }
        }
        gguf_set_val_str(file, KEY_KIND, kind.c_str());
        gguf_set_val_u32(file, KEY_BLOCK, GGML_EXT_MOMENTS_BLOCK);
        gguf_set_arr_str(file, KEY_TENSORS, tensors.data(), tensors.size());
        gguf_set_arr_str(file, KEY_INPUTS, owners.data(), owners.size());
        all_counts.reserve(inputs.size());
        for (auto & entry : inputs) {
            input & in = entry.second;
            if (in.sums.empty()) {
                continue;
            }
            all_counts.emplace_back(in.counts.begin(), in.counts.end());
            const struct { const std::string & suffix; int64_t n; float * data; } parts[] = {
                { SUMS, in.n_values, in.sums.data() }, { COUNTS, 1, all_counts.back().data() } };
            for (const auto & part : parts) {
                ggml_tensor * tensor = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, part.n, in.n_mat);
                ggml_set_name(tensor, (entry.first + part.suffix).c_str());
                tensor->data = part.data;
                gguf_add_tensor(file, tensor);
            }
        }
    } else if (!kind.empty() && !warned_intermediate) {
        LOG_INF("\n%s: intermediate files hold no second moments; the last one does\n", "save_imatrix");
        warned_intermediate = true;
    }

    const std::string temporary = path + ".tmp";
    std::error_code   error;
    if (write_file(file, temporary)) {
        std::filesystem::rename(std::filesystem::u8path(temporary), std::filesystem::u8path(path), error);
        if (!error) {
            return;
        }
    }
    LOG_ERR("error: cannot write %s: %s\n", path.c_str(), error ? error.message().c_str() : "is the disk full?");
    std::filesystem::remove(std::filesystem::u8path(temporary), error);
    if (!computing) {
        exit(1);
    }
}

// --- plan --------------------------------------------------------------------------------------------------------------------

// Matrices outside the blocks, such as the output matrix, belong to the last layer.
static int find_layer(const std::string & weight, int n_layers) {
    int layer = n_layers - 1;
    sscanf(weight.c_str(), "blk.%d.", &layer);
    return layer;
}

bool ggml_ext_moments::is_selected(const std::string & weight) const {
    const int layer = find_layer(weight, n_layers);
    return last_layer < 0 || (first_layer <= layer && layer <= last_layer);
}

bool ggml_ext_moments::is_full(int64_t n_cols) const {
    const int limit = ggml_ext_get_moments_options().columns;
    return kind == "full" && (!limit || n_cols <= limit);
}

static bool is_supported(const ggml_tensor * node) {
    return node->src[1]->type == GGML_TYPE_F32 && (node->op == GGML_OP_MUL_MAT_ID || node->src[0]->ne[2] * node->src[0]->ne[3] == 1);
}

// Register a matrix and its input. Return false if a loaded file disagrees.
bool ggml_ext_moments::register_input(const ggml_tensor * node, const std::string & weight) {
    const ggml_tensor * matrix = node->src[0], * x = node->src[1];
    const bool experts = node->op == GGML_OP_MUL_MAT_ID;
    if (!is_selected(weight)) {
        return true;
    }
    if (!is_supported(node)) {
        if (!warned_unsupported) {
            LOG_WRN("%s: no second moments of matrices with a third dimension, such as %s\n", "compute_imatrix", weight.c_str());
        }
        warned_unsupported = true;
        return true;
    }
    const int64_t n_values = ggml_ext_n_moments(x->ne[0], is_full(x->ne[0])), n_mat = experts ? matrix->ne[2] : 1;
    const auto place = std::make_pair(source(x, experts ? node->src[2] : nullptr), find_layer(weight, n_layers));
    const std::string owner = sources.emplace(place, weight).first->second;
    const auto known = input_of.emplace(weight, owner);
    if (known.first->second != owner) {
        LOG_ERR("error: --in-file: tensor %s shares the input of %s, in this model that of %s: moments of another model\n", weight.c_str(),
                known.first->second.c_str(), owner.c_str());
        return false;
    }
    input & in = inputs[owner];
    in.n_cols  = x->ne[0];
    if (in.n_mat == 0) {
        in.n_values = n_values;
        in.n_mat    = n_mat;
    } else if (in.n_values != n_values || in.n_mat != n_mat) {
        LOG_ERR("error: --in-file: tensor %s has %lld x %lld second moments, this model needs %lld x %lld: moments of another model, or with another --moments-columns\n",
                weight.c_str(), (long long) in.n_values, (long long) in.n_mat, (long long) n_values, (long long) n_mat);
        return false;
    }
    return true;
}

bool ggml_ext_moments::plan(int layers, int n_threads, const std::function<bool()> & decode) {
    if (!collects) {
        return true;
    }
    n_layers = layers;
    if (last_layer >= n_layers) {
        LOG_ERR("error: --layers %d-%d: the model has %d layers, 0-%d\n", first_layer, last_layer, n_layers, n_layers - 1);
        return false;
    }
    planning = true;
    const bool decoded = decode();
    planning = false;
    if (!decoded || failed) {
        if (!decoded) {
            LOG_ERR("%s: failed to eval\n", "compute_imatrix");
        }
        return false;
    }

    double  needed = 0, to_allocate = 0, as_block = 0;
    int64_t widest = 0;
    for (const auto & source : sources) {
        const input & in     = inputs.at(source.second);
        const int64_t n_cols = in.n_cols;
        const double  bytes  = sizeof(float) * (double) in.n_mat * in.n_values;
        needed      += bytes;
        to_allocate += in.sums.empty() ? bytes : 0;
        as_block    += sizeof(float) * (double) in.n_mat * ggml_ext_n_moments(n_cols, false);
        widest       = std::max(widest, n_cols);
    }
    LOG_INF("%s: second moments of %zu inputs (%s): %.1f MiB\n", "compute_imatrix", sources.size(), kind.c_str(), needed / MIB);
    const double available = available_memory();
    to_allocate += sizeof(float) * (double) ggml_ext_syrk::packed_size(widest);
    if (available >= 0 && to_allocate > available) {
        char block[64] = "";
        if (kind == "full") {
            snprintf(block, sizeof(block), "--moments block takes %.1f MiB, ", as_block / MIB);
        }
        LOG_ERR("error: --moments %s: %.1f MiB more are needed and %.1f MiB of memory are available; %s--layers A-B splits the work\n",
                kind.c_str(), to_allocate / MIB, available / MIB, block);
        return false;
    }
    sources.clear();
    packed.resize(ggml_ext_syrk::packed_size(widest));

    cpu.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu.get())), "ggml_backend_set_n_threads");
    set_n_threads(cpu.get(), n_threads);
    graph_ctx.reset(ggml_init({ /*.mem_size =*/ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), /*.mem_buffer =*/ nullptr,
                                /*.no_alloc =*/ false }));
    ggml_tensor * pack = ggml_custom_4d(graph_ctx.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0,
                                        [](ggml_tensor *, int ith, int nth, void * job) { ((ggml_ext_syrk *) job)->pack(ith, nth); }, GGML_N_TASKS_MAX, &job);
    ggml_tensor * add = ggml_custom_4d(graph_ctx.get(), GGML_TYPE_F32, 1, 1, 1, 1, &pack, 1, // after pack, on all threads
        [](ggml_tensor *, int, int, void * job) { ((ggml_ext_syrk *) job)->add(); }, GGML_N_TASKS_MAX, &job);
    graph = ggml_new_graph(graph_ctx.get());
    ggml_build_forward_expand(graph, add);
    return true;
}

// --- collection --------------------------------------------------------------------------------------------------------------

bool ggml_ext_moments::collect(const ggml_tensor * node, bool ask, const std::string & weight, const std::function<bool()> & upstream) {
    computing = true;
    const bool is_collected = upstream(); // also exits if an activation is not finite
    computing = false;
    if (planning) {
        failed = failed || (is_collected && !register_input(node, weight));
        return false; // nothing to wait for
    }
    if (!ask && collects) {
        add(node, weight);
    }
    return is_collected;
}

void ggml_ext_moments::add(const ggml_tensor * node, const std::string & weight) {
    const auto known = input_of.find(weight);
    if (!is_selected(weight) || !is_supported(node)) {
        return;
    }
    if (known == input_of.end()) {
        if (!warned_unknown) {
            LOG_WRN("%s: no second moments of matrices that a few tokens do not use, such as %s\n", "compute_imatrix", weight.c_str());
        }
        warned_unknown = true;
        return;
    }
    input &      in   = inputs.at(known->second);
    const source source_now = { node->src[1], node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr };
    if (known->second == weight) {
        in.last = source_now;
        add_rows(node, in);
    } else if (in.last != source_now) {
        LOG_ERR("error: --moments: tensor %s no longer shares the input of %s\n", weight.c_str(), known->second.c_str());
        exit(1);
    }
}

// Get the data of a tensor, copied to the host if it is on a device.
static const char * host_data(const ggml_tensor * t, std::vector<char> & copy) {
    if (ggml_backend_buffer_is_host(t->buffer)) {
        return (const char *) t->data;
    }
    copy.resize(ggml_nbytes(t));
    ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
    return copy.data();
}

void ggml_ext_moments::add_rows(const ggml_tensor * node, input & dst) {
    const ggml_tensor * x = node->src[1];
    const char * data = host_data(x, activations);
    const auto   row  = [&](int64_t i1, int64_t i2, int64_t i3) { return (const float *) (data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]); };
    if (dst.sums.empty()) {
        dst.allocate();
    }
    if (node->op == GGML_OP_MUL_MAT_ID) { // ids [used, tokens], x [columns, used or 1, tokens]
        const ggml_tensor * experts = node->src[2];
        const char * expert_ids = host_data(experts, ids);
        for (int64_t expert = 0; expert < dst.n_mat; ++expert) {
            rows.clear();
            for (int64_t token = 0; token < experts->ne[1]; ++token) {
                for (int64_t k = 0; k < experts->ne[0]; ++k) {
                    if (*(const int32_t *) (expert_ids + token * experts->nb[1] + k * experts->nb[0]) == expert) {
                        rows.push_back(row(k % x->ne[1], token, 0));
                    }
                }
            }
            add_expert(dst, x->ne[0], expert);
        }
        return;
    }
    rows.clear();
    for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < x->ne[1]; ++i1) {
                rows.push_back(row(i1, i2, i3));
            }
        }
    }
    add_expert(dst, x->ne[0], 0);
}

// Add the rows in `rows`.
void ggml_ext_moments::add_expert(input & dst, int64_t n_cols, int64_t expert) {
    for (size_t first = 0; first < rows.size(); first += GGML_EXT_SYRK_ROWS) {
        job.rows      = rows.data() + first;
        job.n_rows    = (int) std::min<size_t>(GGML_EXT_SYRK_ROWS, rows.size() - first);
        job.n_cols    = n_cols;
        job.full      = is_full(n_cols);
        job.packed    = packed.data();
        job.totals    = dst.sums.data() + expert * dst.n_values;
        job.next_tile = 0;
        ggml_backend_graph_compute(cpu.get(), graph);
    }
    dst.counts[expert] += (int64_t) rows.size();
}
