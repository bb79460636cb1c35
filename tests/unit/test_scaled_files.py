"""Column scales: the entry in the file, scaled weights and Hessians, the formula, and converted adapters."""

import gguf
import numpy as np
import pytest

from ggml_ext import scale_adapter
from ggml_ext._base.errors import UserError
from ggml_ext._calibration.scaling import _Chooser
from ggml_ext._formats.column_scales import KEY, LARGEST, ColumnScales, ScaledFile, to_factors
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._formats.hessians import divide_columns
from ggml_ext._native.graph import ScaleGroup
from helpers.commands import run_main
from helpers.errors import check_error
from helpers.hessians import correlated_hessian, pack_triangles
from helpers.models import gaussian, write_gguf

NORM, UP, DOWN = "blk.0.ffn_norm.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
RANDOM = np.random.default_rng(1)


def random_exponents(n: int) -> np.ndarray:
    return RANDOM.integers(-LARGEST, LARGEST + 1, n).astype(np.int8)


INPUTS, HIDDEN = random_exponents(32), random_exponents(64)
SCALES = ColumnScales({UP: INPUTS, DOWN: HIDDEN}, {NORM: INPUTS, UP: HIDDEN})


def write_model(path, fill=None):
    tensors = {NORM: gaussian(32), UP: gaussian(64, 32), DOWN: gaussian(32, 64)}
    return write_gguf(path, {name: t.astype(np.float32) for name, t in tensors.items()}, "F32", fill=fill)


def test_entry_is_printable_and_read_back(tmp_path):
    (entry,) = SCALES.metadata()
    assert entry.value.isascii() and all(line.isprintable() for line in entry.value.splitlines())
    file = GGUFFile(write_model(tmp_path / "m.gguf", lambda w: w.add_string(KEY, entry.value)))
    read = ColumnScales.read(file)
    for by_name, expected in ((read.columns, SCALES.columns), (read.rows, SCALES.rows)):
        assert by_name.keys() == expected.keys() and all(np.array_equal(by_name[n], expected[n]) for n in expected)


@pytest.mark.parametrize("entry", [f"{UP} columns OOO", f"{UP} columns", f"{UP} planes {'O' * 32}", f"other columns {'O' * 32}", f"{UP} columns {'~' * 32}"])
def test_damaged_entry_is_refused(tmp_path, entry):
    file = GGUFFile(write_model(tmp_path / "m.gguf", lambda w: w.add_string(KEY, entry)))
    with pytest.raises(UserError, match=KEY):
        ColumnScales.read(file)


def test_scaled_weights_keep_the_function(tmp_path):
    """down(up(norm x)): the weights of each product of three are rounded four times, by at most 2^-24 of themselves each."""
    file = GGUFFile(write_model(tmp_path / "m.gguf"))
    tensors = {t.name: t for t in file.tensors}

    def read(source: GGUFFile, name: str) -> np.ndarray:
        rows = [source.rows(tensors[name], first, 1) for first in range(tensors[name].n_rows)]
        return np.concatenate(rows).view("<f4").astype(np.float64)

    (norm, up, down), scaled = ([read(source, name) for name in (NORM, UP, DOWN)] for source in (file, ScaledFile(file, SCALES)))
    x = gaussian(5, 32)
    assert np.abs(scaled[1] / up).max() > 2
    bound = 4.01 * 2**-24 * np.abs(norm * x) @ np.abs(up).T @ np.abs(down).T
    assert (np.abs((scaled[0] * x) @ scaled[1].T @ scaled[2].T - (norm * x) @ up.T @ down.T) <= bound).all()


@pytest.mark.parametrize("full", [True, False])
def test_hessian_of_scaled_inputs(full):
    n = 300
    hessian, factors = correlated_hessian(n, 1000), to_factors(random_exponents(n))
    actual = divide_columns(pack_triangles(hessian, full), factors, full)
    np.testing.assert_allclose(actual, pack_triangles(hessian / np.outer(factors, factors), full), rtol=4 * 2**-23)


