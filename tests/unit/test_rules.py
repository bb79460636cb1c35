"""The type of each tensor: the plan against llama-quantize's dry run for every architecture, the rules without a library, odd input."""

import os
import re
import struct
import subprocess
import time
from types import SimpleNamespace

import gguf
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES, quantize
from ggml_ext._base.errors import UserError
from ggml_ext._formats import gguf_file
from ggml_ext._formats.tensor_types import TARGET_TYPES
from ggml_ext._native import library
from ggml_ext._plan import plan as _plan
from ggml_ext._plan import rules as _rules
from ggml_ext._plan.file_types import FILE_TYPES, UPSTREAM_ALIASES, UPSTREAM_FILES
from ggml_ext._plan.planning import make_plan
from helpers.commands import run_main, tool
from helpers.errors import check_error
from helpers.importances import types_in_log, write_imatrix
from helpers.models import gaussian, write_gguf
from helpers.native import BUILD

T = gguf.GGMLQuantizationType
ITQ3_T = _plan.Choices(FILE_TYPES["itq3_t"])


@pytest.fixture(scope="module")
def rules() -> library.Rules:
    loaded_rules = library.load_rules()
    if loaded_rules is None:
        pytest.skip("libllama is not built into the installed package")
    return loaded_rules


def make_tensor(name, *ne):
    return gguf_file.Tensor(name, ne or (256, 4), T.F16, 0, 0)


def make_header(arch, names, tied=False, **keys):
    """Return what the rules read of a model, without file and weights."""
    keys = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()}
    tensors = [make_tensor(n) if isinstance(n, str) else n for n in names] + ([] if tied else [make_tensor("output.weight")])

    def value(key, default=None):
        return None if isinstance(keys.get(key), list) else keys.get(key, default)

    integers = lambda key: keys[key] if isinstance(keys.get(key), list) else None  # noqa: E731
    return SimpleNamespace(path="in.gguf", tensors=tensors, value=value, integers=integers, metadata=keys)


def plan_types(file, name="itq3_t", **options):
    types, warnings = _rules.rule_types(file, FILE_TYPES[name], **options)
    assert not warnings
    return {t.name: None if q is None else q.name for t, q in zip(file.tensors, types, strict=True)}


# --- against llama-quantize -------------------------------------------------------------------------------------------

def read_upstream_table(name: str) -> list[str]:
    """Return the strings of a table in llama.cpp's src/llama-arch.cpp, in order."""
    path = BUILD / "llama.cpp" / "src" / "llama-arch.cpp"
    if not path.exists():
        pytest.skip(f"{path} is missing: GGML_EXT_TEST_BUILD names another build folder")
    body = re.search(rf" {name} = \{{\n(.*?)\n\}};", path.read_text(), re.S)[1]
    return [s for s in re.findall(r'\{ *\w+, *"([^"]*)" *\}', body) if s != "(unknown)"]


def weight_names() -> list[str]:
    """Return the names of all tensors that llama.cpp knows, in the first layer."""
    return [f"{n.replace('%d', '0')}.weight" for n in dict.fromkeys(read_upstream_table("LLM_TENSOR_NAMES"))]


def has_layer(name: str) -> bool:
    """Return False for expert tensors without a layer, which the rules refuse."""
    return name.startswith("blk.") or not re.search("ffn_(up|gate|down)", name)


FORMATS = {"u32": (gguf.GGUFValueType.UINT32, "I"), "i32": (gguf.GGUFValueType.INT32, "i"), "f32": (gguf.GGUFValueType.FLOAT32, "f"),
           "bool": (gguf.GGUFValueType.BOOL, "?")}
KEYS = {"context_length": 512, "embedding_length": 256, "block_count": 2, "feed_forward_length": 512, "attention.head_count": 4,
        "attention.head_count_kv": 2, "expert_feed_forward_length": 64, "ssm.conv_kernel": 4, "ssm.inner_size": 4, "ssm.state_size": 4,
        "ssm.time_step_rank": 4, "ssm.group_count": 4, "attention.indexer.kpool": 2, "attention.indexer.top_k": 2,
        "attention.indexer.head_count": 1, "attention.indexer.key_length": 1, "expert_shared_count": 1, "attention.sliding_window": 1,
        "attention.kv_lora_rank": 1, "attention.q_lora_rank": 1, "hyper_connection.count": 4}
KEYS_OF_FLOATS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base_swa", "logit_scale")


