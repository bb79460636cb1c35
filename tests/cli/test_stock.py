"""--type with upstream types: types and bytes of llama-quantize, all options, and no ggml-ext metadata."""

import json
import re
import subprocess

import gguf
import pytest

import ggml_ext
from ggml_ext import TYPES, inspect
from ggml_ext._calibration import calibration
from ggml_ext._plan.file_types import FILE_TYPES, UPSTREAM_ALIASES, UPSTREAM_FILES
from helpers import calibration_folder
from helpers.commands import quantize, run_main, run_quantize, tool
from helpers.errors import check_error, expect_error
from helpers.importances import assert_same_tensors, importances, llama_quantize, types_in_log, write_imatrix
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.native import run_upstream

workspace = calibration_folder.workspace  # the fixture
NEED_IMATRIX = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "q2_k_s", "iq3_xxs", "iq3_xs")
ROWS_TOO = ("q2_k", "q2_0", "q3_k_l", "q5_k_s", "q6_k", "q8_0", "iq4_xs", "tq1_0", "mxfp4_moe")
SOME_ROWS = {"attn_q": 320, "attn_k": 96, "ffn_down": 100}  # fits no block of 256, or of 32


def write_model(path, n_layer, n_head, n_expert=0, tied=False, rows=None):
    """Write every kind of matrix that the rules distinguish, with 8 rows of 256 or of `rows`, and a header for llama-quantize."""
    def fill(writer):
        writer.add_context_length(64)
        writer.add_embedding_length(256)
        writer.add_block_count(n_layer)
        writer.add_feed_forward_length(256)
        writer.add_head_count(n_head)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        if n_expert:
            writer.add_expert_count(n_expert)
            writer.add_expert_used_count(2)

    experts = (n_expert,) if n_expert else ()
    tensors = {"token_embd.weight": gaussian(16, 256), "output_norm.weight": gaussian(256)}
    tensors |= {} if tied else {"output.weight": gaussian(16, 256, seed=2)}
    for i in reversed(range(n_layer)):  # not the loader's order
        for k, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")):
            is_expert = n_expert and name.startswith("ffn_")
            shape = (*experts, 8) if is_expert else (8,)
            tensors[f"blk.{i}.{name}{'_exps' if is_expert else ''}.weight"] = gaussian(*shape, (rows or {}).get(name, 256), seed=7 * i + k)
        tensors[f"blk.{i}.attn_norm.weight"] = gaussian(256)
    return write_gguf(path, tensors, fill=fill)


def write_importances(path, model):
    """Write importances of all block weights."""
    shapes = {n: t.shape.tolist() for n, t in read_tensors(model).items() if len(t.shape) > 1 and n.startswith("blk.")}
    return write_imatrix(path, {n: (importances(ne[2] if len(ne) > 2 else 1, ne[0], seed=i), [1] * (ne[2] if len(ne) > 2 else 1))
                                for i, (n, ne) in enumerate(shapes.items())})


MODELS = {"small": (9, 2), "heads": (16, 8, 0, True), "experts": (8, 4, 8), "70b": (80, 16)}


@pytest.fixture(scope="module")
def models(tmp_path_factory, lib):
    """Write each of MODELS and its imatrix, by name."""
    where = tmp_path_factory.mktemp("models")
    sources = {name: write_model(where / f"{name}.gguf", *shape) for name, shape in MODELS.items()}
    sources["odd"] = write_model(where / "odd.gguf", 4, 2, rows=SOME_ROWS)
    return {name: (path, write_importances(where / f"{name}.imatrix.gguf", path)) for name, path in sources.items()}


def read_metadata(path) -> dict:
    """Return the metadata without the directory of the imatrix, which ggml-ext leaves out."""
    metadata = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    return {k: v for k, v in metadata.items() if k not in ("quantize.imatrix.file", "quantize.imatrix.dataset")}


