"""Hessians in imatrix files: reading, blending, weighing, the encoders' use of them, and bad files."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES
from ggml_ext._base.errors import UserError
from ggml_ext._calibration.importance import open_importance
from ggml_ext._encode import codec
from ggml_ext._encode.accuracy import Accuracy
from ggml_ext._encode.tensor_calibration import PerExpert, TensorCalibration
from ggml_ext._formats import gguf_file, imatrix
from ggml_ext._formats import hessians as _hessians
from ggml_ext._formats.hessians import SHRINKAGE, HessianFile, packed_size, quadratic_forms, token_warnings
from ggml_ext._native import library
from helpers.commands import quantize
from helpers.errors import quantize_error
from helpers.hessians import shrink
from helpers.importances import tensor_of
from helpers.models import gaussian, write_gguf
from helpers.moments_files import correlated, pack, write_moments
from helpers.spies import Spy

UP, GATE, DOWN, EXPERTS = (f"blk.0.ffn_{name}.weight" for name in ("up", "gate", "down", "gate_exps"))
U = 2.0**-24  # unit roundoff of float32


def read_hessian(path, t, kind=None):
    file = HessianFile([gguf_file.GGUFFile(path)])
    return file.for_tensor(t, kind or file.kind)


@pytest.mark.parametrize("n", [64, 256, 320, 576])
@pytest.mark.parametrize(("stored", "used"), [("block", "block"), ("full", "full"), ("full", "block")])
def test_reads_triangles_of_blocks_and_full_hessians(tmp_path, n, stored, used):
    """A file with full Hessians also serves blocks. All sharers get the owner's Hessian."""
    x = correlated(700, n)
    path = write_moments(tmp_path / "m.gguf", {GATE: x}, stored, {UP: GATE})
    h = x.T.astype(np.float64) @ x
    for name in (UP, GATE):
        hessian = read_hessian(path, tensor_of(name, n, 8), used)
        assert hessian.triangles(0).shape == (packed_size(n, used == "full"),)
        np.testing.assert_array_equal(hessian.triangles(0), pack(h, used))
        assert hessian.counts.sum() == 700 and hessian.width == (n if used == "full" else min(n, 256))
    diagonal = hessian.stored[0][_hessians.diagonal_indices(n, stored == "full")]
    np.testing.assert_array_equal(diagonal, np.diag(h).astype(np.float32))


@pytest.mark.parametrize("kind", ["block", "full"])
@pytest.mark.parametrize("n", [64, 256, 320, 768])
def test_quadratic_forms_match_float64(kind, n):
    """Against float64. Products and sums of n float32 values round by at most n u of the sum of magnitudes each."""
    x, rows = correlated(300, n), gaussian(5, n)
    h = (x.T.astype(np.float64) @ x).astype(np.float32).astype(np.float64)
    if kind == "block":
        h *= np.arange(n)[:, None] // 256 == np.arange(n) // 256
    expected = np.einsum("ri,ij,rj->r", rows, h, rows)
    bound = (n + 2) * U * np.einsum("ri,ij,rj->r", abs(rows), abs(h), abs(rows), dtype=np.float64)
    assert (abs(quadratic_forms(pack(h, kind), rows, kind == "full") - expected) <= bound).all()


def test_wide_full_hessians_weigh_a_sample_of_rows(tmp_path, monkeypatch):
    path = write_moments(tmp_path / "m.gguf", {DOWN: correlated(700, 320)}, "full")
    hessian, rows = read_hessian(path, tensor_of(DOWN, 320, 8)), gaussian(8, 320)
    h = hessian.triangles(0)
    exact = hessian.weighted_energies(h, rows)[0]
    monkeypatch.setattr(_hessians, "WIDEST_EXACT", 100)  # every fourth row
    assert hessian.weighted_energies(h, rows)[0] == pytest.approx(4 * sum(hessian.weighted_energies(h, r[None])[0] for r in rows[::4]))
    assert exact != hessian.weighted_energies(h, rows)[0]


