"""Hugging Face checkpoints: a directory with config.json, safetensors and a tokenizer, converted by llama.cpp's convert_hf_to_gguf.py,
which the package contains with its modules (directory convert)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from .._base.console import Console
from .._base.encoding import to_file_name, to_utf8
from .._base.errors import UserError
from .._base.files import check_free_space, identify_file, move_into_place, temporary_directory
from .._base.package import PACKAGE_DIR, install_command
from .._base.units import MIB
from .._formats.gguf_file import GGUFFile
from .._formats.split import open_model
from .._native.process import describe_failure, run_streamed
from .converted_file import KEPT_BYTES, start_converter

CONVERTER = PACKAGE_DIR / "convert" / "convert_hf_to_gguf.py"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
TEMPORARY = ".converted-"
# modules of the extra hf that the converter imports
NEEDED = ("torch", "transformers", "sentencepiece", "safetensors")
PICKLED = ".bin"
FORMATS = (("model", ".safetensors"), ("pytorch_model", PICKLED))
SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.\w+)")
BYTES_PER_WEIGHT = 2  # F16 or BF16; only vectors become F32
AS_STORED = "auto"  # --outtype: BF16 or F16
MIN_BITS = 8  # weights with fewer bits count as quantized, as in GGUF files
MAX_HEADER = 100_000_000  # limit of the safetensors library


def require_extra(modules: tuple[str, ...], user: str, extra: str = "hf") -> None:
    """Raise UserError if a module of an extra is not installed. user: what needs the modules."""
    if missing := [m for m in modules if importlib.util.find_spec(m) is None]:
        names = f"{missing[0]}, which is" if len(missing) == 1 else f"{', '.join(missing)}, which are"
        raise UserError(f"{user} needs {names} not installed: {install_command(extra, missing)}")


def index_name(weights: tuple[str, str]) -> str:
    return f"{''.join(weights)}.index.json"


def indexed_files(index: Path) -> list[str]:
    """Return the file names in an index of shards. UserError if it is invalid."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except OSError as e:
        raise UserError(f"cannot read {index}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{index} is not an index of shards, its weight_map is missing or invalid: download it again") from e
    if bad := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
        raise UserError(f"{index}: weight_map names {bad[0]!r}, which is not in the same directory: download it again")
    return sorted(names)


def shards_by_name(names: list[str]) -> list[str]:
    """Return the names, completed by those of missing shards."""
    all_names = set(names)
    for name in names:
        if match := SHARD.fullmatch(name):
            all_names |= {f"{match[1]}{i + 1:05}-of-{match[3]}{match[4]}" for i in range(int(match[3]))}
    return sorted(all_names)


def weight_files(directory: Path) -> list[Path]:
    """Return the files with weights, in the converter's order of preference. UserError if there are none, or one is missing."""
    for weights in FORMATS:
        index = directory / index_name(weights)
        by_index = index.is_file()
        names = indexed_files(index) if by_index else shards_by_name([p.name for p in directory.glob("*".join(weights))])
        if missing := [n for n in names if not (directory / n).is_file()]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            named_by = f"that {index.name} names" if by_index else "with weights"
            raise UserError(f"{directory} lacks {missing[0]}{more}, of {len(names)} files {named_by}: download the checkpoint again")
        if names:
            return [directory / n for n in names]
    check_adapter(directory)
    raise UserError(f"{directory} has a {CONFIG} and no model*.safetensors: pass the directory of a complete checkpoint, or a GGUF file")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. UserError if the file holds none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: download it again")
    return content


def check_adapter(directory: Path) -> None:
    """Raise UserError for a directory with an adapter instead of a model."""
    if (directory / ADAPTER).is_file():
        base = read_object(directory / ADAPTER).get("base_model_name_or_path") or "its base model"
        raise UserError(f"{directory} {only_an_adapter(base)}")


def only_an_adapter(base: str) -> str:
    """Return the message for an adapter of the model `base`."""
    return (
        f"has only an adapter: quantize {base} and pass the adapter to llama-server with --lora, or merge the two with merge_and_unload() of "
        "peft and pass the resulting directory"
    )


def check_bits(config: Path, name: object, allow_requantize: bool) -> None:
    """Raise UserError for a checkpoint with weights in fewer than 8 bits, which the converter would expand to 16 bits.

    config: its config.json. name: the user's name for it.
    """
    content = read_object(config)
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]  # text_config of multimodal models
    quantization = next((q for part in parts if isinstance(q := part.get("quantization_config"), dict)), {})
    bits = stored_bits(quantization)
    if bits is not None and bits < MIN_BITS and not allow_requantize:
        raise UserError(
            f"{name} is already quantized to {bits} bits ({quantization.get('quant_method', 'quantization_config')}, says its {CONFIG}); quantizing it again loses more: "
            "start from the original checkpoint, or pass --allow-requantize"
        )


