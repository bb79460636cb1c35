"""llama-imatrix --moments: the sums, shared inputs, merging of files, and errors."""

import ctypes
import functools
import resource
import signal
import subprocess
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64
from pathlib import Path

import gguf
import numpy as np
import pytest

import synth_model
from helpers.commands import tool
from helpers.models import ROOT, finish, read_tensors
from helpers.native import BUILD, F32_U, cpu_flags, require_built

Q, K, DOWN = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_down.weight"
BLOCK = 256


def block_slices(n_cols: int, kind: str) -> list[slice]:
    size = BLOCK if kind == "block" else n_cols
    return [slice(i, min(i + size, n_cols)) for i in range(0, n_cols, size)]


def pack_triangles(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Pack a symmetric matrix (n, n) as the file stores it."""
    return np.concatenate([matrix[b, b][np.tril_indices(b.stop - b.start)] for b in block_slices(len(matrix), kind)])


def n_values(n_cols: int, kind: str) -> int:
    return sum((b.stop - b.start) * (b.stop - b.start + 1) // 2 for b in block_slices(n_cols, kind))


# --- the kernel ---------------------------------------------------------------------------------------------------------------


@functools.cache
def driver() -> ctypes.CDLL:
    dll = ctypes.CDLL(str(require_built(BUILD, "libggml-ext-moments.so")))
    floats = np.ctypeslib.ndpointer(np.float32)
    dll.ggml_ext_test_add_moments.argtypes = [floats, c_int64, c_int64, c_int64, c_bool, c_int, floats]
    dll.ggml_ext_test_n_moments.argtypes, dll.ggml_ext_test_n_moments.restype = [c_int64, c_bool], c_int64
    dll.ggml_ext_test_multiply.argtypes = [c_char_p, ctypes.POINTER(c_float), ctypes.POINTER(c_float), c_int, floats]
    dll.ggml_ext_test_multiply.restype = c_bool
    return dll


def sum_bound(magnitudes: np.ndarray, n_rows: int, n_adds: int) -> np.ndarray:
    """Bound the error of n_rows products summed in float32 in pieces of 512, with n_adds additions to the totals.

    Each rounding of a product is at most u of the sum of magnitudes, and (1 + u)^n - 1 <= 1.01 n u for these n.
    """
    return 1.01 * (min(n_rows, 512) + 1 + n_adds) * F32_U * magnitudes


@pytest.mark.parametrize("kind", ["block", "full"])
@pytest.mark.parametrize("n_cols", [1, 16, 17, 64, 255, 256, 257, 576, 768])
@pytest.mark.parametrize(("n_rows", "gap", "n_threads"), [(1, 0, 1), (33, 3, 2), (512, 0, 3), (1037, 1, 2)])
def test_kernel_sums_match_numpy(n_cols, kind, n_rows, gap, n_threads):
    """Rows with gaps, odd row counts, more than one piece, and totals that are not zero at the start."""
    rng = np.random.default_rng(n_cols + n_rows)
    stored = np.full((n_rows, n_cols + gap), np.nan, np.float32)
    stored[:, :n_cols] = x = (rng.standard_normal((n_rows, n_cols)) * 10.0 ** rng.uniform(-2, 2, n_cols)).astype(np.float32)
    assert driver().ggml_ext_test_n_moments(n_cols, kind == "full") == n_values(n_cols, kind)
    before = rng.standard_normal(n_values(n_cols, kind)).astype(np.float32)
    totals = np.concatenate([before, np.float32([7, 7])])  # the values after the totals must stay
    driver().ggml_ext_test_add_moments(stored, n_rows, n_cols + gap, n_cols, kind == "full", n_threads, totals)
    assert (totals[-2:] == 7).all()
    x = x.astype(np.float64)
    exact = pack_triangles(x.T @ x, kind) + before
    bound = sum_bound(pack_triangles(np.abs(x.T) @ np.abs(x), kind) + np.abs(before), n_rows, -(-n_rows // 512))
    worst = np.argmax(np.abs(totals[:-2] - exact) - bound)
    assert (np.abs(totals[:-2] - exact) <= bound).all(), f"value {worst}: {totals[worst]}, not {exact[worst]} +- {bound[worst]}"


SYRK_NEEDS = {"any": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f"}}


@pytest.mark.parametrize("isa", [isa for isa, needs in SYRK_NEEDS.items() if needs <= cpu_flags()])
def test_kernel_sums_match_on_each_instruction_set(isa):
    a, b = np.random.default_rng(1).standard_normal((2, 65, 16)).astype(np.float32)
    sums = np.empty((16, 16), np.float32)
    pointers = [m.ctypes.data_as(ctypes.POINTER(c_float)) for m in (a, b)]
    if not driver().ggml_ext_test_multiply(isa.encode(), *pointers, len(a), sums):
        pytest.skip(f"not compiled for {isa}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert (np.abs(sums - a.T @ b) <= sum_bound(np.abs(a.T) @ np.abs(b), len(a), 0)).all()


# --- the program --------------------------------------------------------------------------------------------------------------


def run_imatrix(*args, **kwargs) -> subprocess.CompletedProcess:
    command = [tool("llama-imatrix"), "-t", "2", *args]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace", timeout=600, **kwargs)


def imatrix(*args) -> str:
    """Run the program, which must succeed, and return its output."""
    done = run_imatrix(*args)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


class Moments:
    """The Hessians of a file: .kind, .owner (matrix -> the one its sums are stored under), .sums and .counts by owner."""

    def __init__(self, path: Path):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in reader.tensors}
        self.kind = reader.fields["imatrix.moments"].contents()
        assert reader.fields["imatrix.moments.block_size"].contents() == BLOCK
        lists = (reader.fields[f"imatrix.moments.{key}"].contents() for key in ("tensors", "inputs"))
        self.owner = dict(zip(*lists, strict=True))
        owners = set(self.owner.values())
        self.counts = {n: self.tensors[f"{n}.moment_counts"].data.ravel() for n in owners}
        self.sums = {n: self.tensors[f"{n}.in_moments"].data.reshape(len(self.counts[n]), -1) for n in owners}
        assert sum(n.endswith((".in_moments", ".moment_counts")) for n in self.tensors) == 2 * len(owners)

    def squares(self, name: str) -> np.ndarray:
        """Return llama-imatrix's own sums of squares: (n_mat, n_cols)."""
        return self.tensors[f"{name}.in_sum2"].data.reshape(len(self.counts[self.owner[name]]), -1)

    def matrix(self, name: str, index: int = 0) -> np.ndarray:
        """Return H as (n_cols, n_cols) float64, zero outside the blocks."""
        n, start = self.squares(name).shape[1], 0
        out = np.zeros((n, n))
        for b in block_slices(n, self.kind):
            rows, cols = np.tril_indices(b.stop - b.start)
            out[rows + b.start, cols + b.start] = self.sums[self.owner[name]][index, start : start + len(rows)]
            start += len(rows)
        assert start == self.sums[self.owner[name]].shape[1]
        return out + np.tril(out, -1).T


N_TOKENS = 4 * 64
RUN = ("-c", 64, "--chunks", 4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:4000])
    return path


