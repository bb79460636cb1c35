"""Targets: types chosen for each tensor under a limit of bytes, of bits a weight or of KL divergence, and what the user is told."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import gguf
import pytest

from ggml_ext import quantize as program
from ggml_ext._base.errors import UserError
from ggml_ext._base.signals import Stopped
from ggml_ext._budget import inquiry, sensitivity, target
from ggml_ext._budget import kept as results
from helpers.commands import run_quantize
from helpers.errors import check_error, files
from helpers.models import ROOT, gaussian, read_tensors, write_gguf
from helpers.moments_files import correlated, write_moments

LAYERS = 4
SHAPES = {"attn_v": (15, 256), "ffn_up": (32, 256), "ffn_down": (16, 512)}
MATRICES = {
    f"blk.{i}.{name}.weight": gaussian(*shape, seed=10 * i + k) for i in range(LAYERS) for k, (name, shape) in enumerate(SHAPES.items())
} | {"token_embd.weight": gaussian(32, 256, seed=99), "blk.0.attn_norm.weight": gaussian(256)}
FREE = [name for name in MATRICES if "norm" not in name]
# what an error costs: a factor for each class and one for each layer
OF_CLASS, OF_LAYER = {"attn_v": 3.0, "ffn_up": 0.2, "ffn_down": 1.0}, (4.0, 1.0, 0.5, 2.0)
COSTS = {f"blk.{i}.{name}.weight": OF_CLASS[name] * OF_LAYER[i] for i in range(LAYERS) for name in SHAPES} | {"token_embd.weight": 1.5}
# said where nothing was measured before: the default types, which rows of 256 can all have, and F16, the source's own
ALL_ANEW = f"errors of {len(target.DEFAULT_TYPES) + 1} types"


class Folder:
    """A model, and the quantizer in this process with a stand-in for llama-perplexity."""

    def __init__(self, path, monkeypatch, capsys):
        self.path, self.capsys = path, capsys
        self.model = write_gguf(path / "small-f16.gguf", MATRICES)
        self.out, self.log = path / "out" / "out.gguf", path / "log"
        self.kept = path / "out" / "small-f16.choice.json"
        self.out.parent.mkdir()
        fake = path / "llama-perplexity"
        search = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        fake.write_text(f"#!/bin/sh\nPYTHONPATH='{search}' exec '{sys.executable}' '{ROOT / 'tests' / 'helpers' / 'fake_perplexity.py'}' \"$@\"\n")
        fake.chmod(0o755)
        for key, value in (("MODEL", self.model), ("COSTS", json.dumps(COSTS)), ("LOG", self.log)):
            monkeypatch.setenv(f"FAKE_PERPLEXITY_{key}", str(value))
        monkeypatch.setattr(inquiry, "find_tool", lambda name: fake)

    def run(self, *flags, code=0, source=None):
        """Exit code checked; standard output and error."""
        importance = [] if any(str(f).startswith("--imatrix") for f in flags) else ["--importance", "none"]
        found = program.main([str(source or self.model), str(self.out), "--force", "--threads", "2", *importance, *map(str, flags)])
        out, err = self.capsys.readouterr()
        assert found == code, err
        return out, err

    def error(self, *flags):
        """The one line of it; nothing changed in the folder but kept results."""
        _, err = self.run(*flags, code=1)
        (line,) = [line for line in err.splitlines() if not line.startswith(("note: ", "warning: "))]
        assert line.startswith("error: ") and {p.name for p in self.out.parent.iterdir()} <= {self.kept.name}
        return line

    def runs(self) -> list[list[str]]:
        """The tensors with errors in each run of llama-perplexity so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def types(self) -> dict[str, str]:
        return {name: t.tensor_type.name.lower() for name, t in read_tensors(self.out).items()}