def compare(tmp_path, source, name, ours=(), theirs=(), imatrix=None):
    """Write both files, compare them, and return the quantizer's output."""
    importance = ["--imatrix", imatrix] if imatrix else []
    done = quantize(source, tmp_path / "ours.gguf", "--type", name, "--force", "--threads", 1, *importance, *ours)
    llama_quantize(source, tmp_path / "theirs.gguf", name, *importance, *theirs)
    assert_same_tensors(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")
    assert read_metadata(tmp_path / "ours.gguf") == read_metadata(tmp_path / "theirs.gguf")
    return done


# --- as llama-quantize ------------------------------------------------------------------------------------------------

def compare_plans(source, name, imatrix, flags=(), **options):
    """Compare the types of both dry runs with an imatrix and, unless both need one, without. flags, options: of both programs."""
    for used in (imatrix, None):
        theirs = [*flags, *(["--imatrix", used] if used else [])]
        log = subprocess.run([tool("llama-quantize"), "--dry-run", *theirs, source, name.upper()], capture_output=True, text=True)
        assert log.returncode == 0
        if not used and "will require an imatrix!" in log.stdout + log.stderr:
            assert name in NEED_IMATRIX
            with pytest.raises(ggml_ext.UserError, match=r"needs an imatrix: pass --imatrix FILE"):
                ggml_ext.quantize_model(source, type=name, dry_run=True, no_calibration=True, **options)
            return
        expected = types_in_log(log.stdout + log.stderr)
        result = ggml_ext.quantize_model(source, type=name, dry_run=True, imatrix=used, no_calibration=not used, **options)
        assert {t.name: t.type for t in result.tensors} == expected and len(expected) > 60
    assert name not in NEED_IMATRIX or options


@pytest.mark.slow
@pytest.mark.parametrize("name", UPSTREAM_FILES)
def test_pure_type_matches_llama_quantize(models, name):
    """tests/unit/test_rules.py compares the mixes. The type is the mix's base type. Embeddings and output matrix have no importances, which some types need."""
    compare_plans(models["small"][0], name, models["small"][1], ["--pure", "--token-embedding-type", "q8_0", "--output-tensor-type", "q6_k"],
                  pure=True, token_embedding_type="q8_0", output_tensor_type="q6_k")


QUICKLY_MADE = ("q4_0", "q3_k_l", "q4_k_m", "iq4_nl")
MADE = (*QUICKLY_MADE, "f16", "bf16", "f32", "q8_0", "q5_1", "q2_k_s", "tq2_0", "mxfp4_moe", "q1_0", "q2_0", "iq1_m", "iq2_m", "iq3_xxs")
SLOWLY_MADE = ("iq1_m",)  # llama.cpp's encoder takes half a minute; test_rules.py has its rules


def kinds_and_names(names, quick):
    """Return all names for the small model, and the quick ones for the others; at night all names for all models."""
    of_small = [("small", n) if n in quick else pytest.param("small", n, marks=pytest.mark.nightly if n in SLOWLY_MADE else pytest.mark.slow) for n in names]
    tier = {n: pytest.mark.slow if n in quick else pytest.mark.nightly for n in names}
    return [*of_small, *(pytest.param(kind, n, marks=tier[n]) for kind in MODELS if kind != "small" for n in names)]


@pytest.mark.parametrize(("kind", "name"), kinds_and_names(MADE, QUICKLY_MADE))
def test_files_match_llama_quantize(models, tmp_path, kind, name):
    """Compares the bytes of the tensors and the metadata."""
    source, imatrix = models[kind]
    compare(tmp_path, source, name, ["--importance", "diagonal"], imatrix=imatrix)
    tensors = read_tensors(tmp_path / "ours.gguf")
    assert not {t.tensor_type.name.lower() for t in tensors.values()} & {*TYPES}
    keys = read_metadata(tmp_path / "ours.gguf")
    assert keys["general.file_type"] == UPSTREAM_FILES[name].id and keys["general.quantization_version"] == 2
    assert not [k for k in keys if k.startswith("ggml_ext")] and keys["quantize.imatrix.chunks_count"] == 7
    if name not in NEED_IMATRIX:
        compare(tmp_path, source, name)
        assert not [k for k in read_metadata(tmp_path / "ours.gguf") if "imatrix" in k]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_k_m", "q4_0"])
def test_bytes_of_the_reference_model_match(model, lib, tmp_path, name):
    compare(tmp_path, model, name, imatrix=write_importances(tmp_path / "imatrix.gguf", model))


@pytest.mark.parametrize("alias", UPSTREAM_ALIASES)
def test_aliases_of_types_are_accepted(models, tmp_path, alias):
    """llama-quantize accepts them in any case; the summary has the full name."""
    name = UPSTREAM_ALIASES[alias]
    assert FILE_TYPES[alias] is FILE_TYPES[name]
    done = compare(tmp_path, models["small"][0], alias.title())
    assert re.search(rf"^{name.upper()} as requested: [\d.]+ bpw in the layers, [\d.]+ bpw in total$", done.stdout, re.M)


@pytest.mark.parametrize("flags", [
    ["--pure"],
    ["--leave-output-tensor"],
    ["--token-embedding-type", "q8_0", "--output-tensor-type", "bf16"],
    ["--tensor-type", r"blk\.[0-3]\.attn_v=q8_0", "--tensor-type", "ffn_down=f16"],
    ["--tensor-type", "attn_v=q4_k", "--pure", "--output-tensor-type", "q5_0"],
], ids=" ".join)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "heads", "experts"])
def test_type_options_match_llama_quantize(models, tmp_path, kind, flags):
    """Neither program's rules count tensors whose type an option names."""
    for name in ("q3_k_m", "q4_k_m", "q5_k_s", "iq4_nl"):
        compare(tmp_path, models[kind][0], name, flags, flags)


