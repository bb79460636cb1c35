"""Checkpoints of Hugging Face's transformers: a folder with config.json, safetensors and a tokenizer, converted by llama.cpp's
own convert_hf_to_gguf.py, which lies in the package with the modules it needs (folder convert)."""

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
from importlib import metadata
from math import prod
from pathlib import Path

from .._base.console import Console
from .._base.encoding import to_file_name, to_utf8
from .._base.errors import UserError
from .._base.files import free_space, move_into_place, temporary_directory
from .._base.package import FOLDER, install_command
from .._base.units import MIB
from .._native.process import describe_failure, run_streamed

CONVERTER = FOLDER / "convert" / "convert_hf_to_gguf.py"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
TEMPORARY = ".converted-"
# What the converter imports, of the extra hf.
NEEDED = ("torch", "transformers", "sentencepiece", "safetensors")
PICKLED = ".bin"
FORMATS = (("model", ".safetensors"), ("pytorch_model", PICKLED))
SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.\w+)")
BYTES_A_WEIGHT = 2  # F16 or BF16; only vectors become F32
AS_STORED = "auto"  # of --outtype: BF16 or F16
MIN_BITS = 8  # below them weights count as quantized, as in GGUF files
MAX_HEADER = 100_000_000  # of a safetensors file, as its own library has it


def require_extra(modules: tuple[str, ...], what: str, extra: str = "hf") -> None:
    """UserError if a module of the extra is not installed. what: needs it."""
    if missing := [m for m in modules if importlib.util.find_spec(m) is None]:
        lacks = f"{missing[0]}, which is" if len(missing) == 1 else f"{', '.join(missing)}, which are"
        raise UserError(f"{what} needs {lacks} not installed: {install_command(extra, missing)}")


def index_name(weights: tuple[str, str]) -> str:
    return f"{''.join(weights)}.index.json"


def indexed_files(index: Path) -> list[str]:
    """Names of the files that an index of shards names. UserError if it is no such index."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except OSError as e:
        raise UserError(f"cannot read {index}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{index} is no index of shards, it has no sound weight_map: download it again") from e
    if bad := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
        raise UserError(f"{index}: weight_map names {bad[0]!r}, which is no file beside it: download it again")
    return sorted(names)


def shards_by_name(names: list[str]) -> list[str]:
    """The names and those of the shards between them that are not there."""
    all_names = set(names)
    for name in names:
        if found := SHARD.fullmatch(name):
            all_names |= {f"{found[1]}{i + 1:05}-of-{found[3]}{found[4]}" for i in range(int(found[3]))}
    return sorted(all_names)


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights, as the converter looks for them. UserError if there are none, or if one of them is missing."""
    for weights in FORMATS:
        index = folder / index_name(weights)
        by_index = index.is_file()
        names = indexed_files(index) if by_index else shards_by_name([p.name for p in folder.glob("*".join(weights))])
        if missing := [n for n in names if not (folder / n).is_file()]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            named_by = f"that {index.name} names" if by_index else "with weights"
            raise UserError(f"{folder} lacks {missing[0]}{more}, of {len(names)} files {named_by}: download the checkpoint again")
        if names:
            return [folder / n for n in names]
    check_adapter(folder)
    raise UserError(f"{folder} has a {CONFIG} and no model*.safetensors: pass the folder of a whole checkpoint, or a GGUF file")