@pytest.fixture
def fresh(tmp_path, monkeypatch, capsys, lib):
    """Nothing was measured."""
    return Folder(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, lib):
    """What a run on the model keeps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = Folder(tmp_path_factory.mktemp("measured"), monkeypatch, None)
        assert program.main([str(folder.model), str(folder.out), "--importance", "none", "--target-bpw", "4", "--quiet"]) == 0
        return folder.kept.read_text()


@pytest.fixture
def folder(fresh, measured):
    """An earlier run measured what there is to measure."""
    fresh.kept.write_text(measured)
    return fresh


def bits_in_all(path):
    tensors = read_tensors(path).values()
    return 8 * sum(t.n_bytes for t in tensors) / sum(t.n_elements for t in tensors)


@pytest.mark.slow
def test_sensitivities_are_measured_and_types_follow_them(fresh):
    folder = fresh
    out, _ = folder.run("--target-bpw", "4", "--report", folder.path / "report.json")
    assert bits_in_all(folder.out) <= 4
    kept = json.loads(folder.kept.read_text())
    parts = [(sensitivity.Probed(name, tuple(tensors)), cost) for name, tensors, cost in kept["costs"]]
    found = sensitivity.fit(sensitivity.usual(FREE), kept["probe_errors"], parts)
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
    assert f"predicted KL divergence {predicted:.4g}; no choice of these types is better by the model" in out
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


def test_a_second_target_uses_what_was_measured(folder, measured):
    _, err = folder.run("--target-kld", "0.05")
    assert not folder.runs() and err.count("used again") == 2 and folder.kept.read_text() == measured
    _, err = folder.run("--target-bpw", "3", "--target-types", "itq2_t,q2_k,q4_k")
    assert not folder.runs() and "errors of 1 type are" in err  # q2_k
    assert set(folder.types().values()) <= {"itq2_t", "q2_k", "q4_k", "f32"} and bits_in_all(folder.out) <= 3
    assert len(json.loads(folder.kept.read_text())["errors"][FREE[0]]) == len(json.loads(measured)["errors"][FREE[0]]) + 1


@pytest.mark.parametrize("change", ["half", "a list", "another model", "another effort"])
def test_what_is_kept_of_others_or_damaged_is_not_used(folder, measured, change):
    contents = {"half": measured[: len(measured) // 2], "a list": "[]", "another model": measured.replace('"sha256": "', '"sha256": "0')}
    content = contents.get(change, measured)
    folder.kept.write_text(content)
    _, err = folder.run("--target-bpw", "4", "--dry-run", *(["--effort", "fast"] if change == "another effort" else []))
    assert "used again" not in err and ALL_ANEW in err and folder.kept.read_text() == content


def change(measured: str, *path, value) -> str:
    """The kept results with another value at a place; keys and indices lead there."""
    kept = json.loads(measured)
    inside = kept
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return json.dumps(kept)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("errors", FREE[1], "q4_k"), "0.01"), (("errors", FREE[1], "q4_k"), float("nan")), (("errors", FREE[1], "q4_k"), -0.01),
        (("errors", FREE[1], "q4_k"), True), (("errors", FREE[1], "q4_k"), 10**400), (("errors", FREE[1]), [0.1, 0.2]), (("errors",), [1]),
        (("probe_errors", FREE[1]), "0.06"), (("probe_errors", FREE[1]), float("nan")), (("probe_errors",), FREE),
        (("costs", 0, 2), "0.1"), (("costs", 0, 2), float("inf")), (("costs", 0), ["blk.0"]), (("costs", 0, 1), FREE[0]),
        (("costs", 0, 1), ["blk.9.attn_v.weight"]), (("costs", 0, 0), 3), (("costs",), {}), (("costs",), 7), (("text",), []),
        (("format",), "1"), (("more",), 1),
    ],
    ids=lambda v: str(v)[:30],
)
def test_kept_results_with_values_of_the_wrong_kind_are_not_used(folder, measured, path, value):
    content = change(measured, *path, value=value)
    folder.kept.write_text(content)
    _, err = folder.run("--target-bpw", "4", "--dry-run")
    assert "used again" not in err and ALL_ANEW in err and folder.kept.read_text() == content


def test_kept_results_that_are_nested_too_deeply_are_not_used(folder):
    folder.kept.write_text("[" * 100_000)
    assert ALL_ANEW in folder.run("--target-bpw", "4", "--dry-run")[1]


def test_costs_below_nothing_and_errors_without_end_are_used(folder, measured):
    """Noise may say the one of a cost; zeros that are stored as something else have the other."""
    content = change(change(measured, "costs", 0, 2, value=-1e-5), "errors", FREE[1], "itq2_t", value=float("inf"))
    folder.kept.write_text(content)
    assert folder.run("--target-bpw", "4", "--dry-run")[1].count("used again") == 2


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
    assert "target-size 1GB is enough for the types of the input: everything stays as it is" in out
    assert set(folder.types().values()) == {"f16", "f32"} and not folder.runs() and not folder.kept.exists()
    assert gguf.GGUFReader(folder.out).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
    out, _ = folder.run("--target-bpw", "12", "--target-types", "itq2_t,q6_k", "--sensitivity", "usual")
    assert "target-bpw 12 is enough for the best of the types in all tensors: OUT is smaller" in out
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
    assert "is below the smallest possible, 8.5" in line and "leave the types of single tensors out" in line


def test_types_that_were_asked_for_are_no_fallbacks(folder):
    source = write_gguf(folder.path / "odd.gguf", {"blk.0.ffn_up.weight": gaussian(64, 96)})
    out, err = folder.run("--target-bpw", "9", "--target-types", "q8_0", "--sensitivity", "usual", "--no-fallback", source=source)
    assert "fell back" not in out and "instead of" not in err and folder.types() == {"blk.0.ffn_up.weight": "q8_0"}


def test_nothing_is_left_to_choose(fresh):
    out, _ = fresh.run("--target-kld", "0.1", "--tensor-type", ".=f16")
    assert "nothing is left to choose" in out and not fresh.runs() and set(fresh.types().values()) == {"f16", "f32"}


def test_a_quantized_model_is_not_measured(fresh):
    fresh.run("--type", "itq3_s", "--pure")
    source = fresh.out.rename(fresh.path / "small-itq3s.gguf")
    _, err = fresh.run("--target-bpw", "2.5", "--allow-requantize", source=source)
    assert "what errors cost is taken from another model: tensors of the model are quantized already" in err and not fresh.runs()


def test_the_end_of_a_text():
    n = sensitivity.TEXT_BYTES
    assert sensitivity.end_of(b"one line") == b"one line" and sensitivity.end_of(b"a\nb\n") == b"a\nb\n"
    assert sensitivity.end_of(b"x" * (2 * n)) == b"x" * n
    assert sensitivity.end_of(b"x" * n + b"\n" + b"y" * (n - 9)) == b"y" * (n - 9)


def test_costs_that_are_measured_as_less_than_nothing():
    """Sensitivities of layers stay positive and within what the classes cost."""
    names = [f"blk.{i}.ffn_up.weight" for i in range(3)]
    parts = [(sensitivity.Probed("blk.*.ffn_up.weight", tuple(names)), 1e-5)]
    parts += [(sensitivity.Probed(f"blk.{i}", (name,)), cost) for i, (name, cost) in enumerate(zip(names, (2e-5, -3e-5, -1e-5), strict=True))]
    found = sensitivity.fit(dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.07), parts)
    total = sum(0.07 * s for s in found.values())
    assert abs(total - 1e-5) < 1e-9 and min(found.values()) > 1e-8 and max(found.values()) < 1e-5 / 0.07 * 1.001


def test_a_dry_run_shows_the_plan_and_writes_nothing(fresh, measured):
    folder = fresh
    before = files(folder.path)
    out, err = folder.run("--target-bpw", "3.3", "--dry-run")
    assert files(folder.path) == before and not folder.runs()
    assert "what errors cost is taken from another model: --dry-run runs no model" in err
    assert "predicted KLD" in out and "with the sensitivities of another model" in out and "target-bpw 3.3 as asked" in out
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
    assert "plain errors" not in err
    weighted = json.loads(folder.kept.read_text())["errors"]
    name = "blk.1.ffn_up.weight"
    assert weighted[name]["itq2_t"] < 0.9 * plain[name]["itq2_t"]  # error feedback: the weighted error is what the encoder minimises
    assert "iq2_xxs" in weighted[name] and "iq2_xxs" not in weighted["token_embd.weight"]  # which has no importances


def test_an_interrupt_keeps_the_errors_that_are_measured(fresh, monkeypatch):
    folder, sample, done = fresh, inquiry.Inquiry._sample_error, []

    def stop(self, tensor, *others):
        if tensor.name == FREE[-1] and not done:
            done.append(tensor.name)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the main thread hears of it
        return sample(self, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(inquiry.Inquiry, "_sample_error", stop)
        _, err = folder.run("--target-bpw", "4", "--sensitivity", "usual", code=128 + signal.SIGTERM)
    assert "error: interrupted" in err
    kept = json.loads(folder.kept.read_text())["errors"]
    assert kept and set(kept) < set(FREE) and {p.name for p in folder.out.parent.iterdir()} == {folder.kept.name}
    _, err = folder.run("--target-bpw", "4", "--sensitivity", "usual")
    assert f"rows of {len(FREE) - len(kept)} tensors" in err


PARTS = [[n for n in FREE if name in n] for name in (*SHAPES, "token_embd")] + [[n for n in FREE if f"blk.{i}." in n] for i in range(LAYERS)]
# A run that is killed as its 8th tensor or its 4th part begins: of those before the first at least has its place in the file by then,
# as the thread begins a tensor when the one two before it is dealt with.
KILL = """
import os, signal, sys
from pathlib import Path
from ggml_ext import quantize
from ggml_ext._budget import inquiry, sensitivity
tensors, parts = set(), []
sample, kld = inquiry.Inquiry._sample_error, sensitivity.Probe._kld
def note(done, limit):
    if len(done) == limit:
        os.kill(os.getpid(), signal.SIGKILL)
