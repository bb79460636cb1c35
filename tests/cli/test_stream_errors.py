"""Recorded errors of the residual stream: shown, drawn and refused."""

import gguf
import pytest

from ggml_ext._sequential.errors import KEY
from helpers.errors import check_error
from helpers.inspecting import inspect_in_process, inspect_json
from helpers.models import gaussian, write_gguf

MATRICES = {f"blk.{layer}.ffn_up.weight": gaussian(4, 256, seed=layer) for layer in range(12)}


def write_recorded(folder, errors, name="out.gguf", add=lambda w, e: w.add_array(KEY, e), **kwargs):
    return write_gguf(folder / name, MATRICES, fill=lambda writer: add(writer, errors), **kwargs)


def test_table_summarizes_and_json_lists_stream_errors(tmp_path):
    errors = [0.001 * (layer + 1) for layer in range(12)]
    path = write_recorded(tmp_path, errors)
    assert inspect_json(path)["stream_errors"] == pytest.approx(errors, rel=1e-6)
    last = inspect_in_process(path).stdout.splitlines()[-1]
    assert last.startswith("NMSE of the residual stream after some layers 0: 0.001, 1: 0.002") and last.endswith("11: 0.012")
    assert last.count(":") == 10


def test_file_without_a_record_shows_nothing(tmp_path):
    path = write_gguf(tmp_path / "out.gguf", MATRICES)
    assert "stream_errors" not in inspect_json(path) and "residual" not in inspect_in_process(path).stdout


def test_picture_has_stream_errors_below_weight_errors(tmp_path):
    pytest.importorskip("matplotlib")
    original = write_gguf(tmp_path / "in.gguf", MATRICES, "F32")
    pictures = {}
    for name, errors in (("with", [0.01] * 12), ("without", [0.0] * 12)):
        done = inspect_in_process(write_recorded(tmp_path, errors, f"{name}.gguf"), "--against", original, "--picture", tmp_path / f"{name}.svg")
        assert done.returncode == 0, done.stderr
        pictures[name] = (tmp_path / f"{name}.svg").read_text()
    assert "residual" in pictures["with"] and "residual" not in pictures["without"]


@pytest.mark.parametrize(("errors", "add"), [
    ([float("nan")] * 2, lambda w, e: w.add_array(KEY, e)),
    ([-1.0], lambda w, e: w.add_array(KEY, e)),
    (["a"], lambda w, e: w.add_array(KEY, e)),
    (1.0, lambda w, e: w.add_key_value(KEY, e, gguf.GGUFValueType.FLOAT32)),
])
def test_invalid_record_is_refused(errors, add, tmp_path):
    check_error(inspect_in_process(write_recorded(tmp_path, errors, add=add)), KEY, "finite and not negative", "quantize the model again")