def test_experts_are_blended_with_their_layer(tmp_path):
    """An expert of t tokens has weight t / (t + 256); the mean over all tokens of all experts has the rest. All tokens count for the shrinkage."""
    expert_inputs = [correlated(n, 320, seed=n) if n else np.zeros((0, 320), np.float32) for n in (600, 100, 0)]
    path = write_moments(tmp_path / "m.gguf", {EXPERTS: expert_inputs})
    hessian = read_hessian(path, tensor_of(EXPERTS, 320, 8, 3))
    hs = [x.T.astype(np.float64) @ x for x in expert_inputs]
    mean = sum(hs) / 700
    expected = [share * h / max(n, 1) + (1 - share) * mean for h, n in zip(hs, (600, 100, 0)) for share in [n / (n + 256)]]
    for expert, h in enumerate(expected):
        # at most about ten roundings of values as large as the diagonal
        np.testing.assert_allclose(hessian.triangles(expert), pack(h, "block"), rtol=10 * U, atol=10 * U * np.diag(h).max())
    assert hessian.n_short == 2 and hessian.shrinkage() == SHRINKAGE * 256 / 700
    (line,) = token_warnings({EXPERTS: hessian})
    assert "2 experts of 1 tensors" in line and f"{EXPERTS} (2 of 3)" in line


@pytest.mark.parametrize(("kind", "tokens", "shrinkage"), [
    ("block", 32 * 256, 0.125), ("full", 32 * 320, 0.125), ("full", 16 * 320, 0.25), ("full", 400 * 320, 0.03), ("full", 100, 4)])
def test_shrinkage_follows_tokens_and_columns(tmp_path, kind, tokens, shrinkage):
    path = write_moments(tmp_path / "m.gguf", {UP: correlated(4, 320)}, kind, tensors={f"{UP}.moment_counts": np.array([[tokens]])})
    assert read_hessian(path, tensor_of(UP, 320, 8)).shrinkage() == shrinkage


def test_too_few_tokens_give_a_warning(tmp_path):
    path = write_moments(tmp_path / "m.gguf", {UP: correlated(2 * 256 - 1, 320)})
    hessian = read_hessian(path, tensor_of(UP, 320, 8))
    (line,) = token_warnings({UP: hessian})
    assert UP in line and "511 tokens for 256 columns" in line and "4,096" in line and hessian.shrinkage() == SHRINKAGE * 256 / 511
    path = write_moments(tmp_path / "m.gguf", {UP: correlated(2 * 256, 320)})
    assert token_warnings({UP: read_hessian(path, tensor_of(UP, 320, 8))}) == []


# --- bad files, as the quantizer reports them

@pytest.fixture
def source(tmp_path):
    return write_gguf(tmp_path / "in.gguf", {UP: gaussian(8, 256), DOWN: gaussian(8, 512), EXPERTS: gaussian(3, 4, 256)})


def inputs(**replaced) -> dict:
    return {UP: correlated(600, 256), DOWN: correlated(600, 512), EXPERTS: [correlated(300, 256, seed=i) for i in range(3)]} | replaced


def replace_value(kind: str, index: int, value: float) -> dict:
    """Return DOWN's Hessian with one value replaced."""
    x = inputs()[DOWN]
    values = pack(x.T.astype(np.float64) @ x, kind)[None]
    values[0, index] = value
    return {f"{DOWN}.in_moments": values}


MATRIX = 256 * 257 // 2
COUNTS = f"{DOWN}.moment_counts"