class Inputs:
    """Stands for an imatrix: the mean squares of the inputs of DOWN."""

    def __init__(self, values: np.ndarray):
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name == DOWN

    def values(self, tensor: object) -> np.ndarray:
        return self._values[None]


def test_formula(tmp_path):
    """Scales m^(1/8) / c^(3/8) in steps of 2^(1/8), with geometric mean one; two heads of 16 share the rows of one. Dead columns have one."""
    file = GGUFFile(write_model(tmp_path / "m.gguf"))
    m = RANDOM.lognormal(size=64).astype(np.float32) ** 3
    tensors = {t.name: t for t in file.tensors}
    weights = file.rows(tensors[DOWN], 0, 32).view("<f4").astype(np.float64)
    chooser = _Chooser(file, tensors, {DOWN}, Inputs(m))
    for group, shape in ((ScaleGroup((DOWN,), (UP,), 64, 1), (1, 1, 64)), (ScaleGroup((DOWN,), (UP,), 16, 2), (2, 2, 16))):
        assert chooser.is_usable(group)
        c, inputs = ((v.reshape(shape).mean(axis=1).ravel()) for v in ((weights**2).mean(axis=0), m))
        logs = np.log2(inputs) / 8 - 3 / 8 * np.log2(c)
        exponents = chooser.choose(group)
        assert np.abs(exponents / 8 - (logs - logs.mean())).max() <= 1 / 16 + 1e-6  # half a step, and rounding
    m[3] = 0
    assert chooser.choose(ScaleGroup((DOWN,), (UP,), 64, 1))[3] == 0
    assert not chooser.is_usable(ScaleGroup((UP,), (NORM,), 32, 1))  # neither quantized nor measured


def write_adapter(path, qtype: str = "F32", rows: int = 64):
    pair = {f"{UP}.lora_a": gaussian(32, 32), f"{UP}.lora_b": gaussian(rows, 32)}
    return write_gguf(path, {n: t.astype(np.float32) for n, t in pair.items()}, qtype, fill=lambda w: w.add_type("adapter"))


def test_adapter_is_scaled(tmp_path):
    model = write_model(tmp_path / "m.gguf", lambda w: w.add_string(KEY, SCALES.metadata()[0].value))
    done = run_main(scale_adapter.main, model, write_adapter(tmp_path / "a.gguf"), tmp_path / "out.gguf")
    assert done.returncode == 0, done.stderr
    before, after = ({t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / name).tensors} for name in ("a.gguf", "out.gguf"))
    columns, rows = to_factors(SCALES.columns[UP]), to_factors(SCALES.rows[UP])
    np.testing.assert_array_equal(after[f"{UP}.lora_a"], before[f"{UP}.lora_a"] * columns)
    np.testing.assert_array_equal(after[f"{UP}.lora_b"], before[f"{UP}.lora_b"] / rows[:, None])
    check_error(run_main(scale_adapter.main, model, tmp_path / "out.gguf", tmp_path / "twice.gguf"), "has the scales of a model already")
    check_error(run_main(scale_adapter.main, model, tmp_path / "a.gguf", tmp_path / "out.gguf"), "--force")


def test_adapters_that_do_not_fit(tmp_path):
    model = write_model(tmp_path / "m.gguf", lambda w: w.add_string(KEY, SCALES.metadata()[0].value))
    plain = write_model(tmp_path / "plain.gguf")
    cases = [(plain, write_adapter(tmp_path / "a.gguf"), "has no column scales"), (model, plain, "is not an adapter"),
             (model, write_adapter(tmp_path / "q.gguf", "Q8_0"), "must be f32, f16 or bf16"),
             (model, write_adapter(tmp_path / "other.gguf", rows=96), "it is for another model")]
    for first, second, message in cases:
        check_error(run_main(scale_adapter.main, first, second, tmp_path / "out.gguf"), message)
        assert not (tmp_path / "out.gguf").exists()
