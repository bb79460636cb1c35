"""Draw errors by layer and class of tensor."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._base.encoding import to_utf8
from .._base.errors import UserError
from .._base.files import write_atomically
from .._base.package import install_command
from .._formats.reserved_paths import ReservedPaths, reserve_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")
CURVE = 1.2  # inches, height of the curve of the residual stream's errors


def check_picture(path: Path, force: bool, inputs: Mapping[Path, str]) -> None:
    """Raise UserError if a picture cannot be drawn or may not be written. inputs: of ReservedPaths."""
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"--picture: got {path.name!r}, the name must end in {' or '.join(ENDINGS)}")
    reserve_file("--picture", path, ReservedPaths(inputs), force)
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise UserError if matplotlib cannot be loaded."""
    try:
        with quiet_matplotlib():
            import matplotlib.figure  # noqa: F401
    except ImportError as e:
        install = install_command("picture", ["matplotlib"])
        raise UserError(f"--picture needs matplotlib, which is not installed ({e}): {install}") from e
    except Exception as e:  # an unknown MPLBACKEND, no writable directory
        raise UserError(f"--picture: matplotlib cannot be loaded: {' '.join(str(e).split())}; fix that, or drop --picture") from e


@contextlib.contextmanager
def quiet_matplotlib() -> Iterator[list[warnings.WarningMessage]]:
    """Silence matplotlib's log, and collect the warnings that Python would print."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        logger.setLevel(level)


def split_name(name: str) -> tuple[str, int | None]:
    """Return class and layer of a tensor: ("attn_q", 3) for blk.3.attn_q.weight, ("output", None) for output.weight."""
    match = re.fullmatch(r"(.*?)blk\.(\d+)\.(.+)", name)
    prefix, layer, rest = match.groups() if match else ("", None, name)
    return prefix + rest.removesuffix(".weight"), None if layer is None else int(layer)


def format_table(errors: dict[str, float]) -> tuple[list[str], list[int | None], np.ndarray]:
    """Return classes in the order of their first tensor, layers with None first, and the errors as a matrix, NaN where there is none."""
    places = {name: split_name(name) for name in errors}
    classes = list(dict.fromkeys(c for c, _ in places.values()))
    layers = sorted({layer for _, layer in places.values()}, key=lambda layer: -1 if layer is None else layer)
    values = np.full((len(classes), len(layers)), np.nan)
    for name, (tensor_class, layer) in places.items():
        values[classes.index(tensor_class), layers.index(layer)] = errors[name]
    return classes, layers, values


def colour_range(shown: np.ma.MaskedArray, layers: list[int | None]) -> tuple[float, float]:
    """Return the errors of the darkest and the lightest colour, from the layers alone: embeddings and output have larger types.

    The range spans a factor of at least 1.25, so that nearly equal errors look equal.
    """
    blocks = shown[:, [i for i, layer in enumerate(layers) if layer is not None]]
    scaled = blocks if blocks.count() else shown
    if not scaled.count():
        return 0.1, 1.0
    low, high = float(scaled.min()), float(scaled.max())
    return low, max(high, 1.25 * low)


def figure_size(classes: list[str], layers: list[int | None], title: str) -> tuple[float, float]:
    """Return width and height in inches, with space for labels and title."""
    width = max(3 + 0.22 * len(layers) + 0.08 * max(max(map(len, classes)) - 10, 0), 1 + 0.09 * len(title))
    return min(width, 40), min(1.6 + 0.25 * len(classes), 40)


def draw(errors: dict[str, float], what: str, title: str, path: Path, force: bool, stream_errors: Sequence[float] = ()) -> bool:
    """Draw errors as colours, with classes as rows and layers as columns, and below them a curve of the residual stream's errors.

    Args:
        errors: by tensor, at least one.
        what: label of the colour bar.
        title: of the picture.
        path: a .svg or .png file.
        force: replace the file if it exists.
        stream_errors: by layer; no curve if it is empty.

    Returns:
        False if the font of a .png lacks characters of the names. A .svg leaves fonts to the viewer.

    Raises:
        UserError: the file cannot be written or, without force, exists.
    """
    with quiet_matplotlib() as caught:
        _draw(errors, what, to_utf8(title), path, force, stream_errors=stream_errors)
    return path.suffix.lower() == ".svg" or not any("missing from font" in str(w.message) for w in caught)


def _draw(errors: dict[str, float], what: str, title: str, path: Path, force: bool, stream_errors: Sequence[float]) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    classes, layers, values = format_table(errors)
    shown = np.ma.masked_where(~(values > 0), values)  # zero has no logarithm
    low, high = colour_range(shown, layers)
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.family": "sans-serif", "font.size": 9,
             "text.parse_math": False}  # names may contain dollar signs
    with matplotlib.rc_context(style):
        width, height = figure_size(classes, layers, title)
        with_curve = any(stream_errors)
        figure = Figure(figsize=(width, height + CURVE * with_curve), layout="constrained")
        axes, below = figure.subplots(2, sharex=True, height_ratios=[height - 1, CURVE]) if with_curve else (figure.subplots(), None)
        mesh = axes.pcolormesh(
            np.arange(len(layers) + 1), np.arange(len(classes) + 1), shown, cmap="viridis",
            norm=LogNorm(low, high), edgecolors="white", linewidth=0.5,
        )
        step = max(1, len(layers) // 20)
        ticks = [i for i, layer in enumerate(layers) if layer is None or layer % step == 0]
        axes.set_xticks([i + 0.5 for i in ticks], ["none" if layers[i] is None else str(layers[i]) for i in ticks])
        axes.set_yticks([i + 0.5 for i in range(len(classes))], classes)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(title=title)
        (below or axes).set(xlabel="layer")
        if below:
            _draw_curve(below, layers, stream_errors)
        bar = figure.colorbar(mesh, ax=axes, label=what, extend="both")
        # the default formatters write formulas, which text.parse_math disables
        bar.ax.yaxis.set_major_formatter("{x:.3g}")
        bar.ax.yaxis.set_minor_formatter("{x:.3g}" if high < 10 * low else "")
        save_picture(figure, path, force)


def _draw_curve(axes: Axes, layers: list[int | None], stream_errors: Sequence[float]) -> None:
    """Draw each layer's error in the middle of its column."""
    known = [(i + 0.5, stream_errors[layer]) for i, layer in enumerate(layers) if layer is not None and layer < len(stream_errors)]
    known = [(x, error) for x, error in known if error > 0]
    axes.plot(*zip(*known) if known else ([], []), marker=".", color="tab:blue")
    axes.set(ylim=(0, None), ylabel="residual\nstream")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Figure, path: Path, force: bool) -> None:
    kind = path.suffix[1:].lower()
    try:
        with write_atomically(Path(os.path.realpath(path)), force) as part:
            figure.savefig(part, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    except FileExistsError as e:
        raise UserError(f"--picture: {path} appeared during the run and was not overwritten: name another file or pass --force") from e
    except OSError as e:
        raise UserError(f"--picture: cannot write {path}: {e.strerror}") from e