@pytest.mark.parametrize(("options", "parts"), [
    ({"inputs": {DOWN: correlated(600, 256)}}, (DOWN, "256 values", "needs 512", "another model")),
    ({"tensors": {f"{DOWN}.in_moments": np.ones((1, MATRIX)), COUNTS: np.array([[600]])}},
     (DOWN, "32,896 values for 1 matrices", "needs 65,792 for 1 (512 columns)", "another model", "llama-imatrix -m MODEL -f TEXT --moments block")),
    ({"tensors": {f"{EXPERTS}.in_moments": np.ones((2, MATRIX)), f"{EXPERTS}.moment_counts": np.ones((2, 1))}},
     (EXPERTS, "for 2 matrices", "for 3")),
    ({"tensors": replace_value("block", 17, np.nan)}, (DOWN, "value 17", "nan", "finite")),
    ({"tensors": replace_value("block", MATRIX + 1, np.inf)}, (DOWN, "value 32,897", "inf")),
    ({"tensors": replace_value("block", MATRIX + 2, -4.0)}, (DOWN, "diagonal value 257", "-4", "not negative")),
    ({"tensors": {COUNTS: np.array([[0]])}}, (DOWN, "no token")),
    ({"tensors": {COUNTS: np.array([[np.nan]])}}, (DOWN, "count 0 is nan")),
    ({"tensors": {COUNTS: np.array([[3], [4]])}}, (DOWN, "Hessians of 1 matrices and counts of 2")),
    ({"tensors": {COUNTS: None}}, (COUNTS, "is not in the file")),
    ({"tensors": {f"{DOWN}.in_moments": None}}, (f"{DOWN}.in_moments", "is not in the file", "imatrix.moments.inputs")),
    ({"tensors": {f"{DOWN}.in_moments": np.ones((1, 2 * MATRIX), np.float16)}}, ("f16", "must be f32")),
    ({"keys": {"imatrix.moments.inputs": [UP]}}, ("imatrix.moments.tensors (3 names)", "imatrix.moments.inputs (1 names)")),
    ({"keys": {"imatrix.moments.tensors": None}}, ("imatrix.moments.tensors (missing)",)),
    ({"keys": {"imatrix.moments": "diagonal"}}, ("'diagonal'", "must be block or full")),
    ({"keys": {"imatrix.moments.block_size": 64}}, ("64, must be 256",)),
    ({"keys": {"imatrix.moments.tensors": ["blk.7.attn_q.weight"], "imatrix.moments.inputs": [UP]}},
     ("Hessians of 1 tensors", "blk.7.attn_q.weight", UP, "--importance diagonal")),
], ids=["width", "size", "experts", "nan", "inf", "negative", "no_tokens", "nan_count", "counts", "no_counts", "no_moments", "f16", "lists",
        "no_list", "kind", "block_size", "names"])
def test_bad_files_are_reported(tmp_path, source, options, parts):
    options = {"inputs": {}} | options
    path = write_moments(tmp_path / "m.gguf", inputs(**options.pop("inputs")), **options)
    quantize_error(tmp_path, source, "m.gguf", *parts, flags=["--type", "itq3_t", "--imatrix", path])


def test_truncated_files_and_missing_hessians_are_reported(tmp_path, source):
    path = write_moments(tmp_path / "m.gguf", inputs())
    path.write_bytes(path.read_bytes()[:-1000])
    quantize_error(tmp_path, source, "m.gguf", "truncated", flags=["--type", "itq3_t", "--imatrix", path])
    write_moments(path, inputs(), "diagonal", keys={"imatrix.moments": None})
    for kind in ("block", "full"):
        quantize_error(tmp_path, source, f"--importance {kind}", "has no Hessians", f"llama-imatrix --moments {kind}",
                       flags=["--type", "itq3_t", "--imatrix", path, "--importance", kind])
    write_moments(path, inputs())
    quantize_error(tmp_path, source, "--importance full", "has block-diagonal Hessians", "--importance block",
                   flags=["--type", "itq3_t", "--imatrix", path, "--importance", "full"])


def test_full_hessians_are_checked_on_use(tmp_path):
    for index, value, part in ((17, np.nan, "value 17"), (packed_size(512, True) - 1, -1, "diagonal value 511")):
        path = write_moments(tmp_path / "m.gguf", inputs(), "full", tensors=replace_value("full", index, value))
        for kind in ("block", "full"):
            with pytest.raises(UserError, match=f"{DOWN}: .*{part}"):
                read_hessian(path, tensor_of(DOWN, 512, 8), kind).triangles(0)


def test_zero_columns_are_accepted(tmp_path):
    """Dead inputs: the floor of the diagonal keeps the Hessian positive definite."""
    x = correlated(600, 256)
    x[:, 3:90] = 0
    hessian = read_hessian(write_moments(tmp_path / "m.gguf", {UP: x}), tensor_of(UP, 256, 8))
    hessian.check()
    h = np.zeros((256, 256))
    h[np.tril_indices(256)] = hessian.triangles(0)
    h += np.tril(h, -1).T
    np.linalg.cholesky(shrink(h, hessian.shrinkage()))
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(h)