@pytest.fixture(scope="module")
def collected(model, text, tmp_path_factory):
    """Collect on the reference model: kind -> (file, the program's output)."""
    folder = tmp_path_factory.mktemp("moments")
    return {kind: (folder / f"{kind}.gguf", imatrix("-m", model, "-f", text, *RUN, "--moments", kind, "-o", folder / f"{kind}.gguf"))
            for kind in ("block", "full")}


def assert_diagonals(moments: Moments) -> None:
    """Check the diagonals against llama-imatrix's sums of the same squares, which it adds token by token."""
    for name, owner in moments.owner.items():
        counts = moments.counts[owner]
        assert np.array_equal(counts, moments.tensors[f"{name}.counts"].data.ravel()), name
        for i, squares in enumerate(moments.squares(name).astype(np.float64)):
            n = int(counts[i])
            bound = sum_bound(squares, n, n // 512 + 1) + 1.01 * n * F32_U * squares
            assert (np.abs(np.diag(moments.matrix(name, i)) - squares) <= bound).all(), f"{name}, matrix {i}"


@pytest.mark.parametrize("kind", ["block", "full"])
def test_reference_model_has_all_sums(collected, kind):
    path, output = collected[kind]
    moments = Moments(path)
    assert moments.kind == kind
    assert {n: (c.size, c[0]) for n, c in moments.counts.items()} == dict.fromkeys(moments.counts, (1, N_TOKENS))
    n_layers = len(moments.owner) // 7
    shared = {"attn_q": "attn_q", "attn_k": "attn_q", "attn_v": "attn_q", "attn_output": "attn_output", "ffn_gate": "ffn_gate",
              "ffn_up": "ffn_gate", "ffn_down": "ffn_down"}
    owner = {n.replace("ffn_up", "ffn_gate"): o.replace("ffn_up", "ffn_gate") for n, o in moments.owner.items()}  # the graph may run either first
    assert owner == {f"blk.{i}.{n}.weight": f"blk.{i}.{o}.weight" for i in range(n_layers) for n, o in shared.items() if n != "ffn_up"}
    assert {n for n in moments.tensors if n.endswith(".in_sum2")} == {f"{n}.in_sum2" for n in moments.owner}  # all that llama-imatrix collects
    mib = sum(4 * n_values(moments.squares(n).shape[1], kind) for n in set(moments.owner.values())) / 2**20
    assert f"second moments of {4 * n_layers} inputs ({kind}): {mib:.1f} MiB" in output
    assert output.index("second moments of") < output.index("seconds per pass")
    assert_diagonals(moments)


def test_block_and_full_agree(collected):
    block, full = (Moments(collected[kind][0]) for kind in ("block", "full"))
    assert block.owner == full.owner
    for name in set(full.owner.values()):
        matrix = full.matrix(name)
        np.testing.assert_array_equal(pack_triangles(matrix, "block"), block.sums[name][0])  # the same sums in the same order
    outside = full.matrix(DOWN)[BLOCK : 2 * BLOCK, :BLOCK]  # H is not zero where block-diagonal sums have nothing
    assert (outside != 0).all() and np.linalg.eigvalsh(full.matrix(DOWN)).min() > -1e-4 * np.trace(full.matrix(DOWN))


def test_wide_inputs_have_blocks(model, text, collected, tmp_path):
    """With --moments-columns the Hessians of wider inputs are those of --moments block, and the others those of --moments full."""
    path = tmp_path / "mixed.gguf"
    imatrix("-m", model, "-f", text, *RUN, "--moments", "full", "--moments-columns", 256, "-o", path)
    mixed, full, block = Moments(path), Moments(collected["full"][0]), Moments(collected["block"][0])
    widths = {name: mixed.squares(name).shape[1] for name in mixed.sums}
    assert mixed.kind == "full" and mixed.sums.keys() == full.sums.keys() and set(widths.values()) == {256, 768}
    for name, sums in mixed.sums.items():
        np.testing.assert_array_equal(sums, (full if widths[name] <= 256 else block).sums[name])


def test_layers_limit_what_is_collected(model, text, collected, tmp_path):
    imatrix("-m", model, "-f", text, *RUN, "--moments", "block", "--layers", "1-2", "--process-output", "-o", tmp_path / "out.gguf")
    part, full = Moments(tmp_path / "out.gguf"), Moments(collected["block"][0])
    assert part.owner == {n: o for n, o in full.owner.items() if n.split(".")[1] in "12"}
    for name, sums in part.sums.items():
        np.testing.assert_array_equal(sums, full.sums[name])
    # The remaining layers, and the output matrix with the last one.
    last = len(full.owner) // 7 - 1
    imatrix("-m", model, "-f", text, *RUN, "--moments", "block", "--layers", f"3-{last}", "--process-output", "--in-file",
            tmp_path / "out.gguf", "-o", tmp_path / "more.gguf")
    more = Moments(tmp_path / "more.gguf")
    has_output = "output.weight.in_sum2" in more.tensors
    assert more.owner == {n: o for n, o in full.owner.items() if n.split(".")[1] != "0"} | (
        {"output.weight": "output.weight"} if has_output else {})
    for name in set(more.owner.values()) - {"output.weight"}:
        np.testing.assert_array_equal(more.sums[name], full.sums[name])


def test_in_file_adds_to_earlier_sums(model, text, collected, tmp_path):
    path, _ = collected["block"]
    imatrix("-m", model, "-f", text, *RUN, "--moments", "block", "--in-file", path, "-o", tmp_path / "out.gguf")
    once, twice = Moments(path), Moments(tmp_path / "out.gguf")
    assert twice.owner == once.owner
    for name, sums in once.sums.items():
        assert (twice.counts[name] == 2 * once.counts[name]).all()
        np.testing.assert_allclose(twice.sums[name], 2 * sums, rtol=8 * F32_U, atol=8 * F32_U * np.abs(sums).max())
    assert_diagonals(twice)


def test_each_expert_sums_its_own_tokens(tmp_path, text, monkeypatch):
    """Every token goes to two experts, so the sum over all experts is twice the router's."""
    monkeypatch.setitem(synth_model.SHAPES, "tiny", (320, 192, 64, 4, 2, 5, 2))
    synth_model.write_model("f16", tmp_path / "moe.gguf", "tiny", 2)
    file = gguf.GGUFReader(tmp_path / "moe.gguf", "r+")
    for tensor in file.tensors:
        if "up_exps" in tensor.name:  # write_model makes all experts equal
            tensor.data[:] *= np.arange(1, 6, dtype=np.float16).reshape(5, 1, 1)
    file.data.flush()
    imatrix("-m", tmp_path / "moe.gguf", "-f", text, *RUN, "--moments", "full", "-o", tmp_path / "out.gguf")
    moments = Moments(tmp_path / "out.gguf")
    assert_diagonals(moments)
    for layer in range(2):
        gate, up, down, router = (f"blk.{layer}.ffn_{n}.weight" for n in ("gate_exps", "up_exps", "down_exps", "gate_inp"))
        assert moments.owner[gate] == moments.owner[up] and moments.owner[down] == down
        counts = moments.counts[moments.owner[gate]]
        assert counts.size == 5 and counts.sum() == 2 * N_TOKENS and np.array_equal(counts, moments.counts[down])
        experts, router_sums = sum(moments.matrix(gate, i) for i in range(5)), moments.matrix(router)
        scale = np.sqrt(np.outer(np.diag(router_sums), np.diag(router_sums)))  # bounds the sum of magnitudes
        assert (np.abs(experts - 2 * router_sums) <= sum_bound(2 * scale, N_TOKENS, 4) + sum_bound(2 * scale, N_TOKENS, 4)).all()


def test_intermediate_files_have_no_moments(model, text, tmp_path):
    """The program says so once, and the last file has them."""
    output = imatrix("-m", model, "-f", text, *RUN, "-b", 64, "--moments", "block", "--output-frequency", 1, "--save-frequency", 2,
                   "-o", tmp_path / "out.gguf")
    assert {p.name for p in tmp_path.iterdir()} == {"out.gguf", "out.gguf.at_2", "out.gguf.at_4"}
    assert output.count("intermediate files hold no second moments") == 1
    assert_diagonals(Moments(tmp_path / "out.gguf"))
    for name in ("out.gguf.at_2", "out.gguf.at_4"):
        assert "imatrix.moments" not in gguf.GGUFReader(tmp_path / name).fields
        assert {n.rpartition(".")[2] for n in read_tensors(tmp_path / name)} == {"in_sum2", "counts"}


def test_moments_leave_other_tensors_unchanged(model, text, collected, tmp_path):
    """Compares with a file that was written without --moments."""
    imatrix("-m", model, "-f", text, *RUN, "-o", tmp_path / "out.gguf")
    plain, extended = read_tensors(tmp_path / "out.gguf"), read_tensors(collected["block"][0])
    assert {n for n in extended if n not in plain} == {n for n in extended if n.endswith((".in_moments", ".moment_counts"))}
    for name, tensor in plain.items():
        np.testing.assert_array_equal(tensor.data, extended[name].data)
    assert not any("moments" in key for key in gguf.GGUFReader(tmp_path / "out.gguf").fields)


# --- files --------------------------------------------------------------------------------------------------------------------


def write_moments(path: Path, kind: str = "block", seed: int = 1, owner=None, n_cols: int = 300, counts=(6.0, 0.0), change=None,
                  block: int = BLOCK, width: int = 300) -> Path:
    """Write a file of attn_q, attn_k with the same input, and ffn_down, as the program does.

    Args:
        path: the file to write.
        kind: "block", "full", or "" for no moments.
        seed: of the random sums.
        owner: matrix -> the one its sums are stored under.
        n_cols: the columns that the sums are made for.
        counts: tokens of each expert.
        change: change(name, data) returns what is written for a tensor.
        block: the block size to write.
        width: the columns of llama-imatrix's own sums, which it checks first.
    """
    rng, owner = np.random.default_rng(seed), owner or {Q: Q, K: Q, DOWN: DOWN}
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 64)
    if kind:
        writer.add_string("imatrix.moments", kind)
        writer.add_uint32("imatrix.moments.block_size", block)
        writer.add_array("imatrix.moments.tensors", list(owner))
        writer.add_array("imatrix.moments.inputs", list(owner.values()))
    tensors = {f"{n}.in_sum2": np.ones((1, width), np.float32) for n in owner} | {f"{n}.counts": np.ones((1, 1), np.float32) for n in owner}
    for name in set(owner.values()) if kind else ():
        tensors[f"{name}.in_moments"] = rng.standard_normal((len(counts), n_values(n_cols, kind))).astype(np.float32)
        tensors[f"{name}.moment_counts"] = np.float32(counts).reshape(-1, 1)
    for name, data in tensors.items():
        writer.add_tensor(name, change(name, data) if change else data)
    finish(writer)
    return path


