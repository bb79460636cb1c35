"""Targets: types chosen for each tensor under a limit of bytes, of bits a weight or of KL divergence, and what the user is told."""

import json

import gguf
import pytest

from ggml_ext import quantize as program
from ggml_ext._allocation import sensitivity, target
from ggml_ext._base.errors import UserError
from helpers import choosing
from helpers.choosing import COSTS, FREE, LAYERS, MATRICES, SHAPES, bits_in_all
from helpers.commands import run_quantize
from helpers.errors import check_error, files
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments

fresh, measured, folder = choosing.fresh, choosing.measured, choosing.folder


@pytest.mark.slow
def test_sensitivities_are_measured_and_types_follow_them(fresh):
    folder = fresh
    out, _ = folder.run("--target-bpw", "4", "--report", folder.path / "report.json")
    assert bits_in_all(folder.out) <= 4
    kept = json.loads(folder.kept.read_text())
    parts = [(sensitivity.ProbedPart(name, tuple(tensors)), cost) for name, tensors, cost in kept["costs"]]
    found = sensitivity.fit_sensitivities(sensitivity.usual_sensitivities(FREE), kept["probe_errors"], parts)
    # the copies are floats of 16 bits, which changes errors of 0.06 by 2^-11 at most and the costs, printed with 9 digits, by less
    assert found == pytest.approx(COSTS, rel=1e-3)
    # every part once, each alone: what was changed was put back
    classes = [[n for n in FREE if name in n] for name in (*SHAPES, "token_embd")]
    layers = [[n for n in FREE if n.startswith(f"blk.{i}.")] for i in range(LAYERS)]
    assert sorted(map(sorted, folder.runs())) == sorted(map(sorted, [[], *classes, *layers]))
    # more bits where errors cost more: attn_v before ffn_up, the first layer before the third
    bpw = {n: 8 * t.n_bytes / t.n_elements for n, t in read_tensors(folder.out).items()}
    assert bpw["blk.0.attn_v.weight"] > bpw["blk.2.ffn_up.weight"]
    assert sum(bpw[f"blk.{i}.attn_v.weight"] for i in range(4)) > sum(bpw[f"blk.{i}.ffn_up.weight"] for i in range(4))
    # the prediction is the sum of what was kept, and the summary says it
    report = json.loads((folder.path / "report.json").read_text())
    types = folder.types()
    predicted = sum(found[n] * kept["errors"][n][types[n]] for n in FREE)
    assert report["predicted_kl_divergence"] == pytest.approx(predicted)
    assert report["optimality_gap"] == 0 and report["sensitivities"] == "measured" and report["type"] == "auto"
    assert f"predicted KL divergence {predicted:.4g}; optimal for these types" in out
    assert "target-bpw 4 as asked" in out
    assert gguf.GGUFReader(folder.out).fields["ggml_ext.options"].contents().split()[0] == "target-bpw=4"


def test_no_other_choice_of_that_size_is_predicted_better(folder):
    """Against every exchange of types between two tensors, and every type for all."""
    folder.run("--target-bpw", "3.5")
    kept, types = json.loads(folder.kept.read_text()), folder.types()
    sizes = {n: t.n_elements for n, t in read_tensors(folder.out).items()}
    room = 3.5 * sum(sizes.values()) - 32 * sizes["blk.0.attn_norm.weight"]

    def cost(chosen):
        return sum(COSTS[n] * kept["errors"][n][chosen[n]] for n in FREE)

    def bits(chosen):
        return sum(sizes[n] * gguf.GGML_QUANT_SIZES[q][1] * 8 / gguf.GGML_QUANT_SIZES[q][0]
                   for n in FREE for q in [gguf.GGMLQuantizationType[chosen[n].upper()]])

    assert bits(types) <= room
    others = [{**types, a: x, b: y} for a in FREE for b in FREE if a < b for x in kept["errors"][a] for y in kept["errors"][b]]
    others += [{**types, **dict.fromkeys(FREE, q)} for q in kept["errors"][FREE[0]]]
    fitting = [c for c in map(cost, (o for o in others if bits(o) <= room))]
    assert len(fitting) > 500 and cost(types) <= min(fitting) * (1 + 1e-3)  # the sensitivities differ by that from COSTS