def test_summary_tells_the_hessians(tmp_path, lib):
    """By class: columns and tokens per column, of the layer with the fewest tokens and the median expert; the metadata have all tokens."""
    x, wide = correlated(600, 256), correlated(600, 512)
    experts = [correlated(n, 256) for n in (64, 128, 512)]
    weights = {UP: gaussian(8, 256), DOWN: gaussian(8, 512), "blk.1.ffn_up.weight": gaussian(8, 256), EXPERTS: gaussian(3, 8, 256)}
    source = write_gguf(tmp_path / "in.gguf", weights)
    inputs = {UP: x, DOWN: wide, "blk.1.ffn_up.weight": x[:300], EXPERTS: experts}
    path, report = write_moments(tmp_path / "m.gguf", inputs, "full", full_columns=256), tmp_path / "report.json"
    done = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", path, "--report", report)
    lines = ["full (256 columns, 1.17 tokens per column) of ffn_up", "blocks of 256 columns (2.34 tokens per column) of ffn_down",
             "full (256 columns, 0.5 tokens per column) of ffn_gate_exps"]
    assert "\n".join(f"{'' if i else 'Hessians    =':<13} {line}" for i, line in enumerate(lines)) in done.stdout
    assert "experts     = fewest 64 tokens, median 128, 0 of 3 experts without tokens, in ffn_gate_exps\n" in done.stdout
    experts = {"experts": 3, "fewest_tokens": 64, "median_tokens": 128, "experts_without_tokens": 0}
    assert json.loads(report.read_text())["hessians"]["ffn_gate_exps"].items() >= experts.items()
    assert json.loads(report.read_text())["hessians"]["ffn_down"] == {"columns": 256, "is_full": False, "tokens_per_column": 2.34}
    assert gguf_file.GGUFFile(tmp_path / "out.gguf").value("ggml_ext.importance.tokens") == 600
    assert "ffn_up" in quantize(source, "--type", "itq3_t", "--imatrix", path, "--dry-run").stdout.partition("Hessians")[2]