def read_object(path: Path) -> dict:
    """UserError if it is no JSON object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object: download it again")
    return found


def check_adapter(folder: Path) -> None:
    """UserError for a folder that has an adapter in the place of a model."""
    if (folder / ADAPTER).is_file():
        base = read_object(folder / ADAPTER).get("base_model_name_or_path") or "the model that it was made for"
        raise UserError(f"{folder} {only_an_adapter(base)}")


def only_an_adapter(base: str) -> str:
    return (
        f"has only an adapter: quantize {base} and pass the adapter to llama-server with --lora, or merge the two with merge_and_unload() of "
        "peft and pass the folder of that"
    )


def check_bits(config: Path, name: object, allow_requantize: bool) -> None:
    """UserError for weights that the checkpoint holds in fewer than 8 bits, unless they may be quantized again: the converter makes 16
    bits of them. config: its config.json; name: what the user calls it."""
    found = read_object(config)
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]  # text_config of models with images
    quantization = next((q for part in parts if isinstance(q := part.get("quantization_config"), dict)), {})
    bits = stored_bits(quantization)
    if bits is not None and bits < MIN_BITS and not allow_requantize:
        raise UserError(
            f"{name} is already quantized to {bits} bits ({quantization.get('quant_method', 'quantization_config')}, says its {CONFIG}), which costs quality twice: "
            "start from the checkpoint that it was made from, or pass --allow-requantize"
        )


def stored_bits(quantization: dict) -> int | None:
    """Of the least accurate weights; None where it does not say, and for the 4-bit floats that stay what they are in the GGUF file.
    quantization: quantization_config, as the programs that make such checkpoints write it."""
    method, groups = quantization.get("quant_method"), quantization.get("config_groups")
    if method == "bitnet":
        return 2
    if method == "bitsandbytes":
        return 4 if quantization.get("load_in_4bit") else 8
    if method == "compressed-tensors" and isinstance(groups, dict):
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict) and "nvfp4" not in str(g.get("format", quantization.get("format")))]
        found = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    else:
        found = [quantization.get("bits", quantization.get("w_bit"))]
    return min((n for n in found if isinstance(n, int)), default=None)


def count_weights(path: Path) -> int:
    """Elements of all tensors of a safetensors file. UserError if it is not whole."""
    way_out = "download it again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(8)
            n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
            if n_header > min(MAX_HEADER, size - 8):
                raise UserError(f"{path} is no safetensors file, or was cut off within its header: {way_out}")
            infos = [info for name, info in json.loads(f.read(n_header)).items() if name != "__metadata__"]
        end = 8 + n_header + max((info["data_offsets"][1] for info in infos), default=0)
        n = sum(prod(info["shape"]) for info in infos)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise UserError(f"{path}: the header is not that of a safetensors file: {way_out}") from e
    if size < end:
        raise UserError(f"{path}: truncated: its tensors end at byte {end:,}, the file has {size:,}; {way_out}")
    return n


def check_pickled(path: Path) -> None:
    """UserError if a pickled file is not one that the converter reads: an archive, as PyTorch writes it since 1.6."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is no archive of PyTorch 1.6 or newer, or was cut off: download it again, or pass a checkpoint with safetensors")


def check_checkpoint(folder: Path) -> list[Path]:
    """The files with weights of a checkpoint. UserError if the folder holds none or not all of one, or if nothing converts it."""
    try:
        if not (folder / CONFIG).is_file():
            check_adapter(folder)
            models = sorted(p.name for p in folder.glob("*.gguf"))
            instead = f"one of its files, such as {folder / models[0]}" if models else "a GGUF file or the folder of a checkpoint"
            raise UserError(f"{folder} is a directory without {CONFIG}, no Hugging Face checkpoint: pass {instead}")
        files = weight_files(folder)
        for path in files:
            if path.suffix == PICKLED:
                check_pickled(path)
    except OSError as e:
        raise UserError(f"cannot read {folder}: {e.strerror}") from e
    if not CONVERTER.is_file():
        raise UserError(f"{folder} is a checkpoint, and {CONVERTER} is missing: reinstall ggml-ext, or pass a GGUF file")
    require_extra(NEEDED, f"{folder} is a checkpoint: converting it")
    return files


