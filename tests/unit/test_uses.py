"""Types of matrices that no calibration sees, by what the graph does with them, and options that name types without effect."""

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
from helpers.models import gaussian, write_gguf

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


def choices(name="itq2_t", *overrides, **more):
    return Choices(FILE_TYPES[name], overrides=tuple(map(Override.parse, overrides)), **more)


def types(file, asked, uses):
    plan = make_plan(file, asked, uses=uses)
    report_options_without_effect(plan, asked)
    return {t.name: t.type.name.lower() for t in plan.tensors}, plan


@pytest.mark.parametrize("name", ["itq2_t", "iq2_xs"])
def test_what_no_calibration_sees_has_a_floor_or_stays(lib, tmp_path, name):
    found, plan = types(model(tmp_path), choices(name), GraphUses(FOUND))
    assert found[Q] == name and found["blk.1.attn_q.weight"] == found[EH] == "q5_k"
    assert found[TABLE] == found["blk.0.ape.weight"] == found[HEAD] == "f16" and "f16" not in (found["token_embd.weight"], found["output.weight"])
    floor, *kept = plan.notes
    assert floor.startswith("2 tensors in 2 classes, which the model does not run on text") and floor.endswith(f"blk.1.attn_q.weight, {EH}")
    assert len(kept) == 2 and {t.name for t in plan.tensors if t.is_unseen} == {"blk.1.attn_q.weight", EH}


def test_layers_that_predict_tokens_are_known_by_the_metadata(lib, tmp_path):
    file = model(tmp_path)
    assert n_layers_run(file) == 1
    found, _ = types(file, choices(), GraphUses(None, 1))
    assert found[EH] == "q5_k" and found[Q] == found[TABLE] == found[HEAD] == "itq2_t"


def test_a_target_leaves_them_alone(lib, tmp_path):
    """They are no items of its choice: those have the type that stands for all."""
    found, _ = types(model(tmp_path), choices("itq3_t", pure=True, target="target-bpw=3"), GraphUses(FOUND))
    assert [n for n, q in found.items() if q == "itq3_t"] == ["token_embd.weight", Q, "output.weight"]


def test_what_is_measured_or_named_or_better_has_no_floor(lib, tmp_path):
    file = model(tmp_path)
    assert types(file, choices(), GraphUses(FOUND, measured=frozenset({EH, HEAD})))[0][EH] == "itq2_t"
    found, plan = types(file, choices("itq2_t", "eh_proj=itq2_t", "cls=q4_k", "ple_norm=q8_0"), GraphUses(FOUND))
    assert found[EH] == "itq2_t" and found[HEAD] == "q4_k" and found[TABLE] == "f16"
    assert plan.warnings == [f"--tensor-type ple_norm=q8_0 does not change tensor {TABLE}, not used in matrix products: kept"]
    assert types(file, choices("q8_0"), GraphUses(FOUND))[0][EH] == "q8_0"
    assert types(file, choices("q4_k_m"), GraphUses(FOUND))[0][EH] == "q4_k"  # as llama-quantize: no importances are needed


@pytest.mark.parametrize(("asked", "got"), [
    (choices(), "q8_0"), (choices("itq3_t", pure=True, target="target-bpw=3"), "q8_0"), (choices("itq2_t", pure=True), "itq2_t"),
    (choices("itq2_t", "ssm_alpha=itq3_t"), "itq3_t"), (choices("f16"), "f16"), (choices("q4_k_m"), "q4_k")])
def test_small_matrices_have_a_floor(lib, tmp_path, asked, got):
    """One in a layer of 2049 rows of its length, and one in a layer of 2048, of which its two are 1/1024."""
    small, large = "blk.0.ssm_alpha.weight", "blk.0.ffn_up.weight"
    file = model(tmp_path, (), **{large: gaussian(2047, 256), small: gaussian(2, 256), "blk.1.ffn_up.weight": gaussian(2046, 256),
                                  "blk.1.ssm_alpha.weight": gaussian(2, 256)})
    found, plan = types(file, asked, GraphUses())
    assert found[small] == got and found["blk.1.ssm_alpha.weight"] != "q8_0" and found[large] != "q8_0"
    told = [f"tensor {small}, with less than a thousandth of their layer's weights each: at least q8_0; --tensor-type sets another type"]
    assert plan.notes == (told if got == "q8_0" else [])