def merge(tmp_path: Path, *files: Path, options=(), **kwargs) -> subprocess.CompletedProcess:
    return run_imatrix(*(a for f in files for a in ("--in-file", f)), "-o", tmp_path / "out.gguf", *options, **kwargs)


@pytest.mark.parametrize("kind", ["block", "full"])
@pytest.mark.parametrize("options", [(), ("--moments",)], ids=["alone", "option"])
def test_merge_adds_sums_and_counts(tmp_path, kind, options):
    """A matrix that only one file has stays unchanged."""
    other = "blk.1.attn_q.weight"
    a = write_moments(tmp_path / "a.gguf", kind, 1)
    b = write_moments(tmp_path / "b.gguf", kind, 2, {Q: Q, K: Q, other: other}, counts=(5.0, 3.0))
    done = merge(tmp_path, a, b, options=[*options, kind] if options else [])
    assert done.returncode == 0, done.stderr
    a, b, out = Moments(a), Moments(b), Moments(tmp_path / "out.gguf")
    assert out.kind == kind and out.owner == {**a.owner, **b.owner}
    np.testing.assert_array_equal(out.sums[Q], a.sums[Q] + b.sums[Q])
    np.testing.assert_array_equal(out.counts[Q], [11, 3])
    np.testing.assert_array_equal(out.sums[other], b.sums[other])
    np.testing.assert_array_equal(out.sums[DOWN], a.sums[DOWN])


