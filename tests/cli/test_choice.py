"""Targets: types chosen per tensor under a limit of bytes, bits per weight or KL divergence, and the output."""

import json

import gguf
import pytest

from ggml_ext import quantize as program
from ggml_ext._allocation import sensitivity, target
from ggml_ext._base.errors import UserError
from helpers import choosing
from helpers.choosing import COSTS, FREE, LAYERS, MATRICES, SHAPES, bits_per_weight
from helpers.commands import run_quantize
from helpers.errors import check_error, files
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments

fresh, measurements, workspace = choosing.fresh, choosing.measurements, choosing.workspace


@pytest.mark.slow
def test_types_follow_measured_sensitivities(fresh):
    workspace = fresh
    out, _ = workspace.run("--target-bpw", "4", "--report", workspace.path / "report.json")
    assert bits_per_weight(workspace.out) <= 4
    cache = json.loads(workspace.cache.read_text())
    parts = [(sensitivity.ProbedPart(name, tuple(tensors)), cost) for name, tensors, cost in cache["costs"]]
    sensitivities = sensitivity.fit_sensitivities(sensitivity.usual_sensitivities(FREE), cache["probe_errors"], parts)
    # The copies are 16-bit floats, which changes errors of 0.06 by at most 2^-11 and the costs, printed with 9 digits, by less.
    assert sensitivities == pytest.approx(COSTS, rel=1e-3)
    # Every part was changed once and restored.
    classes = [[n for n in FREE if name in n] for name in (*SHAPES, "token_embd")]
    layers = [[n for n in FREE if n.startswith(f"blk.{i}.")] for i in range(LAYERS)]
    assert sorted(map(sorted, workspace.runs())) == sorted(map(sorted, [[], *classes, *layers]))
    # More bits where errors cost more: attn_v before ffn_up, the first layer before the third.
    bpw = {n: 8 * t.n_bytes / t.n_elements for n, t in read_tensors(workspace.out).items()}
    assert bpw["blk.0.attn_v.weight"] > bpw["blk.2.ffn_up.weight"]
    assert sum(bpw[f"blk.{i}.attn_v.weight"] for i in range(4)) > sum(bpw[f"blk.{i}.ffn_up.weight"] for i in range(4))
    # The predicted divergence is the sum of the cached costs, and the summary shows it.
    report = json.loads((workspace.path / "report.json").read_text())
    types = workspace.types()
    predicted = sum(sensitivities[n] * cache["errors"][n][types[n]] for n in FREE)
    assert report["predicted_kl_divergence"] == pytest.approx(predicted)
    assert report["optimality_gap"] == 0 and report["sensitivities"] == "measured" and report["type"] == "auto"
    assert f"predicted KL divergence {predicted:.4g}; optimal for these types" in out
    assert "target-bpw 4 as requested" in out
    assert gguf.GGUFReader(workspace.out).fields["ggml_ext.options"].contents().split()[0] == "target-bpw=4"


def test_no_other_choice_of_the_same_size_is_better(workspace):
    """Compares every exchange of types between two tensors, and every uniform type."""
    workspace.run("--target-bpw", "3.5")
    cache, types = json.loads(workspace.cache.read_text()), workspace.types()
    sizes = {n: t.n_elements for n, t in read_tensors(workspace.out).items()}
    room = 3.5 * sum(sizes.values()) - 32 * sizes["blk.0.attn_norm.weight"]

    def cost(chosen):
        return sum(COSTS[n] * cache["errors"][n][chosen[n]] for n in FREE)

    def bits(chosen):
        return sum(sizes[n] * gguf.GGML_QUANT_SIZES[q][1] * 8 / gguf.GGML_QUANT_SIZES[q][0]
                   for n in FREE for q in [gguf.GGMLQuantizationType[chosen[n].upper()]])

    assert bits(types) <= room
    others = [{**types, a: x, b: y} for a in FREE for b in FREE if a < b for x in cache["errors"][a] for y in cache["errors"][b]]
    others += [{**types, **dict.fromkeys(FREE, q)} for q in cache["errors"][FREE[0]]]
    fitting = [c for c in map(cost, (o for o in others if bits(o) <= room))]
    assert len(fitting) > 500 and cost(types) <= min(fitting) * (1 + 1e-3)  # the sensitivities differ by that from COSTS


