"""An option is defined once, as a field: its flag, keyword, command line, record and row of the page follow."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import options_doc
from ggml_ext._base.errors import UserError
from ggml_ext._base.option import check_keywords, command_line, describe_record, list_options, option
from ggml_ext._commands.benching import BenchOptions
from ggml_ext._commands.options import QuantizeOptions, TypeOptions
from ggml_ext._commands.uploading import UploadOptions
from ggml_ext._console.arguments import build_parser, from_namespace
from ggml_ext._console.cli import Parser

COMMANDS = [*options_doc.FUNCTIONS.values(), BenchOptions, UploadOptions]


@dataclass(frozen=True, kw_only=True)
class Section:
    level: int = option(1, choices=(1, 2, 3), record=2, record_for=["itq3_s"], help="a level")
    path: Path | None = option(None, flag="--read-from", metavar="FILE", help="a file")
    threshold: float | None = option(None, metavar="X", record=1, help="a number")
    derived: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    input: Path = option(is_positional=True, metavar="IN", help="the model")
    names: Sequence[str] = option((), flag="--name", short="-n", metavar="NAME", record=3, help="a name | words, 50%")
    is_on: bool | None = option(None, help="on or off")
    section: Section = field(default_factory=Section)
    secret: str | None = option(None, in_command=False, help="a secret")
    chunks: int | None = option(None, metavar="N", minimum=2, help="chunks")


def parse(kind, *words):
    return from_namespace(kind, build_parser("test", kind).parse_args(words))


def test_a_new_field_is_all_that_a_new_option_needs(capsys):
    new = option(False, record=90, help="round to even numbers")
    section = dataclasses.make_dataclass("TypeOptions", [("round_even", bool, new)], bases=(TypeOptions,), frozen=True, kw_only=True)
    kind = dataclasses.make_dataclass(
        "QuantizeOptions", [("types", section, field(default_factory=section))], bases=(QuantizeOptions,), frozen=True, kw_only=True
    )
    options = parse(kind, "in.gguf", "out.gguf", "--type", "itq3_t", "--round-even")
    assert options.types.round_even and options == check_keywords(kind, {"input": "in.gguf", "output": "out.gguf", "type": "itq3_t", "round_even": True})
    with pytest.raises(TypeError, match="round_even: got 1, must be True or False"):
        check_keywords(kind, {"round_even": 1})
    with pytest.raises(TypeError, match="'round_even' is no option"):
        check_keywords(QuantizeOptions, {"round_even": True})
    assert command_line(["quantize"], options) == "quantize in.gguf out.gguf --type itq3_t --round-even"
    assert describe_record(options, ["itq3_t"]) == "effort=normal round-even"
    page = options_doc.section(build_parser("quantize", kind), set())
    assert "\n| `--round-even` | round to even numbers |\n" in page
    with pytest.raises(SystemExit):
        build_parser("quantize", kind).parse_args(["--help"])
    assert "--round-even          round to even numbers" in capsys.readouterr().out
    assert "    round_even: bool\n" in options_doc.keywords({options_doc.api.quantize_model: kind})


def test_flags_and_keywords_are_the_same():
    words = ["in.gguf", "-n", "a", "--name", "b", "--no-is-on", "--level", "2", "--read-from", "f.txt", "--threshold", "1.5", "--chunks", "2"]
    options = parse(Options, *words)
    assert options.section == Section(level=2, path=Path("f.txt"), threshold=1.5)
    assert options == Options(input=Path("in.gguf"), names=("a", "b"), is_on=False, section=options.section, chunks=2)
    keywords = {"input": "in.gguf", "name": ["a", "b"], "is_on": False, "level": 2, "read_from": "f.txt", "threshold": 1.5, "chunks": 2}
    assert check_keywords(Options, keywords) == options
    assert check_keywords(Options, {"input": "in.gguf", "name": "a"}) == parse(Options, "in.gguf", "-n", "a")
    assert {o.keyword for o in list_options(Options)} == {*keywords, "secret"}


@pytest.mark.parametrize(("words", "keywords", "message"), [
    (["--level", "4"], {"level": 4}, "--level: got 4, must be 1, 2, 3"), (["--chunks", "1"], {"chunks": 1}, "--chunks: got 1, must be at least 2"),
])
def test_bad_values(words, keywords, message):
    for make in (lambda: parse(Options, "in.gguf", *words), lambda: check_keywords(Options, {"input": "in.gguf", **keywords})):
        with pytest.raises(UserError, match=message):
            make()


@pytest.mark.parametrize(("keywords", "message"), [
    ({"derived": 1}, "'derived' is no option"), ({"level": None}, "level: got None, must be an integer$"),
    ({"level": True}, "level: got True"), ({"read_from": 3}, "read_from: got 3, must be a path or None"), ({"name": [None]}, "name: got None, must be a text"),
])
def test_bad_keywords(keywords, message):
    with pytest.raises(TypeError, match=message):
        check_keywords(Options, {"input": "in.gguf", **keywords})


def test_command_line_and_record():
    options = Options(
        input=Path("/a/-in.gguf"), names=["a b", "c"], is_on=True, secret="s", section=Section(level=2, path=Path("/b/f.txt"), threshold=2.0)
    )
    assert command_line(["run"], options) == "run ./-in.gguf --name 'a b' --name c --is-on --level 2 --read-from f.txt --threshold 2.0"
    assert command_line(["run"], Options(input=Path("x"))) == "run x"
    assert describe_record(options, ["q8_0"]) == "threshold=2 name=a b name=c"
    assert describe_record(Options(input=Path("x")), ["itq3_s", "q8_0"]) == "level=1"


def test_the_page_and_the_parser_take_every_character():
    assert "| `-n`, `--name` `NAME` | a name \\| words, 50% |" in options_doc.section(build_parser("test", Options), set())
    assert "a name | words, 50%" in build_parser("test", Options).format_help()


@pytest.mark.parametrize("kind", COMMANDS)
def test_options_are_stated_well(kind):
    """Help of at most two lines, names that do not clash."""
    options = list(list_options(kind))
    keywords = [o.keyword for o in options]
    assert len(set(keywords)) == len(keywords)
    for o in options:
        assert len(o.help) <= 120 and not o.help.endswith(".") and o.help[0] != " ", o.help
        assert not o.choices or o.default is None or o.default in o.choices
    records = [o.record for o in options if o.record]
    assert len(set(records)) == len(records)


def test_choices_and_defaults_reach_the_parser():
    actions = {action.dest: action for action in build_parser("bench", BenchOptions)._actions}
    assert actions["rounds"].default == 5 and actions["models"].nargs == "+" and actions["n_gpu_layers"].option_strings == ["-ngl", "--n-gpu-layers"]
    assert {action.dest: action for action in build_parser("q", QuantizeOptions)._actions}["importance"].metavar == "{none,diagonal,block,full}"
    assert isinstance(build_parser("bench", BenchOptions), Parser)


def test_the_generated_files_are_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["options_doc.py", "--check"])
    assert options_doc.main() == 0, capsys.readouterr().err