@pytest.mark.parametrize("name", ["q4_k_m", *(pytest.param(n, marks=pytest.mark.slow) for n in ROWS_TOO)])
def test_fallbacks_match_llama_quantize(models, tmp_path, name):
    """The quantizer reports them."""
    source = models["odd"][0]
    done = compare(tmp_path, source, name)
    types = {n.split(".")[2]: t.tensor_type.name.lower() for n, t in read_tensors(tmp_path / "ours.gguf").items() if "blk.3." in n}
    assert types["ffn_down"] == "f16" and "rows of 100: f16 instead of " in done.stderr
    told = re.findall(r"^warning: \d tensors in .*, rows of (?:320|96|100): \w+ instead of \w+, which needs a multiple of", done.stderr, re.M)
    assert len(told) == done.stderr.count("\n") and f"requested {name.upper()}, " in done.stdout and "use fallback types (rows of" in done.stdout
    refused = run_quantize(source, tmp_path / "none.gguf", "--type", name, "--no-fallback")
    check_error(refused, "--no-fallback: ", "rows of ", "instead of")


@pytest.mark.parametrize(("name", "file_type"), [("mxfp4", "MOSTLY_MXFP4_MOE"), ("nvfp4", "MOSTLY_NVFP4")])
def test_dense_models_get_4_bit_floats(lib, models, tmp_path, name, file_type):
    """llama-quantize does not make such files; they have the types of its Q4_0 without an imatrix, and llama.cpp's bytes."""
    source, out = models["heads"][0], tmp_path / "out.gguf"
    quantize(source, out, "--type", name, "--no-calibration")
    llama_quantize(source, tmp_path / "q4_0.gguf", "q4_0")
    tensors, others = read_tensors(out), read_tensors(tmp_path / "q4_0.gguf")
    assert {n: t.tensor_type.name.replace(name.upper(), "Q4_0") for n, t in tensors.items()} == {n: t.tensor_type.name for n, t in others.items()}
    assert read_metadata(out)["general.file_type"] == gguf.LlamaFileType[file_type]
    down = "blk.3.ffn_down.weight"
    expected = lib.quantize(int(tensors[down].tensor_type), read_tensors(source)[down].data.astype("f4"))
    assert tensors[down].tensor_type.name == name.upper() and (tensors[down].data == expected).all()


