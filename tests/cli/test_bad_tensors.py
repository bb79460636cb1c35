"""Tensors that no sound model has, for every weight type: finite blocks and a reported error, never NaN."""

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from ggml_ext import TYPES, WEIGHT_TYPES, quants
from ggml_ext._encode.accuracy import read_epsilons
from ggml_ext._encode.codec import largest_weight
from ggml_ext._formats import gguf_file
from helpers.commands import quantize
from helpers.importances import write_imatrix
from helpers.inspecting import inspect
from helpers.models import read_tensors, write_gguf
from helpers.type_kinds import TYPE_KINDS
from helpers.weights import relative_mse

RNG = np.random.default_rng(11)
N = 512


def one_outlier(value: float) -> np.ndarray:
    w = RNG.standard_normal((8, N))
    w[3, 300] = value
    return w


TENSORS = {
    "zeros": np.zeros((8, N)),
    "constant": np.full((8, N), -0.0371),
    "constant_rows": np.repeat(RNG.standard_normal((8, 1)), N, axis=1),
    "two_values": np.where(RNG.random((8, N)) < 0.5, 0.25, -3.0),
    "one_weight": np.eye(8, N, 17) * 5,
    "outlier_high": one_outlier(6e4 / 16),  # the rotation spreads it over its block
    "outlier_low": one_outlier(-6e4 / 16),
    "outlier_largest": one_outlier(14000.0),
    "subnormal": RNG.standard_normal((8, N)) * 1e-43,
    "smallest": np.full((8, N), 1e-45),
    "below_halves": RNG.standard_normal((8, N)) * 1e-9,
    "subnormal_halves": RNG.standard_normal((8, N)) * 1e-5,
    "mixed_rows": RNG.standard_normal((8, N)) * 10.0 ** np.arange(-42, 6, 6)[:, None],
    "mixed": RNG.standard_normal((8, N)) * 10.0 ** RNG.integers(-40, 4, (8, N)),
    "largest": np.where(RNG.random((8, N)) < 0.5, 14000.0, -14000.0),
}
NAMES = {kind: f"blk.{i}.ffn_up.weight" for i, kind in enumerate(TENSORS)}