def sample_error(self, tensor, *others):
    tensors.add(tensor.name)
    note(tensors, 8)
    return sample(self, tensor, *others)
def measure(self, *args):
    parts.append(args)
    note(parts, 4)
    return kld(self, *args)
inquiry.find_tool = lambda name: Path(sys.argv[1])
inquiry.Inquiry._sample_error, sensitivity.Probe._kld = sample_error, measure
sys.exit(quantize.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_the_same_end(fresh):
    """No part is measured twice."""
    folder = fresh
    folder.run("--target-bpw", "4", "--threads", "1")
    expected, kept, runs = folder.out.read_bytes(), folder.kept.read_text(), folder.runs()
    for path in (folder.out, folder.kept, folder.log):
        path.unlink()
    command = [sys.executable, "-c", KILL, folder.path / "llama-perplexity", folder.model, folder.out, "--importance", "none"]
    command += ["--target-bpw", "4", "--threads", "1"]
    codes, before = [], ""
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(subprocess.run([*map(str, command)], capture_output=True, timeout=120).returncode)
        now = folder.kept.read_text()
        assert now != before or codes[-1] == 0, "a run kept nothing"
        before = now
    assert codes[-1] == 0 and 4 <= len(codes) <= 12  # 13 tensors and 8 parts; on a slow machine one of them a run
    assert folder.out.read_bytes() == expected and folder.kept.read_text() == kept
    assert [r for r in folder.runs() if r] == [r for r in runs if r] == PARTS


@pytest.fixture
def half(fresh, monkeypatch):
    """An interrupt came after three parts."""
    kld, count = sensitivity.Probe._kld, []

    def stop(self, *args):
        count.append(args)
        if len(count) == 4:
            raise Stopped(signal.SIGINT)
        return kld(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity.Probe, "_kld", stop)
        fresh.run("--target-bpw", "4", code=128 + signal.SIGINT)
    assert fresh.runs() == [[], *PARTS[:3]] and {p.name for p in fresh.out.parent.iterdir()} == {fresh.kept.name}
    return fresh


def test_an_interrupt_keeps_the_parts_that_are_measured(half, measured):
    assert [name for name, *_ in json.loads(half.kept.read_text())["costs"]] == [name for name, *_ in json.loads(measured)["costs"]][:3]
    # three parts are not taken for all
    _, err = half.run("--target-bpw", "4", "--dry-run")
    assert "what errors cost is taken from another model: --dry-run runs no model" in err
    _, err = half.run("--target-bpw", "4")
    assert "note: an earlier run was stopped: going on after 3 of 8 parts\n" in err
    assert [r for r in half.runs() if r] == PARTS and half.kept.read_text() == measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "path_and_value",
    [(("text", "chunks"), 7), (("probe_errors", FREE[1]), 0.5), (("costs", 1, 0), "blk.*.ffn_gate.weight"), (("costs", 1, 1), FREE[:2]),
     (("costs", 1), ["blk.0", FREE[:3], 0.1])],
    ids=str,
)
def test_parts_that_were_measured_with_something_else_are_measured_again(half, measured, path_and_value):
    path, value = path_and_value
    half.kept.write_text(change(half.kept.read_text(), *path, value=value))
    half.log.unlink()
    _, err = half.run("--target-bpw", "4")
    assert "going on after" not in err and [r for r in half.runs() if r] == PARTS and half.kept.read_text() == measured