def assert_error(done: subprocess.CompletedProcess, directory: Path, *parts) -> None:
    """Check for exit code 1, one line that begins with "error: " and has the parts, and no output."""
    assert done.returncode == 1, done.stderr
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "error" in x.lower()]
    assert len(lines) == 1 and "error: " in lines[0], lines
    for part in parts:
        assert part in lines[0], f"{part!r} is not in: {lines[0]}"
    assert not list(directory.glob("out.gguf*"))


def stack_moments(name, data):
    """Give the sums a third axis, of two."""
    return np.stack([data, data]) if name == f"{DOWN}.in_moments" else data


def put_nan(name, data):
    if name == f"{DOWN}.in_moments":
        data[1, 77] = np.nan
    return data


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({}, dict(kind="full"), ("b.gguf", '"full"', "a.gguf", '"block"')),
        ({}, dict(kind=""), ("b.gguf: has no second moments", "a.gguf has (block)", "--moments block")),
        (dict(kind=""), {}, ("a.gguf: has no second moments", "b.gguf has (block)", "--moments block")),
        ({}, dict(n_cols=301), ("b.gguf", f"tensor {Q}", "33931 x 2", "33886 x 2", "not the same model")),
        ({}, dict(counts=(1.0,)), ("b.gguf", f"tensor {Q}", "33886 x 1", "33886 x 2")),
        ({}, dict(owner={Q: Q, K: K}), ("b.gguf", f"tensor {K} shares the input of {K}", Q, "not the same model")),
        ({}, dict(owner={Q: Q, K: DOWN}), ("b.gguf", f"tensor {K}", DOWN)),
        ({}, dict(kind="half"), ("b.gguf", "imatrix.moments")),
        ({}, dict(block=128), ("b.gguf", "imatrix.moments.block_size", "256")),
        ({}, dict(change=put_nan), ("b.gguf", f"tensor {DOWN}", "not finite")),
        ({}, dict(change=stack_moments), ("b.gguf", f"tensor {DOWN}", "in F32, a count for each matrix")),
        ({}, dict(counts=(1.0, -1.0)), ("b.gguf", f"tensor {Q}", "not finite")),
        ({}, dict(counts=(1.0, np.inf)), ("b.gguf", f"tensor {Q}", "not finite")),
    ],
    ids=["kind", "second_without", "first_without", "columns", "experts", "sharing", "not_listed", "word", "block_size", "nan", "third_axis",
         "negative", "inf"],
)
def test_merge_refuses_files_that_do_not_match(tmp_path, first, second, parts):
    files = [write_moments(tmp_path / f"{n}.gguf", **({"kind": "block"} | options)) for n, options in (("a", first), ("b", second))]
    if second.get("kind") == "half":  # a word of the same length
        data = write_moments(files[1]).read_bytes()
        files[1].write_bytes(data.replace(b"\5" + bytes(7) + b"block", b"\5" + bytes(7) + b"bluck"))
    assert_error(merge(tmp_path, *files), tmp_path, *parts)


