"""The picture of errors by layer and class of tensor."""

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
CURVE = 1.2  # inches, the height of the stream's errors


def check_picture(path: Path, force: bool, read: Mapping[Path, str]) -> None:
    """UserError if it cannot be drawn or may not be written. read: as in ReservedPaths."""
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"--picture: got {path.name!r}, the name must end in {' or '.join(ENDINGS)}")
    reserve_file("--picture", path, ReservedPaths(read), force)
    check_matplotlib()


def check_matplotlib() -> None:
    """UserError if it is not installed, or does not load as the environment is."""
    try:
        with quiet_matplotlib():
            import matplotlib.figure  # noqa: F401
    except ImportError as e:
        install = install_command("picture", ["matplotlib"])
        raise UserError(f"--picture needs matplotlib, which is not installed ({e}): {install}") from e
    except Exception as e:  # a MPLBACKEND that it does not know, no folder that it may write
        raise UserError(f"--picture: matplotlib cannot be loaded: {' '.join(str(e).split())}; mend that, or leave --picture out") from e


@contextlib.contextmanager
def quiet_matplotlib() -> Iterator[list[warnings.WarningMessage]]:
    """Within it matplotlib says nothing of its folders and fonts; the value gets the warnings that Python would show."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        logger.setLevel(level)


def place(name: str) -> tuple[str, int | None]:
    """Class and layer of a tensor: ("attn_q", 3) of blk.3.attn_q.weight, ("output", None) of output.weight."""
    found = re.fullmatch(r"(.*?)blk\.(\d+)\.(.+)", name)
    prefix, layer, rest = found.groups() if found else ("", None, name)
    return prefix + rest.removesuffix(".weight"), None if layer is None else int(layer)


def format_table(errors: dict[str, float]) -> tuple[list[str], list[int | None], np.ndarray]:
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


def figure_size(classes: list[str], layers: list[int | None], title: str) -> tuple[float, float]:
    """Width and height in inches, with room for the names beside and above the squares."""
    width = max(3 + 0.22 * len(layers) + 0.08 * max(max(map(len, classes)) - 10, 0), 1 + 0.09 * len(title))
    return min(width, 40), min(1.6 + 0.25 * len(classes), 40)


def draw(errors: dict[str, float], what: str, title: str, path: Path, force: bool, stream_errors: Sequence[float] = ()) -> bool:
    """Classes down, layers across, colours for the errors. errors: by tensor, at least one. what: kind of error. stream_errors: by layer;
    a curve below, if there are any.

    False if the font of a .png lacks characters of the names, for which it has boxes then: whoever shows a .svg looks for them.
    UserError if the file cannot be written, or, without force, exists by now.
    """
    with quiet_matplotlib() as caught:
        _draw(errors, what, to_utf8(title), path, force, stream_errors=stream_errors)
    return path.suffix.lower() == ".svg" or not any("missing from font" in str(w.message) for w in caught)


def _draw(errors: dict[str, float], what: str, title: str, path: Path, force: bool, stream_errors: Sequence[float]) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    classes, layers, values = format_table(errors)
    shown = np.ma.masked_where(~(values > 0), values)  # as a logarithmic scale has no zero
    low, high = colour_range(shown, layers)
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ggml-ext", "font.family": "sans-serif", "font.size": 9,
             "text.parse_math": False}  # names of files and tensors may hold dollars
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
        at = [i for i, layer in enumerate(layers) if layer is None or layer % step == 0]
        axes.set_xticks([i + 0.5 for i in at], ["none" if layers[i] is None else str(layers[i]) for i in at])
        axes.set_yticks([i + 0.5 for i in range(len(classes))], classes)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(title=title)
        (below or axes).set(xlabel="layer")
        if below:
            _draw_curve(below, layers, stream_errors)
        bar = figure.colorbar(mesh, ax=axes, label=what, extend="both")
        # not the formatters of its own, which write formulas: those are not parsed here
        bar.ax.yaxis.set_major_formatter("{x:.3g}")
        bar.ax.yaxis.set_minor_formatter("{x:.3g}" if high < 10 * low else "")
        save_picture(figure, path, force)


def _draw_curve(axes: Axes, layers: list[int | None], stream_errors: Sequence[float]) -> None:
    """Each layer's error in the middle of its column."""
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
        raise UserError(f"--picture: {path} appeared meanwhile, and was left as it is: name another file or pass --force") from e
    except OSError as e:
        raise UserError(f"--picture: cannot write {path}: {e.strerror}") from e