def test_writing_takes_a_small_part_of_the_time(tmp_path, monkeypatch):
    """However long the list is: a write that takes a second is followed by some without."""
    now, written = [0.0], []

    def write(path):
        written.append(now[0])
        now[0] += 1.0

    keeper = results.Keeper(SimpleNamespace(write=write), tmp_path / "x.choice.json")
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    for _ in range(1000):
        keeper.write_now_and_then()
        now[0] += 0.5
    assert written[0] == 0 and 20 <= len(written) <= 30


def test_two_runs_that_keep_results_at_once(fresh, monkeypatch):
    """The second writes while the first does; what the last one kept is whole."""
    path, pid = fresh.kept, os.getpid()
    first, second = (results.Kept({"by": n}) for n in (1, 2))
    open_file = results.open_file

    def open_and_be_overtaken(part):
        monkeypatch.setattr(results, "open_file", open_file)
        found = open_file(part)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        second.write(path)
        assert results.Kept.read(path, {"by": 2}) == second
        monkeypatch.setattr(os, "getpid", lambda: pid)
        return found

    monkeypatch.setattr(results, "open_file", open_and_be_overtaken)
    first.write(path)
    assert json.loads(path.read_text())["made_from"] == {"by": 1}
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(("do", "part"), [("fail", "exited with 3"), ("say nothing", "gave no KL divergence")])
def test_a_failing_run_of_the_model_leaves_the_errors_alone(fresh, monkeypatch, do, part):
    folder = fresh
    monkeypatch.setenv("FAKE_PERPLEXITY_DO", do)
    line = folder.error("--target-bpw", "4")
    assert part in line and "--sensitivity usual" in line
    assert "errors of all types were measured before" in folder.run("--target-bpw", "4", "--sensitivity", "usual")[1]


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
        (["--type", "itq3_t", "--target-types", "itq2_t"], ["--target-types belongs to --target-size"]),
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
    usual = sensitivity.usual(names)
    assert sum(usual[n] for n in names if "ffn_down_exps" in n) == pytest.approx(sensitivity.USUAL["ffn_down"])
    assert usual["blk.0.attn_q.weight"] == 8 * usual["blk.1.attn_q.weight"] > 0 and usual["output.weight"] == sensitivity.USUAL["output"]


def test_a_report_that_exists_is_said_before_anything_is_measured(fresh):
    report = fresh.path / "report.json"
    report.write_text("{}")
    found = program.main([str(fresh.model), str(fresh.out), "--importance", "none", "--target-bpw", "4", "--report", str(report)])
    err = fresh.capsys.readouterr().err
    assert found == 1 and err.startswith("error: --report: ") and "exists" in err
    assert not fresh.runs() and not fresh.kept.exists()