def test_rows_that_do_not_fit_nvfp4_become_q4_0(models, tmp_path):
    """As with Q2_0, whose blocks have 64 weights too."""
    quantize(models["odd"][0], tmp_path / "out.gguf", "--type", "nvfp4", "--no-calibration")
    types = {n.split(".")[2]: t.tensor_type.name for n, t in read_tensors(tmp_path / "out.gguf").items() if "blk.3." in n}
    assert (types["attn_q"], types["attn_k"], types["ffn_down"], types["ffn_up"]) == ("NVFP4", "Q4_0", "F16", "NVFP4")


def test_type_without_a_fallback_is_refused(models, tmp_path):
    expect_error(tmp_path, [models["odd"][0], tmp_path / "out.gguf", "--type", "q1_0"], "tensor blk.", "do not fit q1_0, which needs a multiple of 128", "--tensor-type")


# --- importances ------------------------------------------------------------------------------------------------------

def first_down(workspace):
    return read_tensors(workspace.out)["blk.0.ffn_down.weight"].tensor_type.name


@pytest.fixture
def layers_workspace(workspace):
    """Return the calibration workspace with a model of 8 layers, of which rules favor the first."""
    workspace.model = write_gguf(workspace.path / "small-f16.gguf", {f"blk.{i}.ffn_{n}.weight": gaussian(8, 256) for i in range(8) for n in ("up", "down")},
                              fill=lambda w: w.add_block_count(8))
    return workspace


@pytest.mark.parametrize(("name", "with_it", "without"), [("iq4_nl", "IQ4_NL", "Q5_K"), ("q4_0", "Q4_1", "Q4_0")])
def test_rules_know_whether_calibration_will_run(layers_workspace, monkeypatch, name, with_it, without):
    """Types are planned before calibration, also in dry runs; the calibration collects Hessians."""
    out, err = layers_workspace.run("--dry-run", type_name=name)
    assert not layers_workspace.runs() and re.search(rf"blk\.\*\.ffn_down\.weight +{with_it.lower()} ", out) and "block, by a calibration" in out
    out, _ = layers_workspace.run(type_name=name)
    (options,) = layers_workspace.runs()
    assert first_down(layers_workspace) == with_it and options["--moments"] == "block" and "importance  = block" in out
    assert {"quantize.imatrix.file", "quantize.imatrix.dataset"} <= {*layers_workspace.fields()} and "ggml_ext.importance" not in layers_workspace.fields()
    layers_workspace.run("--imatrix", layers_workspace.cache, type_name=name)
    assert first_down(layers_workspace) == with_it
    for flags in (["--no-calibration"], ["--importance", "none"]):
        layers_workspace.run(*flags, type_name=name)
        assert first_down(layers_workspace) == without and not [k for k in layers_workspace.fields() if "imatrix" in k]
    out, _ = layers_workspace.run("--no-calibration", "--dry-run", type_name=name)
    assert re.search(rf"blk\.\*\.ffn_down\.weight +{without.lower()} ", out)
    monkeypatch.setattr(calibration, "find_tool", lambda name: None)
    _, err = layers_workspace.run(type_name=name)
    assert first_down(layers_workspace) == without and "llama-imatrix is not in the package: quantizing without" in err


def test_8_bit_types_skip_calibration(layers_workspace):
    layers_workspace.run(type_name="q8_0")
    assert not layers_workspace.runs() and {t.tensor_type.name for t in read_tensors(layers_workspace.out).values()} == {"Q8_0"}


def test_requested_hessians_are_used(layers_workspace):
    _, err = layers_workspace.run("--importance", "full", type_name="q4_0")
    (options,) = layers_workspace.runs()
    assert "note: calibration: full Hessians" in err and options["--moments"] == "full"


# --- a target -----------------------------------------------------------------------------------------------------------

TARGET = ["--target-bpw", "4.5", "--stock", "--sensitivity", "usual"]


