"""Reports about OUT: --report, --verify, --log-format json."""

import hashlib
import json

import pytest

from ggml_ext._encode.codec import Codec
from ggml_ext._output import verify
from ggml_ext._output.output import Output
from helpers import writing
from helpers.errors import files
from helpers.models import read_tensors
from helpers.writing import FLAGS, NAMES, run, run_failing, run_successfully

small_chunks, source = writing.small_chunks, writing.source


@pytest.mark.parametrize("flags", [(), ("--split-max-size", "1M")], ids=["whole", "split"])
def test_report_and_verification_are_written(lib, source, tmp_path, capsys, flags):
    out, report = tmp_path / "out.gguf", tmp_path / "report.json"
    stdout, _ = run_successfully(capsys, source, out, *FLAGS, "--verify", "--report", report, *flags)
    assert "verified: 9 tensors read back" in stdout
    record = json.loads(report.read_text())
    if flags:
        out = tmp_path / "out-00001-of-00001.gguf"
    assert record["output"] == [{"path": str(out), "bytes": out.stat().st_size}]
    assert record["verified"] and record["type"] == "ditto3" and record["options"].endswith("fallback-above=3")
    for tensor, row in zip(read_tensors(out).values(), record["tensors"], strict=True):
        assert (tensor.name, tensor.tensor_type.name.lower(), tensor.n_bytes) == (row["name"], row["type"], row["bytes"])
        assert hashlib.sha256(tensor.data.tobytes()).hexdigest() == row["sha256"]
    by_name = {t["name"]: t for t in record["tensors"]}
    assert by_name[NAMES[2]]["type"] == "iq4_nl" and 0.02 < by_name[NAMES[1]]["relative_squared_error"] < 0.06
    assert "relative_squared_error" not in by_name[NAMES[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.gguf", out.name, "report.json"])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--report", "no/report.json"], ("--report", "directory", "does not exist")),
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
def test_bad_options_are_refused(source, tmp_path, capsys, monkeypatch, flags, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    before = files(tmp_path)
    run_failing(capsys, "in.gguf", "out.gguf", *FLAGS, *flags, parts=parts)
    assert files(tmp_path) == before


def flip_byte(path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("position", "part"), [(-100, f"tensor {NAMES[-1]}"), (6, "the header")], ids=["data", "header"])
def test_verify_notices_changed_bytes(lib, source, tmp_path, capsys, monkeypatch, position, part):
    complete = Output.complete

    def damage(self, headers):
        complete(self, headers)
        flip_byte(self.parts[0].partial, position)

    monkeypatch.setattr(Output, "complete", damage)
    monkeypatch.setattr(verify, "is_same", lambda a, b: True)  # compares only the bytes
    before = files(tmp_path)
    parts = ("--verify", part, "differs from what was written")
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=parts)
    assert files(tmp_path) == before
    run_successfully(capsys, source, tmp_path / "out.gguf", *FLAGS)  # without --verify nothing is noticed


def test_verify_notices_wrong_errors(lib, source, tmp_path, capsys, monkeypatch):
    """Failing memory can change the encoder's result."""
    convert = Codec.convert

    def encode_wrongly(self, rows, tensor, *others):
        data, accuracy = convert(self, rows, tensor, *others)
        if tensor.name == NAMES[4]:
            data = data.copy()
            data[0, 20] ^= 64
        return data, accuracy

    monkeypatch.setattr(Codec, "convert", encode_wrongly)
    run_failing(capsys, source, tmp_path / "out.gguf", *FLAGS, "--verify", parts=(f"the decoded tensor {NAMES[4]} differs",))


def test_json_log_has_one_object_per_line(lib, source, tmp_path, capsys):
    """Covers both streams, errors too."""
    out, err = run_successfully(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json", "--tensor-type", "xyz=q8_0")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"]
    assert [e["name"] for e in events[:-1]] == NAMES and events[3]["index"] == 4 and all(e["time"] for e in events)
    assert events[-1]["output"][0]["bytes"] == (tmp_path / "out.gguf").stat().st_size
    told = [json.loads(line) for line in err.splitlines()]
    assert [(t["event"], t["text"]) for t in told] == [("warning", "--tensor-type xyz=q8_0 matches no tensor")]
    code, out, err = run(capsys, source, tmp_path / "out.gguf", *FLAGS, "--log-format", "json")
    assert code == 1 and not out and json.loads(err)["event"] == "error" and "exists" in json.loads(err)["text"]
    out, err = run_successfully(capsys, source, *FLAGS, "--log-format", "json", "--dry-run")
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["tensor"] * 9 + ["summary"] and events[-1]["bits_per_weight"] > 3 and not err
    out, err = run_successfully(capsys, source, tmp_path / "quiet.gguf", *FLAGS, "--log-format", "json", "-q")
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
def test_bad_command_line_is_a_json_object(tmp_path, capsys, flags, part):
    code, out, err = run(capsys, tmp_path / "in.gguf", tmp_path / "out.gguf", *flags)
    (line,) = err.splitlines()
    record = json.loads(line)
    assert (code, out, record["event"]) == (1, "", "error") and part in record["text"]


@pytest.mark.parametrize("flags", [["--log-format", "text"], ["--log-format"], ["--log-format", "xml"], ["--", "--log-format", "json"]])
def test_bad_command_line_is_text_by_default(tmp_path, capsys, flags):
    run_failing(capsys, tmp_path / "in.gguf", "--no-such-flag", *flags)