def tensors_for(type_name: str) -> dict[str, np.ndarray]:
    """Return TENSORS with the largest weights that the type can hold."""
    limit = largest_weight(GGMLQuantizationType[type_name.upper()])
    return {kind: np.clip(w, -limit, limit).astype(np.float32) for kind, w in TENSORS.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a function that writes a file of tensors_for() a type."""
    folder, files = tmp_path_factory.mktemp("bad"), {}

    def source(type_name: str):
        if type_name not in files:
            tensors = {NAMES[kind]: w for kind, w in tensors_for(type_name).items()}
            files[type_name] = write_gguf(folder / f"{type_name}.gguf", tensors, "F32")
        return files[type_name]

    return source


# Importances as unusual as the weights: none, one column, many orders of magnitude.
IMPORTANCES = {
    "zero": np.zeros((1, N)),
    "one": np.eye(1, N, 300),
    "spread": 10.0 ** RNG.uniform(-38, 14.9, (1, N)),
}


def imatrix_flags(folder, kind: str) -> list:
    entries = {name: (IMPORTANCES[kind].astype(np.float32), [1]) for name in NAMES.values()}
    entries["output.weight"] = np.ones((1, N), np.float32), [1]  # a file of only zeros is refused
    return ["--imatrix", write_imatrix(folder / "im.gguf", entries)]


# By day one type of each encoder has all importances, and one of each kind of kernel the most unusual ones: trellis types differ by a row of a table.
BY_DAY = dict.fromkeys(TYPE_KINDS, ("spread",)) | dict.fromkeys(("itq3_s", "ccq2", "ditto3", "itq3_t"), tuple(IMPORTANCES))
CASES = [pytest.param(name, options, marks=() if options in BY_DAY.get(name, ()) or name in TYPE_KINDS and not options else pytest.mark.nightly)
         for name in sorted(WEIGHT_TYPES) for options in ("", *IMPORTANCES)] + [("ditto3", "tensor")]


@pytest.mark.slow
@pytest.mark.parametrize(("type_name", "options"), CASES)
def test_output_is_finite_and_its_error_is_reported(lib, sources, tmp_path, type_name, options):
    source = sources(type_name)
    flags = ["--ditto-codebook", "tensor"] if options == "tensor" else []
    if options in IMPORTANCES:
        flags = imatrix_flags(tmp_path, options)
    out, from_numpy = tmp_path / "out.gguf", tmp_path / "numpy.gguf"
    report = quantize(source, out, "--type", type_name, *flags).stdout
    assert "nan" not in report.lower()
    summary_rows = re.findall(r"^blk\.\*\.ffn_up\.weight +\w+ +([\d.]+)(?: +[\d.]+)? +([\d.e+-]+)$", report, re.M)
    assert len(summary_rows) == 1 and all(np.isfinite(float(v)) for v in summary_rows[0]), report
    quantize(source, from_numpy, "--type", type_name, "--encoder", "numpy", *flags)
    assert out.read_bytes() == from_numpy.read_bytes()

    info, epsilons = TYPES[type_name], read_epsilons(gguf_file.GGUFFile(out))
    tensors = read_tensors(out)
    for kind, w in tensors_for(type_name).items():
        blocks = tensors[NAMES[kind]].data
        assert lib.validate(int(info.id), np.ascontiguousarray(blocks.reshape(-1, info.block_bytes))), kind
        decoded = lib.dequantize(int(info.id), np.ascontiguousarray(blocks), N)
        assert np.isfinite(decoded).all(), kind
        if type_name == "ditto3":
            assert np.abs(decoded.astype(np.float64) - w).max() <= epsilons[NAMES[kind]] < np.inf, kind
        if kind == "zeros":
            assert not decoded.any()
        elif not options:
            assert relative_mse(decoded, w) <= 1, kind  # no worse than zeros
    rows = inspect(out, "--against", source)
    assert all(rows[name][-1] == "ok" and "nan" not in rows[name] for name in NAMES.values())


@pytest.mark.parametrize("type_name", [name for name, info in WEIGHT_TYPES.items() if info.rotated])
def test_largest_rotated_value_keeps_its_precision(lib, type_name):
    """The weights rotate to one value, sqrt(block size) times their magnitude, and keep the precision of small ones. Trellis types,
    whose codes lie around zero, clip twice as large ones; below two bits they clip this block under any scale."""
    info = TYPES[type_name]
    x = largest_weight(GGMLQuantizationType[type_name.upper()]) * quants.SIGNS[None, : info.block_size]

    def error(weights: np.ndarray) -> float:
        return relative_mse(lib.dequantize(int(info.id), lib.quantize(int(info.id), weights), info.block_size), weights)

    assert error(x) <= 1.01 * error(x / 64)
    assert not info.trellis_values or info.bpw < 2 or error(2 * x) > 1.03 * error(x / 64)


@pytest.mark.parametrize("options", ["", *IMPORTANCES])
@pytest.mark.parametrize("stock", ["iq4_nl", "q3_k", "q6_k"])
def test_upstream_types_stay_finite(lib, sources, tmp_path, stock, options):
    """Covers the fallback, the embeddings and the output matrix."""
    source = sources("ditto3")
    flags = ["--tensor-type", f"blk={stock}"]
    if options:
        flags += imatrix_flags(tmp_path, options)
    quantize(source, tmp_path / "out.gguf", "--type", "ditto3", *flags)
    for name, columns in inspect(tmp_path / "out.gguf", "--against", source).items():
        if name in NAMES.values():
            assert columns[-1] == "ok" and np.isfinite([float(v) for v in columns[-3:-1]]).all(), name
