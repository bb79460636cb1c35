"""What is said of OUT: reports, verification, lines of JSON."""

import hashlib
import json

import pytest

from ggml_ext._encode.codec import Codec
from ggml_ext._output import verify
from ggml_ext._output.output import Output
from helpers import writing
from helpers.errors import files
from helpers.models import read_tensors
from helpers.writing import FLAGS, NAMES, run, run_badly, run_well

small_chunks, source = writing.small_chunks, writing.source


@pytest.mark.parametrize("flags", [(), ("--split-max-size", "1M")], ids=["whole", "split"])
def test_report_and_verify(lib, source, tmp_path, capsys, flags):
    out, report = tmp_path / "out.gguf", tmp_path / "report.json"
    stdout, _ = run_well(capsys, source, out, *FLAGS, "--verify", "--report", report, *flags)
    assert "verified: 9 tensors read back" in stdout
    found = json.loads(report.read_text())
    if flags:
        out = tmp_path / "out-00001-of-00001.gguf"
    assert found["output"] == [{"path": str(out), "bytes": out.stat().st_size}]
    assert found["verified"] and found["type"] == "ditto3" and found["options"].endswith("fallback-above=3")
    for tensor, record in zip(read_tensors(out).values(), found["tensors"], strict=True):
        assert (tensor.name, tensor.tensor_type.name.lower(), tensor.n_bytes) == (record["name"], record["type"], record["bytes"])
        assert hashlib.sha256(tensor.data.tobytes()).hexdigest() == record["sha256"]
    by_name = {t["name"]: t for t in found["tensors"]}
    assert by_name[NAMES[2]]["type"] == "iq4_nl" and 0.02 < by_name[NAMES[1]]["relative_squared_error"] < 0.06
    assert "relative_squared_error" not in by_name[NAMES[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.gguf", out.name, "report.json"])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--report", "no/report.json"], ("--report", "folder", "does not exist")),
        (["--report", "out.gguf"], ("--report", "same file as OUT")),
        (["--report", "out-00001-of-00001.gguf", "--split-max-size", "1G"], ("--report", "same file as OUT")),
        (["--report", "in.gguf", "--force"], ("--report", "same file as IN")),
        (["--report", "old.json"], ("--report", "old.json exists", "--force")),
        (["--report", "."], ("--report", "not a regular file")),
        (["--report", "new.json", "--dry-run"], ("--report", "--dry-run")),
        (["--verify", "--dry-run"], ("--verify", "--dry-run")),
        (["--split-max-size", "2"], ("--split-max-size", "'2'", "such as 2G")),
        (["--split-max-size", "0M"], ("--split-max-size", "'0M'")),
        (["--split-max-size", "1.5G"], ("--split-max-size", "'1.5G'")),
        (["--log-format", "xml"], ("--log-format", "'xml'", "text or json")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_options(source, tmp_path, capsys, monkeypatch, flags, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    before = files(tmp_path)
    run_badly(capsys, "in.gguf", "out.gguf", *FLAGS, *flags, parts=parts)
    assert files(tmp_path) == before


def flip(path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("position", "part"), [(-100, f"tensor {NAMES[-1]}"), (6, "the header")], ids=["data", "header"])
def test_verify_finds_what_the_disk_changed(lib, source, tmp_path, capsys, monkeypatch, position, part):
    complete = Output.complete

    def damage(self, headers):
        complete(self, headers)
        flip(self.parts[0].partial, position)

    monkeypatch.setattr(Output, "complete", damage)
    monkeypatch.setattr(verify, "is_same", lambda a, b: True)  # the bytes alone
    before = files(tmp_path)
    parts = ("--verify", part, "differs from what was written")
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=parts)
    assert files(tmp_path) == before
    run_well(capsys, source, tmp_path / "out.gguf", *FLAGS)  # nobody looked


def test_verify_finds_errors_other_than_those_found_while_writing(lib, source, tmp_path, capsys, monkeypatch):
    """Memory that fails under the encoder's result, say."""
    convert = Codec.convert

    def wrong(self, rows, tensor, *others):
        data, accuracy = convert(self, rows, tensor, *others)
        if tensor.name == NAMES[4]:
            data = data.copy()
            data[0, 20] ^= 64
        return data, accuracy

    monkeypatch.setattr(Codec, "convert", wrong)
    run_badly(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=(f"tensor {NAMES[4]} decodes to other weights",))


def test_log_format_json(lib, source, tmp_path, capsys):
    """Every line of both streams, errors too."""
    out, err = run_well(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json", "--tensor-type", "xyz=q8_0")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"]
    assert [e["name"] for e in events[:-1]] == NAMES and events[3]["index"] == 4 and all(e["time"] for e in events)
    assert events[-1]["output"][0]["bytes"] == (tmp_path / "out.gguf").stat().st_size
    told = [json.loads(line) for line in err.splitlines()]
    assert [(t["event"], t["text"]) for t in told] == [("warning", "--tensor-type xyz=q8_0 matches no tensor")]
    code, out, err = run(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json")
    assert code == 1 and not out and json.loads(err)["event"] == "error" and "exists" in json.loads(err)["text"]
    out, err = run_well(capsys, source, *FLAGS, "--log-format", "json", "--dry-run")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"] and events[-1]["bits_per_weight"] > 3 and not err
    out, err = run_well(capsys, source, tmp_path / "quiet.gguf", *FLAGS, "--log-format", "json", "-q")
    assert out == err == ""


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--log-format", "json"], "required: --type"),
        (["--log-format=json", "--type"], "--type: expected one argument"),
        (["--log-f", "json", "--no-such-flag"], "--no-such-flag"),
        (["--threads", "many", "--log-form=json"], "--threads: invalid int value: 'many'"),
        (["--log-format", "text", "-t", "0", "--log-format", "json"], "required: --type"),
        (["--log-format", "json", "--log-format", "xml"], "--log-format: got 'xml'"),
        (["--log-format", "json", "--tensor"], "--tensor"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_command_lines_are_objects_too(tmp_path, capsys, flags, part):
    code, out, err = run(capsys, tmp_path / "in.gguf", tmp_path / "out.gguf", *flags)
    (line,) = err.splitlines()
    found = json.loads(line)
    assert (code, out, found["event"]) == (1, "", "error") and part in found["text"]


@pytest.mark.parametrize("flags", [["--log-format", "text"], ["--log-format"], ["--log-format", "xml"], ["--", "--log-format", "json"]])
def test_bad_command_lines_are_text_otherwise(tmp_path, capsys, flags):
    run_badly(capsys, tmp_path / "in.gguf", "--no-such-flag", *flags)
