"""--part: separate runs write the parts of a split model."""

import json
import shutil
import signal
import subprocess

import pytest

from ggml_ext._base.signals import StopRequest
from ggml_ext._formats.split import PARTS_KEY, SPLIT_KEYS, open_model
from ggml_ext._output.output import Output
from helpers import choosing, writing
from helpers.commands import quantize_command, tool
from helpers.models import gaussian, write_gguf
from helpers.moments_files import correlated, write_moments
from helpers.writing import NAMES, record_encoded, run_failing, run_successfully

small_chunks, source, fresh = writing.small_chunks, writing.source, choosing.fresh
N_PARTS = 5
PLAIN = ("--type", "itq3_t", "--importance", "none", "-q")


@pytest.fixture
def imatrix(tmp_path):
    """Write full Hessians of the matrices of `source`."""
    return write_moments(tmp_path / "imatrix.gguf", {name: correlated(600, 512, seed=1) for name in NAMES if "ffn" in name}, "full")


def part_paths(out, n_parts=N_PARTS):
    return [out.with_name(f"{out.stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]


def write_parts(capsys, source, out, *flags, n_parts=N_PARTS):
    for i in range(1, n_parts + 1):
        run_successfully(capsys, source, out, *flags, "--part", f"{i}/{n_parts}")


def raise_stop(*args):
    raise StopRequest(signal.SIGTERM)


def read_model(path):
    """Return the types and data of all tensors, and the metadata without those of the split."""
    file = open_model(path)
    tensors = {t.name: (t.type, file.rows(t, 0, t.n_rows).tobytes()) for t in file.tensors}
    return tensors, {key: kv.raw for key, kv in file.metadata.items() if key not in SPLIT_KEYS}


@pytest.mark.parametrize("more", [(), ("--fallback-above", "3"), ("--verify",)], ids=["plain", "fallback", "verify"])
def test_parts_equal_a_single_run(lib, source, imatrix, tmp_path, capsys, more):
    flags = ("--type", "itq3_t", "--imatrix", imatrix, *[m for m in more if m != "--verify"])
    run_successfully(capsys, source, tmp_path / "one.gguf", *flags)
    (tmp_path / "parts").mkdir()
    out = tmp_path / "parts" / "out.gguf"
    write_parts(capsys, source, out, *flags, *(m for m in more if m == "--verify"))
    assert sorted(out.parent.iterdir()) == part_paths(out)
    assert read_model(part_paths(out)[0]) == read_model(tmp_path / "one.gguf")


def test_parts_of_a_standard_file_have_one_more_key(lib, source, tmp_path, capsys):
    write_parts(capsys, source, tmp_path / "out.gguf", "--type", "q4_0", "--pure", "--no-calibration", n_parts=2)
    first = open_model(part_paths(tmp_path / "out.gguf", 2)[0])
    assert [key for key in first.metadata if key.startswith("ggml_ext.")] == [PARTS_KEY]
    run_successfully(capsys, first.path, tmp_path / "again.gguf", "--type", "q8_0", "--pure", "--no-calibration", "--allow-requantize")
    assert PARTS_KEY not in open_model(tmp_path / "again.gguf").metadata


@pytest.mark.parametrize(
    ("change", "named"),
    [("type", "different options, types"), ("effort", "different options"), ("source", "different source"), ("calibration", "different calibration"), ("other", "not made with --part")],
)
def test_parts_of_another_run_are_refused(lib, source, imatrix, tmp_path, capsys, change, named):
    flags, out, first = ("--imatrix", imatrix, "-q"), tmp_path / "out.gguf", part_paths(tmp_path / "out.gguf")[0]
    run_successfully(capsys, source, out, "--type", "itq3_t", *flags, "--part", "1/5")
    if change == "source":
        write_gguf(source, {name: gaussian(256) if "norm" in name else gaussian(12, 512, seed=9) for name in NAMES}, "F32")
    if change == "calibration":
        write_moments(imatrix, {name: correlated(700, 512, seed=2) for name in NAMES if "ffn" in name}, "full")
    if change == "other":
        shutil.copy(source, first)
    others = {"type": ("--type", "itq2_t"), "effort": ("--type", "itq3_t", "--effort", "fast")}.get(change, ("--type", "itq3_t"))
    run_failing(capsys, source, out, *others, *flags, "--part", "2/5", parts=(first.name, f"{named}: repeat", "delete the part that is wrong"))
    assert not part_paths(out)[1].exists()


def test_unfinished_parts_count_too(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "complete", raise_stop)
        assert writing.run(capsys, source, out, *PLAIN, "--part", "4/5")[0] == 143
    run_failing(capsys, source, out, *PLAIN, "--pure", "--tensor-type", "ffn_up=itq2_t", "--part", "2/5", parts=("out-00004-of-00005.gguf", "types"))
    run_successfully(capsys, source, out, *PLAIN, "--part", "2/5")


def test_part_that_appears_during_the_run_is_checked(lib, source, tmp_path, capsys, monkeypatch):
    """Two runs may begin at once. The one that ends last finds the other's part, and keeps what it encoded."""
    out, complete = tmp_path / "out.gguf", Output.complete

    def complete_after_another(self, headers):
        complete(self, headers)
        monkeypatch.setattr(Output, "complete", complete)
        shutil.copy(source, part_paths(out)[0])

    monkeypatch.setattr(Output, "complete", complete_after_another)
    run_failing(capsys, source, out, *PLAIN, "--part", "2/5", parts=("out-00001-of-00005.gguf", "not made with --part", "resume after"))
    part_paths(out)[0].unlink()
    with record_encoded(monkeypatch) as names:
        run_successfully(capsys, source, out, *PLAIN, "--part", "2/5")
    assert not names and part_paths(out)[1].exists()


def test_killed_part_resumes(lib, source, tmp_path, capsys, monkeypatch):
    """The other parts stay as they are, and the journal of a part is its own."""
    out = tmp_path / "out.gguf"
    write_parts(capsys, source, tmp_path / "same.gguf", *PLAIN, n_parts=2)
    finish = Output.finish

    def stop(self, *args):
        finish(self, *args)
        if len(self.finished) == 2:
            raise_stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "finish", stop)
        assert writing.run(capsys, source, out, *PLAIN, "--part", "1/2")[0] == 143
    run_successfully(capsys, source, out, *PLAIN, "--part", "2/2")
    with record_encoded(monkeypatch) as names:
        _, err = run_successfully(capsys, source, out, *[f for f in PLAIN if f != "-q"], "--part", "1/2")
    assert "resuming after 2 of" in err and NAMES[1] not in names and names
    for resumed, same in zip(part_paths(out, 2), part_paths(tmp_path / "same.gguf", 2), strict=True):
        assert resumed.read_bytes() == same.read_bytes()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--part", "0/5"), ("--part", "'0/5'", "I/N")),
        (("--part", "6/5"), ("--part", "'6/5'")),
        (("--part", "1/10"), ("10 parts", "9 tensors")),
        (("--part", "1/5", "--type", "ditto3"), ("--part", "ditto3")),
        (("--part", "1/5", "--split-max-size", "1G"), ("--split-max-size", "--part")),
        (("--part", "1/5", "--model-card", "card.md"), ("--model-card", "--part")),
    ],
)
def test_what_does_not_go_with_parts(lib, source, tmp_path, capsys, flags, parts):
    run_failing(capsys, source, tmp_path / "out.gguf", *PLAIN, *flags, parts=parts)
    assert {p.name for p in tmp_path.iterdir()} == {"in.gguf"}