def test_missing_counts_are_refused(tmp_path):
    path = write_moments(tmp_path / "a.gguf", change=lambda n, d: d.astype(np.float16) if n == f"{DOWN}.moment_counts" else d)
    assert_error(merge(tmp_path, path), tmp_path, "a.gguf", f"tensor {DOWN}", ".moment_counts in F32")


def test_merge_without_moments_is_unchanged(tmp_path):
    done = merge(tmp_path, write_moments(tmp_path / "a.gguf", ""), write_moments(tmp_path / "b.gguf", ""))
    assert done.returncode == 0, done.stderr
    assert {n.rpartition(".")[2] for n in read_tensors(tmp_path / "out.gguf")} == {"in_sum2", "counts"}


@pytest.mark.parametrize("killed", [True, False])
def test_interrupted_write_keeps_the_old_file(tmp_path, killed):
    """A file size limit kills the program while it writes, or makes the write fail."""
    path = write_moments(tmp_path / "a.gguf")
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")

    def limit_file_size():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = merge(tmp_path, path, preexec_fn=limit_file_size)
    assert done.returncode == (-signal.SIGXFSZ if killed else 1)
    assert out.read_bytes() == b"old"
    if not killed:
        assert f"error: cannot write {out}" in done.stdout + done.stderr
        assert {p.name for p in tmp_path.iterdir()} == {"a.gguf", "out.gguf"}


