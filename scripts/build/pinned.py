"""Fetch archives from the Python package registry, pinned by version and SHA-256. Needs only the standard library and pip.

A pin is a table with package, version, sha256 and archive (the file's name). Archives are cached in GGML_EXT_CACHE_DIR (default: the
user's cache directory).
"""
from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class Failure(Exception):
    """An error in one line, for the user."""


def run_script(run: Callable[[], int | None]) -> int:
    """Run a script and return its exit code: run()'s, or 0 for None; 1, after one line, on Failure or OSError."""
    try:
        return run() or 0
    except (Failure, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def cache_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ggml-ext"
    return Path(os.environ.get("GGML_EXT_CACHE_DIR") or default)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        for chunk in iter(lambda: f.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(pin: dict, hint: str = "") -> Path:
    """Return a pin's archive, after downloading it with pip if necessary. hint: what else the user can do."""
    archive = cache_dir() / pin["archive"]
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as tmp:
            # with hashes, because pip runs the build script of a source distribution
            requirements = Path(tmp) / "requirements.txt"
            requirements.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n")
            kind = "--only-binary" if archive.suffix == ".whl" else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
                       kind, pin["package"], "--require-hashes", "--dest", tmp, "-r", str(requirements)]
            # inside an isolated build these would hide the build's packages from pip
            env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_BUILD_TRACKER")}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            fetched = Path(tmp) / pin["archive"]
            if done.returncode or not fetched.exists():
                reason = (done.stderr.strip() or "pip downloaded nothing").splitlines()[-1].strip()
                if "DO NOT MATCH THE HASHES" in done.stderr:
                    reason = f"the registry's file has another SHA-256 than {pin['sha256']}"
                elif broken := re.search(r"after connection broken by '(\w+)", done.stderr):  # pip's last line would blame a missing package
                    reason = f"no connection to the package registry ({broken[1]})"
                raise Failure(f"cannot fetch {pin['package']} {pin['version']}: {reason}; "
                              f"put {pin['archive']} into {archive.parent}{hint and f', or {hint}'}")
            os.replace(fetched, archive)
    digest = sha256(archive)
    if digest != pin["sha256"]:
        raise Failure(f"{archive}: SHA-256 is {digest}, needed {pin['sha256']}; remove the file and try again")
    return archive
