"""How every figure looks: one style, one colour a method, legible at notebook width."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .show import COLORS

STYLE: dict[str, Any] = {
    "figure.figsize": (7.5, 4.2),
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 2,
    # Okabe and Ito's colours, told apart by nearly everyone.
    "axes.prop_cycle": plt.cycler(
        color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    ),
}


def style() -> None:
    """Makes matplotlib draw in the course's style; every notebook calls it once."""
    plt.rcParams.update(STYLE)


def color(method: str) -> str:
    """The colour of a method by name ("plain", "prompt lookup", ...), the same everywhere."""
    return COLORS[method]


def label(ax: Axes, title: str, x: str, y: str) -> Axes:
    """Title and axis labels in one line."""
    ax.set(title=title, xlabel=x, ylabel=y)
    return ax