# --- options ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--moments", "half"], ("--moments half", "block", "full")),
        (["--layers", "0-3"], ("--layers 0-3", "no --moments block or --moments full")),
        (["--moments", "block", "--layers", "3-1"], ("--layers 3-1", "A-B")),
        (["--moments", "block", "--layers", "a-b"], ("--layers a-b", "A-B")),
        (["--moments", "block", "--layers", "3"], ("--layers 3:", "A-B")),
        (["--moments", "block", "--layers", "1-2x"], ("--layers 1-2x", "A-B")),
        (["--moments", "block", "--layers", "1--2"], ("--layers 1--2", "A-B")),
        (["--moments", "block", "--layers", "-1-2"], ("--layers -1-2", "A-B")),
        (["--moments", "block", "--moments-columns", "256"], ("--moments-columns 256", "--moments full")),
        (["--moments", "full", "--output-format", "dat"], ("--moments full", "--output-format dat")),
    ],
)
def test_bad_options_are_refused(tmp_path, text, model, options, parts):
    assert_error(run_imatrix("-m", model, "-f", text, "-o", tmp_path / "out.gguf", *options), tmp_path, *parts)


def test_layers_need_a_text(tmp_path):
    done = merge(tmp_path, write_moments(tmp_path / "a.gguf"), options=["--moments", "block", "--layers", "0-1"])
    assert_error(done, tmp_path, "--layers 0-1", "-f FILE")


