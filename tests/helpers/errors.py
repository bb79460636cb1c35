"""Checks of refused input: one line, exit code 1, no file."""

from __future__ import annotations

import shutil
import struct
import subprocess

from helpers.commands import run_quantize


def files(directory):
    """Return names and contents, to compare before and after."""
    return {p.name: p.read_bytes() if p.is_file() else None for p in directory.iterdir()}


def check_error(result, *parts, code=1):
    """Check for one error line that has all parts, and no traceback."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), result.stderr
    assert "unexpected" not in errors[0]
    for part in parts:
        assert part in errors[0], errors[0]


def expect_error(directory, args, *parts):
    """Run the quantizer, which must fail with one line and leave the directory unchanged."""
    before = files(directory)
    check_error(run_quantize(*args), *parts)
    assert files(directory) == before


def quantize_error(directory, source, *parts, flags=()):
    expect_error(directory, [source, directory / "out.gguf", *([] if "--type" in flags else ["--type", "itq3_s"]), *flags], *parts)


def raw_gguf(path, kv=b"", n_kv=0, tensors=(), data=4096):
    """Write a header by hand. tensors: (name, dimensions, type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_kv) + kv
    for name, ne, qtype, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, qtype, offset)
    path.write_bytes(out + bytes(data))
    return path


def key(name, vtype, payload=b""):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", vtype) + payload


def fill_disk(monkeypatch, free: int) -> None:
    """Let every drive report this number of free bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - free, free))


def mount_namespace_prefix():
    """Return the command prefix of a shell that may mount, or None if the system allows none."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None:
        return None
    probe = subprocess.run([*prefix, "mount -t tmpfs -o size=64k tmpfs /mnt"], capture_output=True)
    return prefix if probe.returncode == 0 else None