def test_kld_target_gives_the_smallest_file(workspace):
    sizes = {}
    for kld in ("0.2", "0.02", "0.002"):
        out, _ = workspace.run("--target-kld", kld, "--report", workspace.path / f"{kld}.json")
        predicted = json.loads((workspace.path / f"{kld}.json").read_text())["predicted_kl_divergence"]
        assert 0.9 * float(kld) < predicted <= float(kld)
        sizes[kld] = workspace.out.stat().st_size
    assert sizes["0.2"] < sizes["0.02"] < sizes["0.002"]
    # The same number of bits as a size target gives the same choice or a better one.
    out, _ = workspace.run("--target-size", sizes["0.02"], "--report", workspace.path / "size.json")
    assert json.loads((workspace.path / "size.json").read_text())["predicted_kl_divergence"] <= 0.02


def test_size_target_is_the_file_size(workspace):
    for size in (*range(31_000, 33_000, 97), 50_000):  # data of 15 rows are padded
        workspace.run("--target-size", size)
        assert 0.9 * size < workspace.out.stat().st_size <= size, size
    workspace.run("--target-size", "34KiB", "--split-max-size", "1M", "--target-types", "itq2_t,ditto3,q8_0")
    parts = [p for p in workspace.out.parent.iterdir() if "-of-" in p.name]
    assert parts and sum(p.stat().st_size for p in parts) <= 34 * 1024


def test_too_small_size_names_the_smallest(workspace):
    for option, number in (("--target-size", r"1000"), ("--target-bpw", "1")):
        line = workspace.error(option, number)
        assert f"{option} {number} is below the smallest possible, " in line
        assert "or list the default types (see --help) and smaller ones in --target-types" in line
        least = line.split("(")[1].split(" bytes")[0].replace(",", "") if "MiB" in line else line.split("possible, ")[1].split(" bpw")[0]
        workspace.run(option, least)
        if option == "--target-bpw":  # a size leaves room for the keys that OUT may get
            assert set(workspace.types().values()) == {"itq1_t", "f32"}
        workspace.out.unlink()
    line = workspace.error("--target-bpw", "1.5", "--target-types", "itq2_t,itq3_t")
    assert "raise it to that, or add smaller types to --target-types" in line
    line = workspace.error("--target-kld", "0.01", "--target-types", "itq2_t,itq3_t")
    assert "is below the smallest possible, " in line and "add larger types to --target-types" in line
    workspace.run("--target-kld", line.split("possible, ")[1].split(":")[0], "--target-types", "itq2_t,itq3_t")
    assert set(workspace.types().values()) == {"itq3_t", "f32"}


def test_large_size_copies_the_model(fresh):
    workspace = fresh
    out, err = workspace.run("--target-size", "1GB")
    assert "target-size 1GB: the input is within the target; no type changes" in out
    assert set(workspace.types().values()) == {"f16", "f32"} and not workspace.runs() and not workspace.cache.exists()
    assert gguf.GGUFReader(workspace.out).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
    out, _ = workspace.run("--target-bpw", "12", "--target-types", "itq2_t,q6_k", "--sensitivity", "usual")
    assert "target-bpw 12 exceeds what the best types need: OUT is smaller" in out
    assert set(workspace.types().values()) == {"q6_k", "f32"}
    assert gguf.GGUFReader(workspace.out).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q6_K


def test_types_below_two_bits_join_where_they_are_needed(workspace):
    workspace.run("--target-bpw", "1.8")
    assert {"itq1_t", "itq1h_t"} & set(workspace.types().values())
    assert bits_per_weight(workspace.out) <= 1.8
    workspace.run("--target-bpw", "2.6")
    assert not {"itq1_t", "itq1h_t"} & set(workspace.types().values())
    workspace.out.unlink()
    line = workspace.error("--target-bpw", "1.8", "--target-types", "itq2_t,itq3_t")
    assert "is below the smallest possible, 2." in line