# tensor -> type: every kind of encoder that takes importances
TYPE_OF_TENSOR = dict(zip((f"blk.{i}.ffn_up.weight" for i in range(12)), (
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q5_0", "iq4_nl", "iq3_s", "iq2_xs", "itq3_t", "ditto3")))


@pytest.mark.parametrize("kind", ["diagonal", "block", "full"])
def test_dead_columns_keep_the_usual_error(tmp_path, lib, kind):
    """A block of zeros and a nearly dead part keep the errors that they have without an imatrix; the summary counts them."""
    x = correlated(600, 512)
    x[:, :256], x[:, 320:384] = 0, 1e-6 * x[:, 320:384]
    dead = np.r_[:256, 320:384]
    source = write_gguf(tmp_path / "in.gguf", {name: gaussian(16, 512) for name in TYPE_OF_TENSOR})
    path = write_moments(tmp_path / "m.gguf", dict.fromkeys(TYPE_OF_TENSOR, x), "full" if kind == "full" else "block")
    flags = [part for name, target in TYPE_OF_TENSOR.items() for part in ("--tensor-type", f"{name}={target}")]
    report = tmp_path / "report.json"
    done = quantize(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", path, "--importance", kind, "--report", report, *flags)
    assert f"dead inputs = {12 * len(dead):,} of {12 * 512:,} columns of ffn_up" in done.stdout
    assert json.loads(report.read_text())["dead_columns"] == dict.fromkeys(TYPE_OF_TENSOR, len(dead))
    original = gaussian(16, 512).astype(np.float16).astype(np.float32)
    for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        stored = lib.dequantize(int(t.tensor_type), np.ascontiguousarray(t.data).reshape(16, -1), 512)
        plain = lib.dequantize(int(t.tensor_type), lib.quantize(int(t.tensor_type), original, imatrix=np.ones(512, np.float32)), 512)
        error, plain_error = (((weights - original)[:, dead] ** 2).sum() for weights in (stored, plain))
        assert error < 1.5 * plain_error, (TYPE_OF_TENSOR[t.name], error / plain_error)


def test_floor_changes_only_dead_columns():
    live = np.random.default_rng(1).lognormal(0, 2, (2, 576)).astype(np.float32)
    np.testing.assert_array_equal(imatrix.apply_floor(live), live)
    partly_dead = live.copy()
    partly_dead[0, :300], partly_dead[1, 570:] = 0, 1e-12
    floored = imatrix.apply_floor(partly_dead)
    np.testing.assert_array_equal(imatrix.dead_columns(partly_dead), partly_dead != live)
    np.testing.assert_array_equal(floored[partly_dead == live], live[partly_dead == live])
    np.testing.assert_array_equal(TensorCalibration(partly_dead).importances(1), floored[1])
    assert (floored > 0).all() and (floored[0, 256:300] == floored[0, 299]).all() and (np.diff(imatrix.apply_floor(0 * live)) == 0).all()


# --- what the encoders receive

def test_metrics_are_computed_once_and_dropped():
    created, barrier = [], threading.Barrier(4)

    def make(expert):
        created.append(expert)
        if expert == 9:
            raise UserError("no")
        return object()

    metrics = PerExpert(make)

    def get_waiting(expert):
        barrier.wait(10)
        return metrics.get(expert)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(get_waiting, [2, 2, 3, 3]))
        assert results[0] is results[1] and results[2] is results[3] and results[0] is not results[2] and sorted(created) == [2, 3]
        metrics.drop_before(3)
        assert metrics.get(3) is results[2] and metrics.get(2) is not results[0]
        failures = [pool.submit(get_waiting, 9) for _ in range(4)]
        assert all(isinstance(f.exception(), UserError) for f in failures) and created.count(9) == 1


class FakeLibrary:
    """Library.metric() that returns or raises the given results and records its arguments."""

    def __init__(self, *results):
        self.results, self.calls = list(results), []

    def metric(self, type_id, n_per_row, triangles, is_full, shrinkage, segment, n_threads):
        self.calls.append((type_id, n_per_row, triangles, is_full, shrinkage, segment))
        if isinstance(result := self.results.pop(0), type):
            raise result
        return result


def compute_metric(tmp_path, lib, kind="block", effort="normal"):
    path, warnings = write_moments(tmp_path / "m.gguf", {UP: correlated(5000, 256)}, kind), []
    t = tensor_of(UP, 256, 8)
    hessian = read_hessian(path, t)
    calibration = TensorCalibration.from_hessian(None, hessian)
    created = codec.Codec(lib, effort=effort).metric(t, gguf.GGMLQuantizationType.ITQ3_T, calibration, 0, warnings.append)
    return created, warnings


def test_non_positive_hessians_are_shrunk_once_more(tmp_path):
    metric = object()
    lib = FakeLibrary(metric)
    assert compute_metric(tmp_path, lib) == (metric, [])
    assert [lib.calls[0][i] for i in (0, 1, 3, 4, 5)] == [int(TYPES["itq3_t"].id), 256, False, SHRINKAGE * 256 / 5000, 32]
    lib = FakeLibrary(library.NotPositiveDefinite, metric)
    created, (warning,) = compute_metric(tmp_path, lib, effort="best")
    assert created is metric and [a[4:] for a in lib.calls] == [(SHRINKAGE * 256 / 5000, 8), (10 * (SHRINKAGE * 256 / 5000), 8)]
    assert UP in warning and "not positive definite" in warning and "2.048" in warning
    with pytest.raises(UserError, match=f"{UP}.*not positive definite, even with 2.048 of the diagonal added.*--importance diagonal"):
        compute_metric(tmp_path, FakeLibrary(library.NotPositiveDefinite, library.NotPositiveDefinite))
    with pytest.raises(UserError, match=f"{UP}.*not enough memory.*256 columns.*--importance block"):
        compute_metric(tmp_path, FakeLibrary(MemoryError), "full")


@pytest.mark.parametrize("kind", ["block", "full"])
def test_every_expert_has_its_own_metric(tmp_path, source, lib, monkeypatch, capsys, kind):
    """Q8_0 gets none; the summary and the metadata say what was used."""
    from ggml_ext._formats import chunks

    spy = Spy(monkeypatch, lib)
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 3 * 256)  # chunks end inside an expert
    layer_inputs = inputs()
    path = write_moments(tmp_path / "m.gguf", layer_inputs, kind)
    spy.run(source, tmp_path / "out.gguf", "--type", "itq3_t", "--tensor-type", "ffn_up=q8_0", "--imatrix", path)
    assert {type_id for type_id, *_ in spy.metrics} == {int(TYPES["itq3_t"].id)} and len(spy.metrics) == 4
    hs = [x.T.astype(np.float64) @ x for x in layer_inputs[EXPERTS]]
    n_all = sum(map(len, layer_inputs[EXPERTS]))
    for h, x in zip(hs, layer_inputs[EXPERTS], strict=True):  # block and full are equal for 256 columns
        blend = pack((h + 256 * sum(hs) / n_all) / (len(x) + 256), kind)
        close = [np.allclose(m, blend, rtol=10 * U, atol=10 * U * blend.max()) for _, n, whole, m in spy.metrics if n == 256 and whole == (kind == "full")]
        assert sum(close) == 1
    by_metric = {}
    for metric, n_rows in spy.used[int(TYPES["itq3_t"].id)]:
        by_metric[metric] = by_metric.get(metric, 0) + n_rows
    assert sorted(by_metric.values()) == [4, 4, 4, 8] and all(m is None for m, _ in spy.used.get(8, []))
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["ggml_ext.importance"].contents() == kind and fields["quantize.imatrix.file"].contents() == path.name
    assert "ggml_ext.calibration" not in fields
    out = capsys.readouterr().out
    assert f"importance  = {kind}, of {path}" in out and "weighted" in out


def test_tensors_with_a_common_input_share_its_metric(tmp_path, lib, monkeypatch):
    """gate, up and down in a row need two metrics; three if up has another type."""
    source = write_gguf(tmp_path / "in.gguf", {GATE: gaussian(8, 256), UP: gaussian(8, 256), DOWN: gaussian(8, 256)})
    path = write_moments(tmp_path / "m.gguf", {GATE: correlated(600, 256), DOWN: correlated(600, 256, seed=2)}, sharing={UP: GATE})
    for flags, n in (([], 2), (["--tensor-type", "ffn_up=itq2_t"], 3)):
        spy = Spy(monkeypatch, lib)
        spy.run(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", path, "--force", *flags)
        assert len(spy.metrics) == n
        monkeypatch.undo()


def test_upstream_types_share_the_metric_of_their_input(tmp_path, lib, monkeypatch):
    """Their metric does not depend on the type: q4_k and q6_k in a quant mix need one."""
    source = write_gguf(tmp_path / "in.gguf", {GATE: gaussian(8, 256), UP: gaussian(8, 256)})
    path = write_moments(tmp_path / "m.gguf", {GATE: correlated(600, 256)}, sharing={UP: GATE})
    spy = Spy(monkeypatch, lib)
    spy.run(source, tmp_path / "out.gguf", "--type", "itq3_t", "--tensor-type", "gate=q4_k", "--tensor-type", "up=q6_k", "--imatrix", path)
    assert len(spy.metrics) == 1 and [m for used in spy.used.values() for m, _ in used] == [0, 0]


def test_reported_errors_are_weighted_with_the_hessian(tmp_path, source, lib, monkeypatch, capsys):
    """Against float64 errors of the written file, up to the printed digits."""
    Spy(monkeypatch, lib).run(source, tmp_path / "out.gguf", "--type", "itq3_t", "--imatrix", write_moments(tmp_path / "m.gguf", inputs()))
    x = inputs()[DOWN].astype(np.float64)
    x = x.reshape(600, 2, 256)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    original = gaussian(8, 512).astype(np.float16).astype(np.float64)
    stored = lib.dequantize(int(TYPES["itq3_t"].id), np.ascontiguousarray(tensors[DOWN].data).reshape(8, -1), 512)
    energy = [sum((x[:, b] @ w.reshape(8, 2, 256)[:, b].T).ravel() @ (x[:, b] @ w.reshape(8, 2, 256)[:, b].T).ravel() for b in (0, 1))
              for w in (stored - original, original)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("blk.*.ffn_down") and "." in line.split()[2]]
    assert float(line.split()[3]) == pytest.approx(energy[0] / energy[1], rel=1e-4, abs=1e-6)


def test_only_weighted_errors_give_a_warning():
    """Encoders with Hessians trade plain error for weighted error, so the latter is compared with the usual one."""
    itq3_t = gguf.GGMLQuantizationType.ITQ3_T
    traded = Accuracy(error=0.06, energy=1, weighted_error=0.012, weighted_energy=1, has_hessian=True)
    assert not traded.exceeds_usual(itq3_t, 3)
    assert Accuracy(error=0.06, energy=1, weighted_error=0.012, weighted_energy=1).exceeds_usual(itq3_t, 3)
    assert Accuracy(error=0.01, energy=1, weighted_error=0.06, weighted_energy=1, has_hessian=True).exceeds_usual(itq3_t, 3)


@pytest.mark.parametrize("kind", ["block", "full"])
def test_numpy_equals_c(tmp_path, source, lib, kind):
    """With the diagonal the bytes differ."""
    path = write_moments(tmp_path / "m.gguf", inputs(), kind)
    data = {}
    for name, flags in (("c", []), ("numpy", ["--encoder", "numpy"]), ("diagonal", ["--importance", "diagonal"])):
        quantize(source, tmp_path / name, "--type", "itq3_t", "--imatrix", path, *flags)
        data[name] = {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / name).tensors}
    assert data["c"] == data["numpy"] and all(data["c"][name] != data["diagonal"][name] for name in (UP, DOWN, EXPERTS))


def test_types_without_a_metric_use_the_diagonal(tmp_path, source, lib):
    path = write_moments(tmp_path / "m.gguf", inputs())
    quantize(source, tmp_path / "a.gguf", "--type", "ditto3", "--tensor-type", "ffn=tq2_0", "--imatrix", path)
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["ggml_ext.importance"].contents() == "diagonal"
    result = quantize(source, tmp_path / "b.gguf", "--type", "ditto3", "--tensor-type", "ffn=tq2_0", "--imatrix", path, "--importance", "block")
    assert "--importance block: no tensor gets a type that uses more than the diagonal" in result.stderr


def test_hessians_of_several_files(tmp_path):
    """Passes over layers write several files."""
    a = write_moments(tmp_path / "a.gguf", {UP: correlated(600, 256)}, "full")
    b = write_moments(tmp_path / "b.gguf", {DOWN: correlated(600, 320)}, "full")
    importance = open_importance([a, b], "full")
    assert set(importance.hessians.names()) == {UP, DOWN} and importance.hessian(tensor_of(DOWN, 320, 8)).is_full


@pytest.fixture
def mixed(tmp_path):
    """Write a file of kind "full" in which the wide input has a block-diagonal Hessian."""
    return write_moments(tmp_path / "mixed.gguf", {UP: correlated(600, 256), DOWN: correlated(600, 512)}, "full", full_columns=256)


def test_wide_inputs_with_blocks_are_recognized(mixed):
    importance = open_importance([mixed], None)
    assert (importance.kind, importance.full_columns, importance.title) == ("full", 256, "full up to 256 columns")
    narrow, wide = (importance.hessian(tensor_of(name, n)) for name, n in ((UP, 256), (DOWN, 512)))
    assert narrow.kind == "full" and (wide.kind, wide.width) == ("block", 256)
    assert open_importance([mixed], "block").hessian(tensor_of(UP, 256)).kind == "block"
    with pytest.raises(UserError, match="has block-diagonal Hessians of inputs of more than 256 columns: .* leave --importance out"):
        open_importance([mixed], "full")


def test_blocks_next_to_full_hessians_are_checked_before_encoding(tmp_path):
    values = pack(np.full((512, 512), np.nan), "block")[None]
    path = write_moments(tmp_path / "bad.gguf", {UP: correlated(600, 256), DOWN: correlated(600, 512)}, "full", full_columns=256,
                         tensors={f"{DOWN}.in_moments": values})
    source = write_gguf(tmp_path / "in.gguf", {UP: gaussian(8, 256), DOWN: gaussian(8, 512)})
    quantize_error(tmp_path, source, DOWN, "diagonal value 0", "must be finite", flags=["--type", "itq3_t", "--imatrix", path])
