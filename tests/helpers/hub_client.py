"""The quantizer with --hf-repo against a local hub."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gguf
import pytest

from helpers.commands import run_quantize
from helpers.errors import check_error, files

REPO = "some-org/Some-Model"
# transformers 4 needs a client 0.x, transformers 5 a newer one; the extra accepts both.
IS_OLD = metadata.version("huggingface-hub").startswith("0.")


def install_other_version(folder: Path, requirement: str) -> Path:
    """Install a package into a directory of its own, for a version other than the environment's, and return the directory."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot install {requirement}: {' / '.join(done.stderr.splitlines()[-2:])}")
    return folder


class Client:
    """The quantizer as a process that uses the local hub and its own cache. packages: a directory to import from first, or None."""

    def __init__(self, hub, folder, packages=None):
        self.hub, self.folder, self.cache, self.packages = hub, folder, folder / "cache", packages
        self.is_old = IS_OLD is (packages is None)
        self.out = folder / "results" / "out.gguf"
        self.out.parent.mkdir()

    def run(self, *flags, repo=REPO, **env):
        self.hub.downloads.clear()
        return run_quantize("--hf-repo", repo, self.out, "--type", "itq3_s", *flags, env=self.environment(**env))

    def environment(self, **env) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        if self.packages:
            inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.packages), os.environ.get("PYTHONPATH")]))
        return inherited | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.cache)} | env

    def succeed(self, *flags, **env):
        done = self.run(*flags, **env)
        assert done.returncode == 0, done.stderr
        return done

    def error(self, *parts, flags=(), **kwargs):
        """Check for one error line after the notes, no output, and no incomplete file in the cache."""
        before, done = files(self.out.parent), self.run("-q", *flags, **kwargs)
        check_error(done, *parts)
        assert files(self.out.parent) == before and not done.stdout
        return done

    def weights(self):
        return [t.data.tobytes() for t in gguf.GGUFReader(self.out).tensors]

    def cached(self, name: str) -> Path:
        (path,) = self.cache.rglob(f"snapshots/*/{name}")
        return path

    def blobs(self):
        return [p for p in self.cache.rglob("blobs/*") if p.is_file()]