def test_types_of_single_tensors_have_priority(workspace):
    workspace.run("--target-bpw", "5", "--tensor-type", "blk.2=q8_0", "--tensor-type", "attn_v=itq3_t", "--output-tensor-type", "q5_k")
    types = workspace.types()
    assert {q for n, q in types.items() if "blk.2." in n} == {"q8_0"}
    assert {q for n, q in types.items() if "attn_v" in n and "blk.2." not in n} == {"itq3_t"}
    assert types["token_embd.weight"] == "q5_k"  # also the output matrix
    assert bits_per_weight(workspace.out) <= 5
    workspace.run("--target-bpw", "4", "--token-embedding-type", "itq3_t")
    assert workspace.types()["token_embd.weight"] == "itq3_t"


def test_size_below_the_single_tensors_is_refused(fresh):
    line = fresh.error("--target-bpw", "4", "--tensor-type", ".=q8_0")
    assert "is below the smallest possible, 8.5" in line and "drop the options that fix types" in line


def test_requested_types_are_no_fallbacks(workspace):
    source = write_gguf(workspace.path / "odd.gguf", {"blk.0.ffn_up.weight": gaussian(64, 96)})
    out, err = workspace.run("--target-bpw", "9", "--target-types", "q8_0", "--sensitivity", "usual", "--no-fallback", source=source)
    assert "fallback types" not in out and "instead of" not in err and workspace.types() == {"blk.0.ffn_up.weight": "q8_0"}


def test_target_without_free_tensors_is_refused(fresh):
    out, _ = fresh.run("--target-kld", "0.1", "--tensor-type", ".=f16")
    assert "options fix the types of all matrices" in out and not fresh.runs() and set(fresh.types().values()) == {"f16", "f32"}


def test_quantized_model_is_refused(fresh):
    fresh.run("--type", "itq3_s", "--pure")
    source = fresh.out.rename(fresh.path / "small-itq3s.gguf")
    _, err = fresh.run("--target-bpw", "2.5", "--allow-requantize", source=source)
    assert "using the sensitivities of another model: the model is quantized already" in err and not fresh.runs()


def test_end_of_the_text_is_measured():
    n = sensitivity.TEXT_BYTES
    assert sensitivity.cut_text(b"one line") == b"one line" and sensitivity.cut_text(b"a\nb\n") == b"a\nb\n"
    assert sensitivity.cut_text(b"x" * (2 * n)) == b"x" * n
    assert sensitivity.cut_text(b"x" * n + b"\n" + b"y" * (n - 9)) == b"y" * (n - 9)


def test_negative_costs_give_positive_sensitivities():
    """Sensitivities of layers stay positive and bounded by the cost of the classes."""
    names = [f"blk.{i}.ffn_up.weight" for i in range(3)]
    parts = [(sensitivity.ProbedPart("blk.*.ffn_up.weight", tuple(names)), 1e-5)]
    parts += [(sensitivity.ProbedPart(f"blk.{i}", (name,)), cost) for i, (name, cost) in enumerate(zip(names, (2e-5, -3e-5, -1e-5), strict=True))]
    sensitivities = sensitivity.fit_sensitivities(dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.07), parts)
    total = sum(0.07 * s for s in sensitivities.values())
    assert abs(total - 1e-5) < 1e-9 and min(sensitivities.values()) > 1e-8 and max(sensitivities.values()) < 1e-5 / 0.07 * 1.001


def test_dry_run_shows_the_plan_and_writes_nothing(fresh, measurements):
    workspace = fresh
    before = files(workspace.path)
    out, err = workspace.run("--target-bpw", "3.3", "--dry-run")
    assert files(workspace.path) == before and not workspace.runs()
    assert "using the sensitivities of another model: --dry-run runs no model" in err
    assert "predicted KLD" in out and "sensitivities of another model" in out and "target-bpw 3.3 as requested" in out
    workspace.cache.write_text(measurements)
    out, _ = workspace.run("--target-bpw", "3.3", "--dry-run")
    assert "of another model" not in out and files(workspace.out.parent) == {workspace.cache.name: measurements.encode()}


def test_short_rows_get_fitting_types(workspace):
    source = write_gguf(workspace.path / "odd.gguf", {f"blk.{i}.ffn_up.weight": gaussian(64, n, seed=i) for i, n in enumerate((192, 96, 80))})
    workspace.run("--target-bpw", "6", "--sensitivity", "usual", source=source)
    assert workspace.types()["blk.2.ffn_up.weight"] == "f16"
    assert workspace.types()["blk.1.ffn_up.weight"] in ("itq2_t32", "itq3_t32", "itq4_t32", "iq4_nl", "q5_0", "q5_1", "q8_0", "f16")
    assert bits_per_weight(workspace.out) <= 16