def stored_bits(quantization: dict[str, Any]) -> int | None:
    """Return the bits of the least accurate weights from a quantization_config.

    None if it does not say, and for 4-bit floats (nvfp4), which the GGUF file keeps.
    """
    method, groups = quantization.get("quant_method"), quantization.get("config_groups")
    if method == "bitnet":
        return 2
    if method == "bitsandbytes":
        return 4 if quantization.get("load_in_4bit") else 8
    if method == "compressed-tensors" and isinstance(groups, dict):
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict) and "nvfp4" not in str(g.get("format", quantization.get("format")))]
        bits = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    else:
        bits = [quantization.get("bits", quantization.get("w_bit"))]
    return min((n for n in bits if isinstance(n, int)), default=None)


def count_weights(path: Path) -> int:
    """Return the number of elements in a safetensors file. UserError if it is damaged."""
    hint = "download it again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(8)
            n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
            if n_header > min(MAX_HEADER, size - 8):
                raise UserError(f"{path} is not a safetensors file, or its header is truncated: {hint}")
            infos = [info for name, info in json.loads(f.read(n_header)).items() if name != "__metadata__"]
        end = 8 + n_header + max((info["data_offsets"][1] for info in infos), default=0)
        n = sum(prod(info["shape"]) for info in infos)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise UserError(f"{path}: the safetensors header is damaged: {hint}") from e
    if size < end:
        raise UserError(f"{path}: truncated: its tensors end at byte {end:,}, the file has {size:,}; {hint}")
    return n


def check_pickled(path: Path) -> None:
    """Raise UserError unless a pickled file is an archive, the format since PyTorch 1.6 and the only one that the converter reads."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not an archive of PyTorch 1.6 or newer, or is truncated: download it again, or pass a checkpoint with safetensors")


def check_checkpoint(directory: Path) -> list[Path]:
    """Return a checkpoint's files with weights. UserError if the checkpoint is incomplete or cannot be converted."""
    try:
        if not (directory / CONFIG).is_file():
            check_adapter(directory)
            models = sorted(p.name for p in directory.glob("*.gguf"))
            instead = f"one of its files, such as {directory / models[0]}" if models else "a GGUF file or the directory of a checkpoint"
            raise UserError(f"{directory} has no {CONFIG}, so it is not a Hugging Face checkpoint: pass {instead}")
        files = weight_files(directory)
        for path in files:
            if path.suffix == PICKLED:
                check_pickled(path)
    except OSError as e:
        raise UserError(f"cannot read {directory}: {e.strerror}") from e
    if not CONVERTER.is_file():
        raise UserError(f"{directory} is a checkpoint, and {CONVERTER} is missing: reinstall ggml-ext, or pass a GGUF file")
    require_extra(NEEDED, f"{directory} is a checkpoint: converting it")
    return files


def identify_checkpoint(directory: Path) -> dict[str, Any]:
    """Return what identifies the tensors of a checkpoint, for JSON: the files that the converter reads them from.

    Other files determine metadata only. UserError as in check_checkpoint().
    """
    paths = [directory / CONFIG, *check_checkpoint(directory)]
    try:
        return {p.name: identify_file(p) for p in paths}
    except OSError as e:
        raise UserError(f"cannot read {directory}: {e.strerror}") from e