@pytest.mark.slow
def test_target_of_upstream_types_has_no_ggml_ext_metadata(models, tmp_path):
    """The file type is that of most weights."""
    source, imatrix = models["small"]
    quantize(source, tmp_path / "out.gguf", *TARGET, "--imatrix", imatrix)
    tensors, metadata = read_tensors(tmp_path / "out.gguf"), read_metadata(tmp_path / "out.gguf")
    types = {t.tensor_type.name for t in tensors.values()} - {"F32"}
    assert len(types) > 1 and not types & {name.upper() for name in TYPES} and not [k for k in metadata if k.startswith("ggml_ext.")]
    assert metadata["general.file_type"] in {f.id for f in UPSTREAM_FILES.values()}
    bits = sum(8 * t.n_bytes for t in tensors.values()) / sum(t.n_elements for t in tensors.values())
    assert 4 < bits <= 4.5


@pytest.mark.parametrize(("flags", "parts"), [
    (["--type", "q4_k", "--stock"], ["--stock needs --target-size", "q4_k_m"]),
    ([*TARGET, "--target-types", "q4_k,ITQ3_T"], ["--target-types: ITQ3_T is a ggml-ext type", "drop one of them"]),
    ([*TARGET, "--tensor-type", "attn_v=itq3_t"], ["--tensor-type attn_v=itq3_t: --stock writes a standard GGUF file", "drop the option"]),
], ids=["type", "list", "tensor"])
def test_target_may_mix_upstream_and_ggml_ext_types(models, tmp_path, flags, parts):
    expect_error(tmp_path, [models["small"][0], tmp_path / "out.gguf", *flags], *parts)


# --- bad input --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("flags", "parts"), [
    (["--fallback-above", "3"], ["--fallback-above: q4_k_m is a standard type", "drop the option"]),
    (["--tensor-type", "attn_v=itq3_t"], ["--tensor-type attn_v=itq3_t: --type q4_k_m writes a standard GGUF file", "pass a standard type"]),
    (["--token-embedding-type", "ITQ4_T"], ["--token-embedding-type itq4_t: ", "is a ggml-ext type"]),
    (["--output-tensor-type", "ditto5"], ["--output-tensor-type ditto5: ", "is a ggml-ext type"]),
    (["--target-size", "1MB"], ["--type q4_k and --target-size: pass one of them"]),
    (["--importance", "full", "--imatrix", "none.gguf"], ["none.gguf"]),
], ids=lambda v: " ".join(v) if v[0].startswith("--") else "")
def test_flags_for_ggml_ext_types_are_refused(models, tmp_path, flags, parts):
    expect_error(tmp_path, [models["small"][0], tmp_path / "out.gguf", "--type", "q4_k", *flags], *parts)


def test_quantized_model_is_refused(models, tmp_path):
    source = tmp_path / "q4_k.gguf"
    quantize(models["small"][0], source, "--type", "q4_k")
    expect_error(tmp_path, [source, tmp_path / "out.gguf", "--type", "q5_k"], "is already quantized to q", "F32, F16, BF16 or Q8_0", "--allow-requantize")
    compare(tmp_path, source, "q5_k", ["--allow-requantize"], ["--allow-requantize"])
    done = quantize(source, tmp_path / "same.gguf", "--type", "q4_k")
    assert "matrices already have the requested types: copied unchanged" in done.stderr


def test_ggml_ext_model_is_converted_completely(models, tmp_path):
    """Neither a type nor a key of ggml-ext remains."""
    source, out = tmp_path / "ditto3.gguf", tmp_path / "out.gguf"
    quantize(models["small"][0], source, "--type", "ditto3", "--pure")
    expect_error(tmp_path, [source, out, "--type", "q4_k"], "is already quantized to ditto3", "--allow-requantize")
    flags = ["--type", "q4_k", "--allow-requantize"]
    expect_error(tmp_path, [source, out, *flags, "--leave-output-tensor"],
                 "tensor output.weight would keep ggml-ext types, but --type q4_k_m writes a file that every llama.cpp loads", "ggml-ext export")
    quantize(source, out, *flags)
    assert not {t.tensor_type.name.lower() for t in read_tensors(out).values()} & {*TYPES}
    assert [k for k in read_metadata(source) if k.startswith("ggml_ext.")] and not [k for k in read_metadata(out) if k.startswith("ggml_ext.")]