def test_parts_need_one_calibration(lib, source, tmp_path, capsys):
    flags = ("--type", "itq3_t", "--part", "1/5")
    run_failing(capsys, source, tmp_path / "out.gguf", *flags, parts=("--part: all parts need the same calibration", "--imatrix"))
    run_failing(capsys, source, tmp_path / "out.gguf", *flags, "--propagate", parts=("--part and --propagate", "one machine"))


def test_existing_part_is_not_replaced(lib, source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    run_successfully(capsys, source, out, *PLAIN, "--part", "1/5")
    before = part_paths(out)[0].read_bytes()
    run_failing(capsys, source, out, *PLAIN, "--part", "1/5", parts=("out-00001-of-00005.gguf exists", "--force"))
    assert {p.name for p in tmp_path.iterdir()} == {"in.gguf", "out-00001-of-00005.gguf"}
    run_successfully(capsys, source, out, *PLAIN, "--part", "1/5", "--force")
    assert part_paths(out)[0].read_bytes() == before


def test_dry_run_names_the_tensors(lib, source, tmp_path, capsys):
    out, _ = run_successfully(capsys, source, tmp_path / "out.gguf", *PLAIN[:-1], "--part", "2/5", "--dry-run")
    line = next(line for line in out.splitlines() if line.startswith("part 2 of 5: "))
    assert "out-00002-of-00005.gguf, tensors 3 to " in line and f"of 9 ({NAMES[2]} to " in line
    assert {p.name for p in tmp_path.iterdir()} == {"in.gguf"}


def test_parts_of_a_target_share_its_measurements(fresh):
    """The second run starts while the first measures: it waits, and measures nothing."""
    flags = (fresh.model, fresh.out, "--target-bpw", "4", "--sensitivity", "usual", "-t", "1")
    runs = [subprocess.Popen(quantize_command(*flags, "--part", f"{i}/2"), stderr=subprocess.PIPE, text=True) for i in (1, 2)]
    logs = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], logs
    assert sorted("reusing cached errors" in log for log in logs) == [False, True]
    tensors, _ = read_model(part_paths(fresh.out, 2)[0])
    fresh.run("--target-bpw", "4", "--sensitivity", "usual")
    assert tensors == read_model(fresh.out)[0]
    assert json.loads(fresh.cache.read_text())["errors"]


@pytest.mark.slow
def test_programs_of_llama_cpp_take_the_parts(lib, model, tmp_path, capsys):
    out, flags = tmp_path / "out.gguf", ("--type", "itq3_t", "--no-calibration", "-q")
    run_successfully(capsys, model, tmp_path / "one.gguf", *flags)
    write_parts(capsys, model, out, *flags)

    def output(*command):
        return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True, timeout=120, stdin=subprocess.DEVNULL).stdout

    generate = ("-p", "Once upon a time", "-n", 8, "--temp", 0, "-t", 2)
    texts = [output(tool("llama-completion"), "-m", path, *generate, "-no-cnv") for path in (part_paths(out)[0], tmp_path / "one.gguf")]
    assert texts[0] == texts[1] and len(texts[0]) > len("Once upon a time")
    output(tool("llama-cli"), "-m", part_paths(out)[0], *generate, "--single-turn")
    output(tool("llama-gguf-split"), "--merge", part_paths(out)[0], tmp_path / "merged.gguf")
    assert read_model(tmp_path / "merged.gguf")[0] == read_model(tmp_path / "one.gguf")[0]