def converted_size(directory: Path, files: list[Path], outtype: str = AS_STORED) -> int:
    """Estimate the size of the GGUF file: 16 bits per weight (pickled files are assumed to have these) or 32, and the tokenizer."""
    weights = sum(BYTES_PER_WEIGHT * count_weights(p) if p.suffix == ".safetensors" else p.stat().st_size for p in files)
    others = sum(p.stat().st_size for p in directory.iterdir() if p.is_file() and p.suffix in (".json", ".model", ".txt"))
    return (weights + weights // 500) * (2 if outtype == "f32" else 1) + others


@contextlib.contextmanager
def convert_checkpoint(
    directory: Path, name: str, parent: Path, kept: Path | None, console: Console, outtype: str = AS_STORED, allow_requantize: bool = False
) -> Iterator[GGUFFile]:
    """Convert a checkpoint and yield its GGUF file. With `kept`, the complete file is moved there; else tensors are converted when they are read.

    Args:
        directory: the checkpoint.
        name: the model's name, and that of the file.
        parent: directory for the temporary file.
        kept: path at which the file is kept.
        console: for notes and the progress bar.
        outtype: the converter's --outtype.
        allow_requantize: accept quantized weights.

    Raises:
        UserError: there is no space, or the converter fails.
    """
    files = check_checkpoint(directory)
    check_bits(directory / CONFIG, directory, allow_requantize)
    parent = parent if kept is None else kept.parent
    size = converted_size(directory, files, outtype)
    is_served = kept is None and os.name == "posix"  # elsewhere a file cannot be removed while it is open
    needed = min(size, KEPT_BYTES) if is_served else size
    check_free_space(parent, needed, f"the GGUF file of {directory}", "", "name an OUT or a --keep-gguf FILE on another disk")
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_directory(parent, TEMPORARY, console.note))
            path = temporary / f"{to_file_name(to_utf8(name))}.gguf"  # the converter takes the model's name from it
            command, env = _command(directory, path, outtype)
            if is_served:
                console.note(f"converting {directory} tensor by tensor, about {size / MIB:,.0f} MiB; --keep-gguf FILE keeps them as a GGUF file")
                sources = {p.name: p for p in (directory / CONFIG, *files)}
                file = stack.enter_context(start_converter(command, path, env, sources, partial(_explain, directory), console=console))
            else:
                fate = "removed afterwards; --keep-gguf FILE keeps it" if kept is None else f"kept as {kept}"
                console.note(f"converting {directory} to a GGUF file, about {size / MIB:,.0f} MiB in {temporary}, {fate}")
                _convert(directory, path, command, env, size, console)
                if kept is not None:
                    move_into_place(path, kept, force=False)
                file = open_model(kept or path)
        except FileExistsError as e:
            raise UserError(f"--keep-gguf: {kept} appeared during the conversion and was not overwritten: name another file") from e
        except OSError as e:
            raise UserError(f"cannot convert {directory} in {parent}: {e.strerror or e}; write OUT to another directory") from e
        yield file


def _command(directory: Path, path: Path, outtype: str) -> tuple[list[str], dict[str, str]]:
    """Return the converter's command without the interpreter, and its environment."""
    env = {k: v for k, v in os.environ.items() if k != "NO_LOCAL_GGUF"}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUTF8": "1"}  # files of checkpoints are UTF-8 in any locale
    source, named = Path(os.path.abspath(directory)), list[str]()
    if source.name != path.stem:  # the converter takes the model's name from the directory, a hash in the hub's cache
        try:
            path.with_suffix("").symlink_to(source)
            source = path.with_suffix("")
        except OSError:  # Windows allows links to administrators only
            named = ["--model-name", path.stem]
    return [str(CONVERTER), str(source), "--outfile", os.path.abspath(path), "--outtype", outtype, *named], env


def _convert(directory: Path, path: Path, command: list[str], env: dict[str, str], size: int, console: Console) -> None:
    """Run the converter. UserError with its last error if it fails."""
    with console.bar("converting", size, "B", is_scaled=True) as bar:

        def update(text: str) -> None:
            if percent := re.findall(r"Writing:\s+(\d+)%", text[-1000:]):
                bar.update(size * int(percent[-1]) // 100 - bar.n)

        code, log = run_streamed([sys.executable, *command], path.parent, update, env)
    if code or not path.is_file():
        raise _explain(directory, code, log)


def _explain(directory: Path, code: int, log: str) -> UserError:
    """Return the error of a converter that failed."""
    error = find_error(log)
    if "UnpicklingError" in error:
        return UserError(
            f"{directory} cannot be converted: its {FORMATS[1][0]}*{PICKLED} hold more than tensors, which could execute code: "
            "pass a checkpoint with safetensors, or a GGUF file of it"
        )
    hint = "free some space" if "No space left" in error else _newer_transformers(directory, error) or "pass a GGUF file of it"
    failure = describe_failure(CONVERTER.name, code, error.rstrip("."), hint=hint, less_memory=f"free some memory, or {hint}")
    return UserError(f"{directory} cannot be converted: {failure}")


def _newer_transformers(directory: Path, error: str) -> str:
    """Return the way out if the checkpoint needs a newer major version of transformers than the installed one, else an empty string."""
    saved, installed = read_object(directory / CONFIG).get("transformers_version"), metadata.version("transformers")
    major = re.match(r"\d+", saved) if isinstance(saved, str) else None
    is_newer = major is not None and int(major[0]) > int(installed.partition(".")[0])
    if not is_newer and not ("Tokenizer class" in error and "does not exist" in error):
        return ""
    return f"it needs a newer transformers than {installed}: pip install --upgrade transformers"


def find_error(log: str) -> str:
    """Return the converter's last line with an error, else its last line."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    error = re.compile(r"ERROR:[\w.-]+:(.*)|((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
    errors = [m[1] or m[2] for line in lines if (m := error.match(line))]
    return (errors or lines or ["no output"])[-1][:300]