def test_hessians_weight_the_errors(workspace):
    inputs = {n: correlated(600, m.shape[-1], seed=k) for k, (n, m) in enumerate(MATRICES.items()) if n.startswith("blk") and m.ndim > 1}
    moments = write_moments(workspace.path / "moments.gguf", inputs)
    plain = json.loads(workspace.cache.read_text())["errors"]
    _, err = workspace.run("--target-bpw", "4", "--imatrix", moments, "--target-types", "itq2_t,iq2_xxs,q4_k", "--sensitivity", "usual")
    assert "plain errors" not in err
    weighted = json.loads(workspace.cache.read_text())["errors"]
    name = "blk.1.ffn_up.weight"
    assert weighted[name]["itq2_t"] < 0.9 * plain[name]["itq2_t"]  # error feedback minimizes the weighted error
    assert "iq2_xxs" in weighted[name] and "iq2_xxs" not in weighted["token_embd.weight"]  # embeddings have no importances


@pytest.mark.parametrize(("do", "part"), [("fail", "exited with 3"), ("say nothing", "printed no KL divergence")])
def test_failed_perplexity_run_keeps_the_errors(fresh, monkeypatch, do, part):
    workspace = fresh
    monkeypatch.setenv("FAKE_PERPLEXITY_DO", do)
    line = workspace.error("--target-bpw", "4")
    assert part in line and "--sensitivity usual" in line
    assert "reusing cached errors of all types" in workspace.run("--target-bpw", "4", "--sensitivity", "usual")[1]


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
        (["--target-bpw", "3", "--target-types", "iq2_xxs"], ["--target-types: tensor", "without an imatrix", "add a type"]),
        (["--target-size", "1MB", "--target-types", "q4_k", "--encoder", "numpy"], ["--target-types: tensor", "q4_k with the numpy encoder"]),
    ],
)
def test_bad_input_is_refused(tmp_path, flags, parts):
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": gaussian(8, 256)})
    before = files(tmp_path)
    check_error(run_quantize(source, tmp_path / "out.gguf", *flags), *parts)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("10.5GiB", 11274289152), ("700MB", 700_000_000), ("700m", 700_000_000), ("2G", 2_000_000_000), ("1e6", 1_000_000), ("3 KiB", 3072),
     ("123456", 123456), ("5 bytes", 5), (".5T", 500_000_000_000)],
)
def test_sizes_are_parsed(text, n_bytes):
    assert target.parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.5.GiB", "10 Gbit", "0", "1e99", "-3G", "0x10"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(UserError, match="--target-size: got"):
        target.parse_size(text)


def test_deep_model_is_measured_in_groups():
    names = [f"blk.{i}.{n}.weight" for i in range(32) for n in ("attn_q", "ffn_down_exps")] + ["output.weight"]
    layers = sensitivity.layer_parts(names)
    assert [p.name for p in layers] == ["blk.0", "blk.1", "blk.2-8", "blk.9-15", "blk.16-22", "blk.23-30", "blk.31"]
    assert sorted(n for p in layers for n in p.tensors) == sorted(names[:-1])
    assert [len(p.tensors) for p in sensitivity.class_parts(names)] == [32, 32, 1]
    defaults = sensitivity.usual_sensitivities(names)
    assert sum(defaults[n] for n in names if "ffn_down_exps" in n) == pytest.approx(sensitivity.CLASS_SENSITIVITIES["ffn_down"])
    assert defaults["blk.0.attn_q.weight"] == 8 * defaults["blk.1.attn_q.weight"] > 0 and defaults["output.weight"] == sensitivity.CLASS_SENSITIVITIES["output"]


def test_existing_report_is_refused_before_measuring(fresh):
    report = fresh.path / "report.json"
    report.write_text("{}")
    exit_code = program.main([str(fresh.model), str(fresh.out), "--importance", "none", "--target-bpw", "4", "--report", str(report)])
    err = fresh.capsys.readouterr().err
    assert exit_code == 1 and err.startswith("error: --report: ") and "exists" in err
    assert not fresh.runs() and not fresh.cache.exists()