def test_the_smallest_file_for_a_divergence(folder):
    sizes = {}
    for kld in ("0.2", "0.02", "0.002"):
        out, _ = folder.run("--target-kld", kld, "--report", folder.path / f"{kld}.json")
        predicted = json.loads((folder.path / f"{kld}.json").read_text())["predicted_kl_divergence"]
        assert 0.9 * float(kld) < predicted <= float(kld)
        sizes[kld] = folder.out.stat().st_size
    assert sizes["0.2"] < sizes["0.02"] < sizes["0.002"]
    # as many bits for the other question give the same answer, or a better one
    out, _ = folder.run("--target-size", sizes["0.02"], "--report", folder.path / "size.json")
    assert json.loads((folder.path / "size.json").read_text())["predicted_kl_divergence"] <= 0.02


def test_the_size_is_that_of_the_file(folder):
    for size in (*range(31_000, 33_000, 97), 50_000):  # data of 15 rows are padded
        folder.run("--target-size", size)
        assert 0.9 * size < folder.out.stat().st_size <= size, size
    folder.run("--target-size", "34KiB", "--split-max-size", "1M", "--target-types", "itq2_t,ditto3,q8_0")
    parts = [p for p in folder.out.parent.iterdir() if "-of-" in p.name]
    assert parts and sum(p.stat().st_size for p in parts) <= 34 * 1024


def test_a_size_below_the_smallest_says_what_that_is(folder):
    for option, number in (("--target-size", r"1000"), ("--target-bpw", "1.5")):
        line = folder.error(option, number)
        assert f"{option} {number} is below the smallest possible, " in line and "--target-types" in line
        least = line.split("(")[1].split(" bytes")[0].replace(",", "") if "MiB" in line else line.split("possible, ")[1].split(" bpw")[0]
        folder.run(option, least)
        if option == "--target-bpw":  # a size has room for the keys that OUT may get
            assert set(folder.types().values()) == {"itq2_t", "f32"}
        folder.out.unlink()
    line = folder.error("--target-kld", "0.01", "--target-types", "itq2_t,itq3_t")
    assert "is below the smallest possible, " in line
    folder.run("--target-kld", line.split("possible, ")[1].split(":")[0], "--target-types", "itq2_t,itq3_t")
    assert set(folder.types().values()) == {"itq3_t", "f32"}


def test_a_size_that_is_enough_leaves_everything(fresh):
    folder = fresh
    out, err = folder.run("--target-size", "1GB")
    assert "target-size 1GB: the input is within the target; no type changes" in out
    assert set(folder.types().values()) == {"f16", "f32"} and not folder.runs() and not folder.kept.exists()
    assert gguf.GGUFReader(folder.out).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
    out, _ = folder.run("--target-bpw", "12", "--target-types", "itq2_t,q6_k", "--sensitivity", "usual")
    assert "target-bpw 12 exceeds what the best types need: OUT is smaller" in out
    assert set(folder.types().values()) == {"q6_k", "f32"}
    assert gguf.GGUFReader(folder.out).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q6_K


def test_types_of_single_tensors_come_first(folder):
    folder.run("--target-bpw", "5", "--tensor-type", "blk.2=q8_0", "--tensor-type", "attn_v=itq3_t", "--output-tensor-type", "q5_k")
    types = folder.types()
    assert {q for n, q in types.items() if "blk.2." in n} == {"q8_0"}
    assert {q for n, q in types.items() if "attn_v" in n and "blk.2." not in n} == {"itq3_t"}
    assert types["token_embd.weight"] == "q5_k"  # which serve as the output
    assert bits_in_all(folder.out) <= 5
    folder.run("--target-bpw", "4", "--token-embedding-type", "itq3_t")
    assert folder.types()["token_embd.weight"] == "itq3_t"


def test_below_what_single_tensors_take(fresh):
    line = fresh.error("--target-bpw", "4", "--tensor-type", ".=q8_0")
    assert "is below the smallest possible, 8.5" in line and "drop the options that fix types" in line


def test_types_that_were_asked_for_are_no_fallbacks(folder):
    source = write_gguf(folder.path / "odd.gguf", {"blk.0.ffn_up.weight": gaussian(64, 96)})
    out, err = folder.run("--target-bpw", "9", "--target-types", "q8_0", "--sensitivity", "usual", "--no-fallback", source=source)
    assert "fell back" not in out and "instead of" not in err and folder.types() == {"blk.0.ffn_up.weight": "q8_0"}


