"""Types of matrices that calibration does not reach, by their use in the graph, and options without effect."""

import gguf
import pytest

from ggml_ext._base.errors import UserError
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._plan.effects import report_options_without_effect
from ggml_ext._plan.file_types import FILE_TYPES
from ggml_ext._plan.plan import Choices, Override
from ggml_ext._plan.planning import make_plan
from ggml_ext._plan.uses import PRODUCT, ROWS, GraphUses, n_layers_run
from helpers.commands import run_quantize
from helpers.errors import check_error
from helpers.models import finish, gaussian, write_gguf

T = gguf.GGMLQuantizationType
Q, TABLE, EH, HEAD = "blk.0.attn_q.weight", "blk.0.ple_norm_key.weight", "blk.1.nextn.eh_proj.weight", "cls.weight"
NAMES = ("token_embd.weight", Q, "blk.1.attn_q.weight", EH, TABLE, "blk.0.ape.weight", HEAD, "output.weight")
FOUND = {"token_embd.weight": {ROWS}, Q: {PRODUCT}, TABLE: {"MUL"}, "blk.0.ape.weight": {ROWS}, HEAD: {PRODUCT}, "output.weight": {PRODUCT}}


def model(path, names=NAMES, qtype="F16", **more):
    def fill(writer):
        writer.add_block_count(2)
        writer.add_head_count(4)
        writer.add_uint32("glm4moe.nextn_predict_layers", 1)

    return GGUFFile(write_gguf(path / "in.gguf", {n: gaussian(8, 256) for n in names} | more, qtype, "glm4moe", fill))


def type_choices(name="itq2_t", *overrides, **more):
    return Choices(FILE_TYPES[name], overrides=tuple(map(Override.parse, overrides)), **more)


def plan_types(file, choices, uses):
    plan = make_plan(file, choices, uses=uses)
    report_options_without_effect(plan, choices)
    return {t.name: t.type.name.lower() for t in plan.tensors}, plan


@pytest.mark.parametrize("name", ["itq2_t", "iq2_xs"])
def test_uncalibrated_matrices_have_a_minimum_type_or_are_copied(lib, tmp_path, name):
    types, plan = plan_types(model(tmp_path), type_choices(name), GraphUses(FOUND))
    assert types[Q] == name and types["blk.1.attn_q.weight"] == types[EH] == "q5_k"
    assert types[TABLE] == types["blk.0.ape.weight"] == types[HEAD] == "f16" and "f16" not in (types["token_embd.weight"], types["output.weight"])
    floor, *copied = plan.notes
    assert floor.startswith("2 tensors in 2 classes, which the model does not use for text")
    assert floor.endswith(f"blk.1.attn_q.weight, {EH}")
    assert len(copied) == 2 and {t.name for t in plan.tensors if t.is_unseen} == {"blk.1.attn_q.weight", EH}


def test_prediction_layers_are_read_from_metadata(lib, tmp_path):
    file = model(tmp_path)
    assert n_layers_run(file) == 1
    types, _ = plan_types(file, type_choices(), GraphUses(None, 1))
    assert types[EH] == "q5_k" and types[Q] == types[TABLE] == types[HEAD] == "itq2_t"


def test_target_excludes_uncalibrated_matrices(lib, tmp_path):
    """They have the base type instead of being items of the choice."""
    types, _ = plan_types(model(tmp_path), type_choices("itq3_t", pure=True, target_option="target-bpw=3"), GraphUses(FOUND))
    assert [n for n, q in types.items() if q == "itq3_t"] == ["token_embd.weight", Q, "output.weight"]


def test_calibrated_named_or_better_types_have_no_minimum(lib, tmp_path):
    file = model(tmp_path)
    assert plan_types(file, type_choices(), GraphUses(FOUND, measured=frozenset({EH, HEAD})))[0][EH] == "itq2_t"
    types, plan = plan_types(file, type_choices("itq2_t", "eh_proj=itq2_t", "cls=q4_k", "ple_norm=q8_0"), GraphUses(FOUND))
    assert types[EH] == "itq2_t" and types[HEAD] == "q4_k" and types[TABLE] == "f16"
    assert plan.warnings == [f"--tensor-type ple_norm=q8_0 does not change tensor {TABLE}, not used in matrix products: kept"]
    assert plan_types(file, type_choices("q8_0"), GraphUses(FOUND))[0][EH] == "q8_0"
    assert plan_types(file, type_choices("q4_k_m"), GraphUses(FOUND))[0][EH] == "q4_k"  # like llama-quantize: no importances are needed


@pytest.mark.parametrize(("choices", "expected"), [
    (type_choices(), "q8_0"), (type_choices("itq3_t", pure=True, target_option="target-bpw=3"), "q8_0"), (type_choices("itq2_t", pure=True), "itq2_t"),
    (type_choices("itq2_t", "ssm_alpha=itq3_t"), "itq3_t"), (type_choices("f16"), "f16"), (type_choices("q4_k_m"), "q4_k")])
