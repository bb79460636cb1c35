"""The picture of errors by layer and class of tensor."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ._encoding import utf8
from ._errors import UserError
from ._output import written_beside

ENDINGS = (".svg", ".png")


def check_picture(path: Path, force: bool, sources: Sequence[Path]) -> None:
    """UserError if it cannot be drawn or may not be written. sources: what is read."""
    try:
        is_there = path.exists()
    except OSError as e:  # of a name that is too long
        raise UserError(f"--picture: {path}: {e.strerror}: name another") from e
    if is_there and any(source.exists() and path.samefile(source) for source in sources):
        raise UserError(f"--picture: {path} is a file that is read: name another")
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"--picture: got {path.name!r}, the name must end in {' or '.join(ENDINGS)}")
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise UserError(f"--picture: the folder {folder} does not exist: create it first")
    if is_there and not path.is_file():
        raise UserError(f"--picture: {path} is not a regular file: name another")
    if is_there and not force:
        raise UserError(f"--picture: {path} exists: name another file or pass --force to replace it")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--picture: the folder {folder} may not be written: name another")
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UserError(f"--picture needs matplotlib, which is not installed ({e}): pip install 'ggml-ext[picture]'") from e


def place(name: str) -> tuple[str, int | None]:
    """Class and layer of a tensor: ("attn_q", 3) of blk.3.attn_q.weight, ("output", None) of output.weight."""
    found = re.fullmatch(r"(.*?)blk\.(\d+)\.(.+)", name)
    prefix, layer, rest = found.groups() if found else ("", None, name)
    return prefix + rest.removesuffix(".weight"), None if layer is None else int(layer)


def table(errors: dict[str, float]) -> tuple[list[str], list[int | None], np.ndarray]:
    """Classes, in the order of their first tensor, layers, None first if there is one, and the errors of each, NaN for none."""
    places = {name: place(name) for name in errors}
    classes = list(dict.fromkeys(c for c, _ in places.values()))
    layers = sorted({layer for _, layer in places.values()}, key=lambda layer: -1 if layer is None else layer)
    values = np.full((len(classes), len(layers)), np.nan)
    for name, (of_class, layer) in places.items():
        values[classes.index(of_class), layers.index(layer)] = errors[name]
    return classes, layers, values


def colour_range(shown: np.ma.MaskedArray, layers: list[int | None]) -> tuple[float, float]:
    """Errors of the darkest and the lightest colour: of the layers, since embeddings and output have types of other sizes.

    At least a factor of 1.25 lies between them, so that errors which are the same look the same.
    """
    of_layers = shown[:, [i for i, layer in enumerate(layers) if layer is not None]]
    counted = of_layers if of_layers.count() else shown
    if not counted.count():
        return 0.1, 1.0
    low, high = float(counted.min()), float(counted.max())
    return low, max(high, 1.25 * low)


def draw(errors: dict[str, float], what: str, title: str, path: Path, force: bool) -> None:
    """Classes down, layers across, colours for the errors. errors: by tensor, at least one. what: kind of error.

    UserError if the file cannot be written, or, without force, exists by now.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    classes, layers, values = table(errors)
    shown = np.ma.masked_where(~(values > 0), values)  # as a logarithmic scale has no zero
    low, high = colour_range(shown, layers)
    style = {"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.family": "sans-serif", "font.size": 9,
             "text.parse_math": False}  # names of files and tensors may hold dollars
    with matplotlib.rc_context(style):
        size = 3 + 0.22 * len(layers), 1.6 + 0.25 * len(classes)
        figure, axes = pyplot.subplots(figsize=tuple(min(s, 40) for s in size), layout="constrained")
        mesh = axes.pcolormesh(
            np.arange(len(layers) + 1), np.arange(len(classes) + 1), shown, cmap="viridis",
            norm=LogNorm(low, high), edgecolors="white", linewidth=0.5,
        )
        step = max(1, len(layers) // 20)
        at = [i for i, layer in enumerate(layers) if layer is None or layer % step == 0]
        axes.set_xticks([i + 0.5 for i in at], ["none" if layers[i] is None else str(layers[i]) for i in at])
        axes.set_yticks([i + 0.5 for i in range(len(classes))], classes)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="layer", title=utf8(title))
        figure.colorbar(mesh, ax=axes, label=what, extend="both")
        try:
            kind = path.suffix[1:].lower()
            with written_beside(Path(os.path.realpath(path)), force) as part:
                figure.savefig(part, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        except FileExistsError as e:
            raise UserError(f"--picture: {path} appeared meanwhile, and was left as it is: name another file or pass --force") from e
        except OSError as e:
            raise UserError(f"--picture: cannot write {path}: {e.strerror}") from e
        finally:
            pyplot.close(figure)