def test_layers_beyond_the_model_are_refused(model, text, tmp_path):
    done = run_imatrix("-m", model, "-f", text, *RUN, "--moments", "block", "--layers", "2-8", "-o", tmp_path / "out.gguf")
    assert_error(done, tmp_path, "--layers 2-8", "the model has 8 layers, 0-7")


@pytest.mark.parametrize(
    ("options", "contents", "parts"),
    [
        ([], {}, ("a.gguf", "second moments (block)", "add --moments block")),
        (["--moments", "full"], {}, ("a.gguf", '"block"', "--moments", '"full"')),
        (["--moments", "block"], {}, (Q, "33886 x 2", "32896 x 1", "another model")),
        (["--moments", "block"], dict(n_cols=256, counts=(1.0,), owner={Q: Q, K: K}), (f"tensor {K}", "another model")),
        (["--moments", "block"], dict(kind=""), ("a.gguf: has no second moments", "--moments has (block)")),
    ],
    ids=["option_missing", "kind", "size", "sharing", "without"],
)
def test_in_file_that_does_not_match_is_refused(model, text, tmp_path, options, contents, parts):
    path = write_moments(tmp_path / "a.gguf", **{"width": 256, "owner": {Q: Q, K: Q}} | contents)
    assert_error(run_imatrix("-m", model, "-f", text, *RUN, *options, "--in-file", path, "-o", tmp_path / "out.gguf"), tmp_path, *parts)


def test_too_little_memory_is_refused(text, tmp_path, monkeypatch):
    """One matrix is wide enough to exceed this machine's memory."""
    if not Path("/proc/meminfo").exists():
        pytest.skip("the system does not say what memory is available")
    kib = next(int(x.split()[1]) for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemTotal"))
    width = int((2 * kib * 1024 / 4) ** 0.5 * 1.1) // 64 * 64
    monkeypatch.setitem(synth_model.SHAPES, "wide", (64, width, 64, 1, 1, 0, 0))
    synth_model.write_model("f16", tmp_path / "wide.gguf", "wide", 1)
    done = run_imatrix("-m", tmp_path / "wide.gguf", "-f", text, *RUN, "--moments", "full", "-o", tmp_path / "out.gguf")
    block = 4 * (n_values(width, "block") + 3 * n_values(64, "block")) / 2**20
    assert_error(done, tmp_path, "--moments full", f"--moments block takes {block:.1f} MiB", "--layers A-B")


def test_help_lists_the_flags(model):
    output = run_imatrix("--help").stdout
    for part in ("--moments {block,full}", "--layers A-B"):
        assert part in output