def test_small_matrices_have_a_minimum_type(lib, tmp_path, choices, expected):
    """One matrix is in a layer of 2049 rows of its length, one in a layer of 2048, of which its two rows are 1/1024."""
    small, large = "blk.0.ssm_alpha.weight", "blk.0.ffn_up.weight"
    file = model(tmp_path, (), **{large: gaussian(2047, 256), small: gaussian(2, 256), "blk.1.ffn_up.weight": gaussian(2046, 256),
                                  "blk.1.ssm_alpha.weight": gaussian(2, 256)})
    types, plan = plan_types(file, choices, GraphUses())
    assert types[small] == expected and types["blk.1.ssm_alpha.weight"] != "q8_0" and types[large] != "q8_0"
    told = [f"tensor {small}, with less than 1/1024 of their layer's weights each: at least q8_0; --tensor-type sets another type"]
    assert plan.notes == (told if expected == "q8_0" else [])


def test_unused_layer_is_listed_by_class(lib, tmp_path):
    later = TABLE.replace("0", "1")
    assert plan_types(model(tmp_path, (*NAMES, later)), type_choices(), GraphUses(FOUND))[0][later] == "f16"


@pytest.mark.parametrize(("overrides", "message"), [
    (["ffn_gate_inp=q8_0"], "--tensor-type ffn_gate_inp=q8_0 does not change tensor blk.0.ffn_gate_inp.weight, kept by llama.cpp's rules"),
    (["attn_norm=f16"], "--tensor-type attn_norm=f16 does not change tensor blk.0.attn_norm.weight, kept by llama.cpp's rules"),
    (["attn=q8_0", "attn_q=q6_k"], "--tensor-type attn_q=q6_k changes nothing: other options set the types of all tensors that it matches"),
    (["atn=q8_0"], "--tensor-type atn=q8_0 matches no tensor"),
])
def test_type_without_effect_is_refused(lib, tmp_path, overrides, message):
    file = model(tmp_path, ("token_embd.weight", Q, "blk.0.ffn_gate_inp.weight"), **{"blk.0.attn_norm.weight": gaussian(256)})
    assert plan_types(file, type_choices("itq3_t", *overrides), GraphUses())[1].warnings == [message]


def test_partial_effect_is_a_note(lib, tmp_path):
    file = model(tmp_path, (Q, "blk.0.ffn_gate.weight", "blk.0.ffn_gate_inp.weight"), **{"blk.0.ffn_gate_norm.weight": gaussian(256)})
    plan = plan_types(file, type_choices("itq3_t", "ffn_gate=q8_0"), GraphUses())[1]
    assert not plan.warnings and plan.notes == [
        "--tensor-type ffn_gate=q8_0 does not change tensor blk.0.ffn_gate_inp.weight, kept by llama.cpp's rules"]


@pytest.mark.parametrize(("more", "message"), [
    ({"leave_output": True}, "--leave-output-tensor"), ({"output": T.Q6_K, "token_embd": T.Q6_K}, "--output-tensor-type")])
def test_output_option_without_effect_is_refused(lib, tmp_path, more, message):
    (warning,) = plan_types(model(tmp_path, ("token_embd.weight", Q)), type_choices("itq3_t", **more), GraphUses())[1].warnings
    assert warning.startswith(f"{message} changes nothing: the model has no output.weight")


def test_contradictions_are_refused():
    check_error(run_quantize("in.gguf", "out.gguf", "--type", "q4_k_m", "--leave-output-tensor", "--output-tensor-type", "q4_k"),
                "--leave-output-tensor and --output-tensor-type: pass one of them")


def test_target_keeps_quantized_tensors(lib, tmp_path):
    exps, choices = "blk.0.ffn_up_exps.weight", type_choices("itq3_t", pure=True, target_option="target-bpw=4")
    parts = {Q: ("F16", (8, 256)), exps: ("Q4_0", (2, 8, 256))}
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "gpt-oss")
    for name, (qtype, shape) in parts.items():
        writer.add_tensor(name, gguf.quants.quantize(gaussian(*shape), T[qtype]), raw_dtype=T[qtype])
    finish(writer)
    file = GGUFFile(tmp_path / "in.gguf")
    types, plan = plan_types(file, choices, GraphUses())
    assert types == {Q: "itq3_t", exps: "q4_0"} and plan.notes == [
        f"tensor {exps}, already quantized: kept; --allow-requantize lets the target choose other types"]
    with pytest.raises(UserError, match="is already quantized to q4_0; .*keep it with --tensor-type 'exps=q4_0', or pass --allow-requantize"):
        make_plan(file, type_choices("itq3_t"))
    assert plan_types(file, type_choices("itq3_t", "exps=q4_0"), GraphUses())[0][exps] == "q4_0"
    with pytest.raises(UserError, match="is already quantized to q4_0"):  # no tensor is left to choose
        make_plan(model(tmp_path, (Q,), "Q4_0"), choices)