def converted_size(folder: Path, files: list[Path], outtype: str = AS_STORED) -> int:
    """Bytes of the GGUF file, about: 16 bits a weight (those of pickled files are taken to be so), or 32, and the tokenizer."""
    weights = sum(BYTES_A_WEIGHT * count_weights(p) if p.suffix == ".safetensors" else p.stat().st_size for p in files)
    others = sum(p.stat().st_size for p in folder.iterdir() if p.is_file() and p.suffix in (".json", ".model", ".txt"))
    return (weights + weights // 500) * (2 if outtype == "f32" else 1) + others


@contextlib.contextmanager
def convert_checkpoint(
    folder: Path, name: str, where: Path, kept: Path | None, console: Console, outtype: str = AS_STORED, allow_requantize: bool = False
) -> Iterator[Path]:
    """A checkpoint as a GGUF file, in outtype, under a name that does not change from run to run.

    It lies in a folder of its own in `where` and is removed at the end, or is moved to `kept` as soon as it is whole. UserError
    if there is no space for it or if the converter fails.
    """
    files = check_checkpoint(folder)
    check_bits(folder / CONFIG, folder, allow_requantize)
    where = where if kept is None else kept.parent
    size, free = converted_size(folder, files, outtype), free_space(where)
    fate = "removed afterwards; --keep-gguf FILE keeps it" if kept is None else f"kept as {kept}"
    if free < size:
        raise UserError(
            f"no space left on device: the GGUF file of {folder} takes about {size / MIB:,.0f} MiB, {where} has "
            f"{free / MIB:,.0f} MiB free; "
            "free some space, or name an OUT or a --keep-gguf FILE on another disk"
        )
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_directory(where, TEMPORARY, console.note))
            path = temporary / f"{to_file_name(to_utf8(name))}.gguf"  # the converter takes the model's name from it
            console.note(f"{folder} becomes a GGUF file first, about {size / MIB:,.0f} MiB in {temporary}, {fate}")
            _convert(folder, path, outtype, size, console)
            if kept is not None:
                move_into_place(path, kept, force=False)
        except FileExistsError as e:
            raise UserError(f"--keep-gguf: {kept} appeared while it was made, and was left as it is: name another file") from e
        except OSError as e:
            raise UserError(f"cannot convert {folder} in {where}: {e.strerror or e}; write OUT to another folder") from e
        yield kept or path


def _convert(folder: Path, path: Path, outtype: str, size: int, console: Console) -> None:
    """Runs the converter. UserError with its last error if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "NO_LOCAL_GGUF"}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUTF8": "1"}  # files of checkpoints are UTF-8 in any locale
    source = Path(os.path.abspath(folder))
    if source.name != path.stem:  # the converter takes the model's name from its folder, in the hub's cache a hash
        source = path.with_suffix("")
        source.symlink_to(os.path.abspath(folder))
    with console.bar("converting", size, "B", is_scaled=True) as bar:

        def heard(text: str) -> None:
            if percent := re.findall(r"Writing:\s+(\d+)%", text[-1000:]):
                bar.update(size * int(percent[-1]) // 100 - bar.n)

        command = [sys.executable, str(CONVERTER), str(source), "--outfile", os.path.abspath(path), "--outtype", outtype]
        code, log = run_streamed(command, path.parent, heard, env)
    if code or not path.is_file():
        said = find_error(log)
        if "UnpicklingError" in said:
            raise UserError(f"{folder} cannot be converted: its {FORMATS[1][0]}*{PICKLED} hold more than tensors, which could execute code: "
                            f"pass a checkpoint with safetensors, or a GGUF file of it")
        way_out = "free some space" if "No space left" in said else _newer_transformers(folder, said) or "pass a GGUF file of it"
        why = describe_failure(CONVERTER.name, code, said.rstrip("."), "", way_out, f"free some memory, or {way_out}")
        raise UserError(f"{folder} cannot be converted: {why}")


def _newer_transformers(folder: Path, said: str) -> str:
    """The way out where the checkpoint was saved by a newer major version than the one that is installed, else nothing."""
    saved, ours = read_object(folder / CONFIG).get("transformers_version"), metadata.version("transformers")
    is_newer = isinstance(saved, str) and int(re.match(r"\d*", saved)[0] or 0) > int(ours.partition(".")[0])
    if not is_newer and not ("Tokenizer class" in said and "does not exist" in said):
        return ""
    return f"it needs a newer transformers than {ours}: pip install --upgrade transformers"


def find_error(log: str) -> str:
    """What the converter says is wrong: its last line that is an error's, else its last."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    error = re.compile(r"ERROR:[\w.-]+:(.*)|((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
    errors = [m[1] or m[2] for line in lines if (m := error.match(line))]
    return (errors or lines or ["it said nothing"])[-1][:300]
