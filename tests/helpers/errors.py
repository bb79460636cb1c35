"""What a refused input looks like: one line, exit code 1, no file."""

from __future__ import annotations

import shutil
import struct
import subprocess

from helpers.commands import run_quantize


def files(folder):
    """Names and contents, to show that nothing changed."""
    return {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()}


def check_error(result, *parts, code=1):
    """One error line that holds all parts, and no traceback."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), result.stderr
    assert "unexpected" not in errors[0]
    for part in parts:
        assert part in errors[0], errors[0]


def expect_error(folder, args, *parts):
    """Runs the quantizer, which has to fail that way and leave the folder as it was."""
    before = files(folder)
    check_error(run_quantize(*args), *parts)
    assert files(folder) == before


def quantize_error(folder, source, *parts, flags=()):
    expect_error(folder, [source, folder / "out.gguf", *([] if "--type" in flags else ["--type", "itq3_s"]), *flags], *parts)


def raw_gguf(path, kv=b"", n_kv=0, tensors=(), data=4096):
    """A header made by hand. tensors: (name, dimensions, type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_kv) + kv
    for name, ne, qtype, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, qtype, offset)
    path.write_bytes(out + bytes(data))
    return path


def key(name, vtype, payload=b""):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", vtype) + payload


def fill_disk(monkeypatch, free: int) -> None:
    """All drives seem to have so many bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - free, free))


def own_mount_namespace():
    """The command prefix for a shell that may mount, or None where the system allows none."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None:
        return None
    probe = subprocess.run([*prefix, "mount -t tmpfs -o size=64k tmpfs /mnt"], capture_output=True)
    return prefix if probe.returncode == 0 else None
