"""The package itself: where it lies and its version."""

from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parents[1]

try:
    __version__ = metadata.version("ggml-ext")
except metadata.PackageNotFoundError:  # the source tree on PYTHONPATH
    __version__ = "0+uninstalled"