def test_classes_of_a_layer_that_is_not_run(lib, tmp_path):
    later = TABLE.replace("0", "1")
    assert types(model(tmp_path, (*NAMES, later)), choices(), GraphUses(FOUND))[0][later] == "f16"


@pytest.mark.parametrize(("overrides", "said"), [
    (["ffn_gate_inp=q8_0"], "--tensor-type ffn_gate_inp=q8_0 does not change tensor blk.0.ffn_gate_inp.weight, kept by llama.cpp's rules"),
    (["attn_norm=f16"], "--tensor-type attn_norm=f16 does not change tensor blk.0.attn_norm.weight, kept by llama.cpp's rules"),
    (["attn=q8_0", "attn_q=q6_k"], "--tensor-type attn_q=q6_k changes nothing: other options set the types of all tensors that it matches"),
    (["atn=q8_0"], "--tensor-type atn=q8_0 matches no tensor"),
])
def test_types_without_effect(lib, tmp_path, overrides, said):
    file = model(tmp_path, ("token_embd.weight", Q, "blk.0.ffn_gate_inp.weight"), **{"blk.0.attn_norm.weight": gaussian(256)})
    assert types(file, choices("itq3_t", *overrides), GraphUses())[1].warnings == [said]


def test_what_stays_beside_what_changes_is_a_note(lib, tmp_path):
    file = model(tmp_path, (Q, "blk.0.ffn_gate.weight", "blk.0.ffn_gate_inp.weight"), **{"blk.0.ffn_gate_norm.weight": gaussian(256)})
    plan = types(file, choices("itq3_t", "ffn_gate=q8_0"), GraphUses())[1]
    assert not plan.warnings and plan.notes == [
        "--tensor-type ffn_gate=q8_0 does not change tensor blk.0.ffn_gate_inp.weight, kept by llama.cpp's rules"]


@pytest.mark.parametrize(("more", "said"), [
    ({"leave_output": True}, "--leave-output-tensor"), ({"output": T.Q6_K, "token_embd": T.Q6_K}, "--output-tensor-type")])
def test_options_of_the_output_without_effect(lib, tmp_path, more, said):
    (warning,) = types(model(tmp_path, ("token_embd.weight", Q)), choices("itq3_t", **more), GraphUses())[1].warnings
    assert warning.startswith(f"{said} changes nothing: the model has no output.weight")


def test_contradictions_are_refused():
    check_error(run_quantize("in.gguf", "out.gguf", "--type", "q4_k_m", "--leave-output-tensor", "--output-tensor-type", "q4_k"),
                "--leave-output-tensor and --output-tensor-type: pass one of them")


def test_a_target_keeps_what_is_quantized_already(lib, tmp_path):
    exps, asked = "blk.0.ffn_up_exps.weight", choices("itq3_t", pure=True, target="target-bpw=4")
    parts = {Q: ("F16", (8, 256)), exps: ("Q4_0", (2, 8, 256))}
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "gpt-oss")
    for name, (qtype, shape) in parts.items():
        writer.add_tensor(name, gguf.quants.quantize(gaussian(*shape), T[qtype]), raw_dtype=T[qtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "in.gguf")
    found, plan = types(file, asked, GraphUses())
    assert found == {Q: "itq3_t", exps: "q4_0"} and plan.notes == [
        f"tensor {exps}, already quantized: kept; --allow-requantize lets the target choose other types"]
    with pytest.raises(UserError, match="is already quantized to q4_0, .*keep it with --tensor-type 'exps=q4_0', or pass --allow-requantize"):
        make_plan(file, choices("itq3_t"))
    assert types(file, choices("itq3_t", "exps=q4_0"), GraphUses())[0][exps] == "q4_0"
    with pytest.raises(UserError, match="is already quantized to q4_0"):  # nothing is left to choose
        make_plan(model(tmp_path, (Q,), "Q4_0"), asked)