def scalar(key, kind, value):
    vtype, fmt = FORMATS[kind]
    return gguf_file.KeyValue(key, vtype, value, struct.pack(f"<I{fmt}", vtype, value))


def dry_run(path, arch, tensors, n_expert, type_name, kinds, options=(), **own):
    """Return the types of llama-quantize's dry run on a sparse file, by name, or None if no header of this test fits the architecture.

    Missing keys are added as the program asks for them.

    Args:
        path: the file to write.
        arch: the architecture.
        tensors: names and shapes.
        n_expert: the number of experts.
        type_name: the type to quantize to.
        kinds: the value types of missing keys, remembered between calls.
        options: of llama-quantize.
        own: keys that replace those of KEYS, with two underscores for a dot.
    """
    keys = {"general.architecture": gguf_file.string_value("general.architecture", arch)}

    def add(key, kind, value=1):
        keys[key] = scalar(key, kind, value)

    own = {key.replace("__", "."): value for key, value in own.items()}
    for key, value in {**KEYS, **own, "expert_count": n_expert, "expert_used_count": min(n_expert, 2)}.items():
        add(f"{arch}.{key}", "u32", value)
    for key in KEYS_OF_FLOATS:
        add(f"{arch}.{key}", "f32")
    for _ in range(30):
        with open(path, "wb") as f:
            f.write(gguf_file.pack_header(keys, tensors, [t.type for t in tensors], 32))
            f.truncate(f.tell() + sum(gguf_file.pad(2 * t.n_elements, 32) for t in tensors))
        done = subprocess.run([tool("llama-quantize"), "--dry-run", *options, path, type_name.upper()], capture_output=True, text=True, errors="replace",
                              env={**os.environ, "GGML_NO_BACKTRACE": "1"})
        log = done.stdout + done.stderr
        if done.returncode == 0:
            break
        if wrong := re.search(r"key (\S+) has wrong type \w+ but expected type (u32|i32|f32|bool)\b", log):
            kinds[wrong[1].removeprefix(f"{arch}.")] = wrong[2]
        missing = wrong or re.search(r": key not found in model: (\S+)", log)
        if not missing:
            return None
        add(missing[1], kinds.get(missing[1].removeprefix(f"{arch}."), "u32"))
    types = types_in_log(log)
    assert len(types) == len(tensors), log
    return types


@pytest.mark.slow
def test_every_architecture_matches_llama_quantize(rules, tmp_path):
    """All names that llama.cpp knows, with rows that fit and that do not, tied embeddings and not, with experts and without."""
    names, compared, kinds, path = weight_names(), [], {}, tmp_path / "in.gguf"
    assert len(names) > 250
    for i, arch in enumerate(read_upstream_table("LLM_ARCH_NAMES")):
        n_expert, rows = (0, 8, 4)[i % 3], (256, 320, 96, 512, 100, 256, 256)
        tensors = [make_tensor(name, rows[(i + k) % 7], *((4, 2) if "exps" in name else (1 + k % 3,))) for k, name in enumerate(names)]
        tensors = [t for t in tensors if (i % 2 or t.name != "output.weight") and (not n_expert or has_layer(t.name))]
        info = list(WEIGHT_TYPES.values())[i % 7]
        if expected := dry_run(path, arch, tensors, n_expert, info.name, kinds):
            plan = make_plan(gguf_file.GGUFFile(path), _plan.Choices(FILE_TYPES[info.name]))
            assert {t.name: t.type.name.lower() for t in plan.tensors} == expected, (arch, info.name, n_expert)
            assert not plan.warnings
            compared.append(arch)
    print(f"{len(compared)} architectures compared")
    # Some need arrays that this test does not provide, one has a name but no model.
    assert len(compared) > 130 and {"llama", "falcon", "glm5-next", "clip", "rwkv7", "t5", "qwen3moe", "bert"} <= {*compared}


# --- upstream types ---------------------------------------------------------------------------------------------------

IN_LAYERS = ("attn_v", "attn_k", "attn_output", "attn_qkv", "ffn_down", "ffn_up", "ffn_gate", "ffn_down_exps")