def test_nothing_is_left_to_choose(fresh):
    out, _ = fresh.run("--target-kld", "0.1", "--tensor-type", ".=f16")
    assert "options fix the types of all matrices" in out and not fresh.runs() and set(fresh.types().values()) == {"f16", "f32"}


def test_a_quantized_model_is_not_measured(fresh):
    fresh.run("--type", "itq3_s", "--pure")
    source = fresh.out.rename(fresh.path / "small-itq3s.gguf")
    _, err = fresh.run("--target-bpw", "2.5", "--allow-requantize", source=source)
    assert "using the sensitivities of another model: the model is quantized already" in err and not fresh.runs()


def test_the_end_of_a_text():
    n = sensitivity.TEXT_BYTES
    assert sensitivity.cut_text(b"one line") == b"one line" and sensitivity.cut_text(b"a\nb\n") == b"a\nb\n"
    assert sensitivity.cut_text(b"x" * (2 * n)) == b"x" * n
    assert sensitivity.cut_text(b"x" * n + b"\n" + b"y" * (n - 9)) == b"y" * (n - 9)


def test_costs_that_are_measured_as_less_than_nothing():
    """Sensitivities of layers stay positive and within what the classes cost."""
    names = [f"blk.{i}.ffn_up.weight" for i in range(3)]
    parts = [(sensitivity.ProbedPart("blk.*.ffn_up.weight", tuple(names)), 1e-5)]
    parts += [(sensitivity.ProbedPart(f"blk.{i}", (name,)), cost) for i, (name, cost) in enumerate(zip(names, (2e-5, -3e-5, -1e-5), strict=True))]
    found = sensitivity.fit_sensitivities(dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.07), parts)
    total = sum(0.07 * s for s in found.values())
    assert abs(total - 1e-5) < 1e-9 and min(found.values()) > 1e-8 and max(found.values()) < 1e-5 / 0.07 * 1.001


def test_a_dry_run_shows_the_plan_and_writes_nothing(fresh, measured):
    folder = fresh
    before = files(folder.path)
    out, err = folder.run("--target-bpw", "3.3", "--dry-run")
    assert files(folder.path) == before and not folder.runs()
    assert "using the sensitivities of another model: --dry-run runs no model" in err
    assert "predicted KLD" in out and "sensitivities of another model" in out and "target-bpw 3.3 as asked" in out
    folder.kept.write_text(measured)
    out, _ = folder.run("--target-bpw", "3.3", "--dry-run")
    assert "of another model" not in out and files(folder.out.parent) == {folder.kept.name: measured.encode()}


def test_short_rows_get_types_that_fit(folder):
    source = write_gguf(folder.path / "odd.gguf", {f"blk.{i}.ffn_up.weight": gaussian(64, n, seed=i) for i, n in enumerate((192, 96, 80))})
    folder.run("--target-bpw", "6", "--sensitivity", "usual", source=source)
    assert folder.types()["blk.2.ffn_up.weight"] == "f16"
    assert folder.types()["blk.1.ffn_up.weight"] in ("iq4_nl", "q5_0", "q5_1", "q8_0", "f16")
    assert bits_in_all(folder.out) <= 16


def test_second_moments_weigh_the_errors(folder):
    inputs = {n: correlated(600, m.shape[-1], seed=k) for k, (n, m) in enumerate(MATRICES.items()) if n.startswith("blk") and m.ndim > 1}
    moments = write_moments(folder.path / "moments.gguf", inputs)
    plain = json.loads(folder.kept.read_text())["errors"]
    _, err = folder.run("--target-bpw", "4", "--imatrix", moments, "--target-types", "itq2_t,iq2_xxs,q4_k", "--sensitivity", "usual")
    assert "unweighted error" not in err
    weighted = json.loads(folder.kept.read_text())["errors"]
    name = "blk.1.ffn_up.weight"
    assert weighted[name]["itq2_t"] < 0.9 * plain[name]["itq2_t"]  # error feedback: the weighted error is what the encoder minimises
    assert "iq2_xxs" in weighted[name] and "iq2_xxs" not in weighted["token_embd.weight"]  # which has no importances