@pytest.mark.parametrize("n_layer", [None, 0, 100_000])
def test_model_without_a_layer_count_is_refused(lib, tmp_path, n_layer):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_down.weight": gaussian(8, 256)}, fill=lambda w: n_layer is None or w.add_block_count(n_layer))
    expect_error(tmp_path, [source, tmp_path / "out.gguf", "--type", "q4_k"],
                 "in.gguf: llama.block_count is", "must be 1 to 512", "rules for q4_k_m", "convert the model again, or pass --pure")
    quantize(source, tmp_path / "out.gguf", "--type", "q4_k", "--pure")


def test_missing_library_refuses_mixes_and_uses_numpy(models, tmp_path, monkeypatch):
    """The rules of mixes are llama.cpp's; numpy has the encoders of gguf."""
    monkeypatch.setattr("ggml_ext._native.library.load_rules", lambda: None)
    source, out = models["small"][0], tmp_path / "out.gguf"
    expect_error(tmp_path, [source, out, "--type", "q5_0", "--encoder", "numpy"], "--type q5_0: llama.cpp's rules mix", "--pure")
    for name, flags in (("q5_0", ["--pure"]), ("q8_0", [])):
        quantize(source, out, "--type", name, "--encoder", "numpy", "--force", *flags)
        assert {t.tensor_type.name for t in read_tensors(out).values()} == {name.upper(), "F32"}
        compare(tmp_path, source, name, flags, flags)


# --- other outputs ----------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_parts_report_and_card_are_written(model, lib, tmp_path):
    """Parts have no ggml-ext keys either."""
    report, card, imatrix = tmp_path / "report.json", tmp_path / "README.md", write_importances(tmp_path / "imatrix.gguf", model)
    done = quantize(model, tmp_path / "out.gguf", "--type", "q4_k", "--imatrix", imatrix, "--split-max-size", "2M", "--verify", "--report", report,
                    "--model-card", card)
    assert "tensors read back without a difference" in done.stdout and "Q4_K_M as requested: " in done.stdout
    parts = sorted(tmp_path.glob("out-*.gguf"))
    assert len(parts) > 1 and not [k for part in parts for k in read_metadata(part) if k.startswith("ggml_ext.")]
    assert read_metadata(parts[0])["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    record = json.loads(report.read_text())
    assert record["type"] == "q4_k_m" and {t["type"] for t in record["tensors"]} == {"q4_k", "q6_k", "f32"}
    text = card.read_text()
    assert " as Q4_K_M: " in text and "every program that is built on llama.cpp runs it" in text and "\n- ggml-ext\n" not in text
    assert run_main(inspect.main, parts[0], "--against", model).returncode == 0
    merged = tmp_path / "merged.gguf"
    subprocess.run([tool("llama-gguf-split"), "--merge", parts[0], merged], check=True, capture_output=True)
    assert_same_tensors(merged, llama_quantize(model, tmp_path / "theirs.gguf", "q4_k", "--imatrix", imatrix))


def test_help_names_upstream_types():
    done = run_main(ggml_ext.quantize.main, "--help")
    assert all(name in done.stdout for name in (*UPSTREAM_FILES, *UPSTREAM_ALIASES))


@pytest.mark.extra_build
@pytest.mark.parametrize("name", ["q4_k", "iq3_m", "q4_0"])
def test_upstream_llama_cpp_runs_the_file(model, lib, tmp_path, name):
    """Runs a build without this project's patches."""
    out = tmp_path / "out.gguf"
    quantize(model, out, "--type", name, "--imatrix", write_importances(tmp_path / "imatrix.gguf", model))
    done = run_upstream(out)
    assert done.returncode == 0, done.stderr[-2000:]