def many_layers(n_layer, n_expert, tied, lengths):
    """Return every name in the first layer and some in others, not in the loader's order. lengths: of the rows."""
    layers = sorted({*range(1, 6), n_layer // 8, n_layer // 2, n_layer - 2, n_layer - 1} & {*range(1, n_layer)})
    tensors = [make_tensor(f"blk.{i}.{name}.weight", 256, 4, 2) for i in reversed(layers) for name in IN_LAYERS]
    names = [n for n in weight_names() if (not tied or n != "output.weight") and (not n_expert or has_layer(n))]
    return tensors + [make_tensor(n, lengths[k % len(lengths)], *((4, 2) if "exps" in n else (2,))) for k, n in enumerate(reversed(names))]


def compare_upstream(path, arch, name, kinds, n_layer, n_expert=0, tied=False, n_head=4, imatrix=None, overrides=()):
    """Compare the plan with llama-quantize's dry run; return False if no header of this test fits the architecture."""
    tensors = many_layers(n_layer, n_expert, tied, (256, 512) if name == "q1_0" else (256, 320, 96, 512))  # q1_0 has no fallback
    options = [f for text in overrides for f in ("--tensor-type", text)] + (["--imatrix", imatrix] if imatrix else [])
    expected = dry_run(path, arch, tensors, n_expert, name, kinds, options, block_count=n_layer, attention__head_count=n_head)
    if expected:
        choices = _plan.Choices(FILE_TYPES[name], overrides=tuple(map(_plan.Override.parse, overrides)))
        plan = make_plan(gguf_file.GGUFFile(path), choices, imatrix is not None)
        assert {t.name: t.type.name.lower() for t in plan.tensors} == expected, (arch, name, n_layer, n_expert, n_head)
        assert not plan.warnings or name == "f16"  # f16 is the file's type
    return bool(expected)


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory):
    return write_imatrix(tmp_path_factory.mktemp("imatrix") / "imatrix.gguf", {"blk.0.attn_q.weight": (gaussian(1, 256) ** 2, [1])})


@pytest.mark.slow
def test_every_architecture_matches_in_upstream_types(rules, tmp_path, imatrix):
    kinds, archs, names = {}, read_upstream_table("LLM_ARCH_NAMES"), list(UPSTREAM_FILES)
    compared = [
        arch for i, arch in enumerate(archs)
        if arch != "clip" and compare_upstream(tmp_path / "in.gguf", arch, names[i % len(names)], kinds, (24, 80, 32)[i % 3], (0, 8, 4, 0, 2)[i % 5],
                                            i % 2 == 0, (4, 8)[i % 4 // 2], imatrix if i % 3 else None)]
    print(f"{len(compared)} architectures compared")
    assert len(compared) > 120 and {"llama", "falcon", "glm5-next", "qwen2", "qwen3moe", "bert"} <= {*compared}


@pytest.mark.slow
@pytest.mark.parametrize("n_layer", [68, 80])
def test_attention_values_are_better_in_70b_models(rules, tmp_path, n_layer):
    """Applies to files in Q3_K. llama.cpp defines such models in the code of each architecture."""
    kinds, path = {}, tmp_path / "in.gguf"
    assert sum(compare_upstream(path, arch, "q3_k_s", kinds, n_layer) for arch in read_upstream_table("LLM_ARCH_NAMES") if arch != "clip") > 120
    assert compare_upstream(path, "llama", "q3_k_s", kinds, n_layer, n_head=2)  # as many query heads as key heads: 65B


MODELS = [("llama", 32, 0, 4), ("falcon", 32, 0, 4), ("llama", 32, 0, 8), ("llama", 16, 8, 4), ("llama", 80, 0, 16), ("llama", 17, 4, 4), ("llama", 3, 0, 2)]


@pytest.mark.parametrize("name", [*UPSTREAM_FILES, *UPSTREAM_ALIASES])
def test_every_upstream_type_matches_llama_quantize(rules, tmp_path, imatrix, name):
    """Without and with an imatrix. Overrides remove tensors from the count; both regex libraries match these patterns alike."""
    for i, (arch, n_layer, n_expert, n_head) in enumerate(MODELS):
        for used in (None, imatrix):
            # llama-quantize silently ignores them in a file of floats.
            overrides = [] if name in ("f16", "bf16", "f32") else [r"blk\.[12]\.attn_v=q8_0", "ffn_down=q6_k"][: i % 3]
            assert compare_upstream(tmp_path / "in.gguf", arch, name, {}, n_layer, n_expert, i % 2 == 0, n_head, used, overrides)


def test_upstream_type_names_match_llama_quantize(rules):
    """Covers the types that gguf can read, with their file types; a new one is noticed."""
    path = BUILD / "llama.cpp" / "tools" / "quantize" / "quantize.cpp"
    if not path.exists():
        pytest.skip(f"{path} is missing: GGML_EXT_TEST_BUILD names another build folder")
    table = re.search(r"QUANT_OPTIONS = \{\n(.*?)\n\};", path.read_text(), re.S)[1]
    options = dict(re.findall(r'\{ *"(\w+)", *LLAMA_FTYPE_(\w+),', table))
    quantized_types = {name: ftype for name, ftype in options.items() if name != "COPY"}
    assert {*quantized_types} - {name.upper() for name in (*UPSTREAM_FILES, *UPSTREAM_ALIASES)} <= {"Q1_0"}
    for name in (*UPSTREAM_FILES, *UPSTREAM_ALIASES):
        assert FILE_TYPES[name].id == gguf.LlamaFileType[quantized_types[name.upper()]]


def test_heads_are_read_from_the_first_layer(rules):
    """The first number of an array counts, as in llama.cpp; keys and values have the query's heads by default."""
    def type_of_values(**keys):
        return plan_types(make_header("llama", ["blk.0.attn_v.weight"], block_count=4, **keys), "q2_k")["blk.0.attn_v.weight"]

    key, kv = "attention.head_count", "attention.head_count_kv"
    assert type_of_values(**{key: 8, kv: 2}) == type_of_values(**{key: [8, 1], kv: [2, 8]}) == "Q4_K"
    assert type_of_values(**{key: 8, kv: 4}) == type_of_values(**{key: 8}) == type_of_values(**{key: [8, 8], kv: [8, 1]}) == "Q3_K"
    assert type_of_values() == type_of_values(**{key: 8, kv: 0}) == type_of_values(**{key: 8, kv: []}) == "Q3_K"


@pytest.mark.parametrize("n_layer", [None, 0, -1, 513, 2**32, "8", 8.0, True])
def test_model_without_layers_is_refused_by_counting_rules(rules, n_layer):
    file = make_header("llama", ["blk.0.ffn_down.weight"], **({} if n_layer is None else {"block_count": n_layer}))
    with pytest.raises(UserError, match=r"in\.gguf: llama\.block_count is .*, must be 1 to 512: .* rules for q4_k_m .* --pure"):
        plan_types(file, "q4_k_m")
    assert plan_types(file, "q4_k_m", named=[True, True]) == {"blk.0.ffn_down.weight": "Q4_K", "output.weight": "Q4_K"}
    assert {*plan_types(file, "q8_0").values()} == {"Q8_0"}


def test_clip_has_no_layers(rules):
    """llama.cpp reads none of its numbers; with some types llama-quantize fails an assertion."""
    names = [f"v.blk.{i}.{name}.weight" for i in range(3) for name in ("attn_v", "attn_q", "ffn_down")]
    for name in UPSTREAM_FILES:
        assert None not in plan_types(make_header("clip", names, tied=True, block_count=7), name).values()
    assert plan_types(make_header("clip", names, tied=True), "q4_k_m")["v.blk.0.ffn_down.weight"] == "Q6_K"


def test_upstream_mixes_need_the_library(monkeypatch):
    file = make_header("llama", ["token_embd.weight", "blk.0.attn_v.weight", "blk.0.attn_norm.weight"], block_count=1)
    monkeypatch.setattr(library, "load_rules", lambda: None)
    with pytest.raises(UserError, match="--type q4_k_m: llama.cpp's rules mix .*, and libllama is not in the package: reinstall .* --pure"):
        plan_types(file, "q4_k")
    assert [*plan_types(file, "q4_k", named=[True] * 4).values()] == ["Q4_K", "Q4_K", None, "Q4_K"]
    assert [*plan_types(file, "q8_0").values()] == ["Q8_0", "Q8_0", None, "Q8_0"]


# --- fallbacks --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_per_row", [32, 64, 96, 100])
def test_fallbacks_of_library_and_list_agree(rules, n_per_row, monkeypatch):
    block_of = {t: gguf.GGML_QUANT_SIZES[t][0] for t in TARGET_TYPES.values() if t.name.lower() not in TYPES}
    unfit = [t for t, block in block_of.items() if n_per_row % block]
    fallbacks = [_rules.upstream_fallback_type(t, n_per_row) for t in unfit]
    monkeypatch.setattr(library, "load_rules", lambda: None)
    assert unfit and fallbacks == [_rules.upstream_fallback_type(t, n_per_row) for t in unfit]
    assert all(f is None or n_per_row % gguf.GGML_QUANT_SIZES[f][0] == 0 for f in fallbacks)


# --- by hand, and the rules without a library -------------------------------------------------------------------------

@pytest.fixture(params=["library", "list"])
def source(request, monkeypatch):
    if request.param == "list":
        monkeypatch.setattr(library, "load_rules", lambda: None)
    else:
        request.getfixturevalue("rules")
    return request.param


@pytest.mark.parametrize(("name", "ne", "expected"), [
    ("blk.0.ffn_up.weight", (256, 2), True),
    ("blk.0.ffn_up.weight", (256, 1), False),
    ("blk.0.ffn_up.weight", (256, 1, 2), True),
    ("blk.0.ffn_up.bias", (256, 2), False),
    ("blk.0.attn_norm.weight", (256, 2), False),
    ("blk.0.ffn_gate_inp.weight", (256, 2), False),
    ("blk.0.ssm_conv1d.weight", (4, 256), False),
    ("position_embd.weight", (256, 9), False),
    ("token_types.weight", (256, 2), False),
    ("blk.0.time_mix_w1.weight", (256, 9), False),
    ("v.patch_embd.weight", (16, 16), False),
    ("output.weight", (256, 9), True),
])
def test_which_tensors_are_quantized(source, name, ne, expected):
    assert (plan_types(make_header("llama", [make_tensor(name, *ne)], tied=True))[name] is not None) == expected


@pytest.mark.parametrize(("name", "ne", "arch", "n_expert", "tied", "expected"), [
    ("output.weight", (256, 9), "llama", 0, False, "Q6_K"),
    ("output.weight", (320, 9), "llama", 0, False, "Q8_0"),
    ("output.weight", (256, 9), "falcon", 0, False, "Q8_0"),
    ("token_embd.weight", (256, 9), "llama", 0, True, "Q6_K"),
    ("token_embd.weight", (256, 9), "llama", 0, False, "Q3_K"),
    ("token_embd.weight", (320, 9), "llama", 0, False, "ITQ3_T64"),
    ("per_layer_token_embd.weight", (256, 9), "gemma3n", 0, False, "Q3_K"),
    ("blk.0.attn_k.weight", (256, 9), "llama", 8, False, "Q8_0"),
    ("blk.0.attn_v.weight", (256, 9), "llama", 8, False, "Q8_0"),
    ("blk.0.attn_q.weight", (256, 9), "llama", 8, False, "ITQ3_S"),
    ("blk.0.attn_k.weight", (256, 9), "llama", 4, False, "ITQ3_S"),
    ("blk.0.attn_q_a.weight", (256, 9), "glm5-next", 0, False, "Q8_0"),
    ("blk.0.attn_q_a.weight", (256, 9), "deepseek2", 0, False, "ITQ3_S"),
])
def test_types_by_role(source, name, ne, arch, n_expert, tied, expected):
    file = make_header(arch, [make_tensor(name, *ne)], tied or name == "output.weight", expert_count=n_expert)
    is_listed = source == "library" or arch not in ("falcon", "glm5-next")  # these have rules that the list lacks
    assert (plan_types(file, "itq3_s")[name] == expected) == is_listed


def test_list_differs_from_the_library_in_known_cases(rules, monkeypatch):
    """Compares all names and architectures: falcon's output matrix, and a model that keeps or raises many small matrices."""
    names = list(filter(has_layer, weight_names()))

    def answer(arch: str, n_expert: int):
        return {*plan_types(make_header(arch, names, expert_count=n_expert)).items()}

    library_types = {(arch, n): answer(arch, n) for arch in read_upstream_table("LLM_ARCH_NAMES") for n in (0, 8)}
    monkeypatch.setattr(library, "load_rules", lambda: None)
    listed = {n: answer("any", n) for n in (0, 8)}
    different = {(arch, n): types ^ listed[n] for (arch, n), types in library_types.items() if types != listed[n]}
    assert {*different} == {(arch, n) for arch in ("falcon", "glm5-next") for n in (0, 8)}
    assert {name for name, _ in different["falcon", 0]} == {"output.weight"}


def test_embedding_and_output_options_set_types(source):
    embd = ["token_embd.weight"]
    assert plan_types(make_header("llama", embd), token_embd=T.Q8_0, output=T.F16) == {embd[0]: "Q8_0", "output.weight": "F16"}
    assert plan_types(make_header("llama", embd, tied=True), output=T.F32) == {embd[0]: "F32"}  # type 0


def test_library_that_does_not_load_warns(monkeypatch):
    def fail():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(library, "load_rules", fail)
    types, (warning,) = _rules.rule_types(make_header("llama", ["blk.0.attn_q.weight"]), FILE_TYPES["itq3_t"])
    assert types == [T.ITQ3_T, T.Q6_K] and warning.startswith("libcuda.so.1: ") and "short list" in warning
    assert _rules.upstream_fallback_type(T.Q4_K, 96) == T.Q5_0


def test_other_libllama_is_refused(tmp_path, lib):
    with pytest.raises(UserError, match=r"has no ggml_ext_file_rule_types: it is not the llama\.cpp of this package; reinstall"):
        library.Rules(lib.path)


# --- odd input --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", ["", "no-such", "l" * 100_000, "llama\0", "%s%n", "ll\N{GREEK SMALL LETTER ALPHA}", 7])
def test_unknown_architecture_has_general_rules(rules, arch):
    names = ["blk.0.attn_q.weight", "blk.0.ffn_gate_inp.weight", "token_embd.weight"]
    types, warnings = _rules.rule_types(make_header(arch, names), FILE_TYPES["itq3_t"])
    assert types == [T.ITQ3_T, None, T.Q3_K, T.Q6_K]
    assert [w for w in warnings if "does not know the architecture" in w and len(w) < 300] == warnings
    assert bool(warnings) == (arch != "llama\0")  # C's string ends there


def test_unknown_architecture_warns(rules, tmp_path):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.attn_q.weight": gaussian(8, 256)}, arch="no-such")
    done = run_main(quantize.main, source, tmp_path / "out.gguf", "--type", "itq3_t", "--importance", "none")
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("warning: this llama.cpp does not know the architecture 'no-such' and will not load the file")


@pytest.mark.parametrize("n_expert", ["8", -1, 2**32, 2**63, 8.0, None, float("nan")])
def test_damaged_numbers_of_experts_count_as_none(source, n_expert):
    assert plan_types(make_header("llama", ["blk.0.attn_k.weight"], expert_count=n_expert))["blk.0.attn_k.weight"] == "ITQ3_T"


@pytest.mark.parametrize("name", ["ffn_up.weight", "blk.-1.ffn_down.weight", "blk.512.ffn_gate.weight", "blk.99999999999.ffn_up.weight"])
def test_experts_outside_layers_are_refused(rules, name, tmp_path):
    """llama-quantize refuses them too."""
    source = write_gguf(tmp_path / "in.gguf", {name: gaussian(8, 256)}, fill=lambda w: w.add_expert_count(4))
    done = run_main(quantize.main, source, tmp_path / "out.gguf", "--type", "itq3_t", "--importance", "none")
    check_error(done, "in.gguf", name, "layer", "convert the model again")
    assert not (tmp_path / "out.gguf").exists()


def test_names_may_have_any_bytes(rules):
    names = ["", "a", "weight", "%s%n%d.weight", "\N{SNOWMAN}" * 21, "x" * 63, "blk.0.\n.weight", "blk.999999999999999.attn_q.weight", "q\0.weight"]
    types, _ = _rules.rule_types(make_header("llama", [make_tensor(n) for n in names], expert_count=3), FILE_TYPES["itq3_t"])
    assert types[3] == types[6] == types[7] == T.ITQ3_T and types[0] is None and types[4] is types[5] is None
    huge = [make_tensor("a.weight", 2**62, 1), make_tensor("b.weight", 1, 1, 1, 2**62), make_tensor("c.weight", 1)]
    assert plan_types(make_header("llama", huge)) == {"a.weight": None, "b.weight": "ITQ3_T", "c.weight": None, "output.weight": "Q6_K"}
    assert plan_types(make_header("llama", [], tied=True)) == {}


def test_file_types_without_rules_are_refused(rules):
    """Covers floats, unknown numbers and activation types."""
    for ftype in (0, 1, 32, 5, 39, 190, 10_000, -1):
        with pytest.raises(ValueError, match=f"file type {ftype} is not quantized"):
            rules.types(library.RuleModel("llama", 1), library.RuleFile(ftype), ["output.weight"], [(256, 4)], [False])
    with pytest.raises(ValueError, match="513 layers exceed the limit of 512"):
        rules.types(library.RuleModel("llama", 513), library.RuleFile(15), ["output.weight"], [(256, 4)], [False])


def test_rules_of_a_70b_model_are_fast(rules):
    """The limit is half a second; an AMD EPYC takes 5 ms at first and 2 ms later."""
    parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "attn_norm", "ffn_norm"]
    file = make_header("llama", [make_tensor(f"blk.{i}.{part}.weight", 8192, 8192) for i in range(80) for part in parts])
    start = time.thread_time()
    assert len(plan_types(file)) == 721
    assert time.thread_time() - start < 0.5