@pytest.mark.parametrize(("do", "part"), [("fail", "exited with 3"), ("say nothing", "gave no KL divergence")])
def test_a_failing_run_of_the_model_leaves_the_errors_alone(fresh, monkeypatch, do, part):
    folder = fresh
    monkeypatch.setenv("FAKE_PERPLEXITY_DO", do)
    line = folder.error("--target-bpw", "4")
    assert part in line and "--sensitivity usual" in line
    assert "reusing cached errors of all types" in folder.run("--target-bpw", "4", "--sensitivity", "usual")[1]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--type", "auto"], ["--type auto", "--target-size"]),
        ([], ["required: --type", "--target-size"]),
        (["--target-size", "10.5GiB", "--type", "itq3_t"], ["--type itq3_t and --target-size", "--type auto", "--target-types itq3_t"]),
        (["--target-size", "1G", "--target-bpw", "3"], ["--target-size and --target-bpw", "one of them"]),
        (["--target-size", "10.5Gib/s"], ["--target-size: got '10.5Gib/s'", "10.5GiB"]),
        (["--target-size", "-1"], ["--target-size: got '-1'"]),
        (["--target-bpw", "0"], ["--target-bpw: got '0'", "above 0"]),
        (["--target-kld", "nan"], ["--target-kld: got 'nan'", "above 0"]),
        (["--target-kld", "small"], ["--target-kld: got 'small'"]),
        (["--target-bpw", "3", "--target-types", "itq2_t,q9"], ["--target-types: unknown type 'q9'"]),
        (["--type", "itq3_t", "--target-types", "itq2_t"], ["--target-types needs --target-size"]),
        (["--target-bpw", "3", "--pure"], ["--pure and --target-bpw"]),
        (["--target-bpw", "3", "--fallback-above", "3"], ["--fallback-above and --target-bpw"]),
        (["--target-bpw", "3", "--sensitivity", "guessed"], ["--sensitivity: got 'guessed'", "measured or usual"]),
        (["--target-bpw", "3", "--target-types", "iq2_xxs"], ["--target-types: tensor", "without an importance matrix", "add a type"]),
        (["--target-size", "1MB", "--target-types", "q4_k", "--encoder", "numpy"], ["--target-types: tensor", "q4_k with the numpy encoder"]),
    ],
)
def test_bad_input(tmp_path, flags, parts):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})
    before = files(tmp_path)
    check_error(run_quantize(source, tmp_path / "out.gguf", *flags), *parts)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("10.5GiB", 11274289152), ("700MB", 700_000_000), ("700m", 700_000_000), ("2G", 2_000_000_000), ("1e6", 1_000_000), ("3 KiB", 3072),
     ("123456", 123456), ("5 bytes", 5), (".5T", 500_000_000_000)],
)
def test_sizes(text, n_bytes):
    assert target.parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.5.GiB", "10 Gbit", "0", "1e99", "-3G", "0x10"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="--target-size: got"):
        target.parse_size(text)


def test_parts_of_a_deep_model():
    names = [f"blk.{i}.{n}.weight" for i in range(32) for n in ("attn_q", "ffn_down_exps")] + ["output.weight"]
    layers = sensitivity.layer_parts(names)
    assert [p.name for p in layers] == ["blk.0", "blk.1", "blk.2-8", "blk.9-15", "blk.16-22", "blk.23-30", "blk.31"]
    assert sorted(n for p in layers for n in p.tensors) == sorted(names[:-1])
    assert [len(p.tensors) for p in sensitivity.class_parts(names)] == [32, 32, 1]
    usual = sensitivity.usual_sensitivities(names)
    assert sum(usual[n] for n in names if "ffn_down_exps" in n) == pytest.approx(sensitivity.USUAL["ffn_down"])
    assert usual["blk.0.attn_q.weight"] == 8 * usual["blk.1.attn_q.weight"] > 0 and usual["output.weight"] == sensitivity.USUAL["output"]


def test_a_report_that_exists_is_said_before_anything_is_measured(fresh):
    report = fresh.path / "report.json"
    report.write_text("{}")
    found = program.main([str(fresh.model), str(fresh.out), "--importance", "none", "--target-bpw", "4", "--report", str(report)])
    err = fresh.capsys.readouterr().err
    assert found == 1 and err.startswith("error: --report: ") and "exists" in err
    assert not fresh.runs() and not fresh.kept.exists()
