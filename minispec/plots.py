"""How every figure looks: one style, one colour a method, legible at notebook width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    plt.rcParams.update(STYLE)  # type: ignore[arg-type]


def color(method: str) -> str:
    """The colour of a method by name ("plain", "prompt lookup", ...), the same everywhere."""
    if method not in COLORS:
        raise ValueError(f"no colour for {method!r}: there are {', '.join(COLORS)}")
    return COLORS[method]


def label(ax: Axes, title: str, x: str, y: str) -> Axes:
    """Title and axis labels in one line."""
    ax.set(title=title, xlabel=x, ylabel=y)
    return ax


def overlap(p: Sequence[float], q: Sequence[float], names: Sequence[str]) -> Figure:
    """The rule at one position: laws p (target) and q (drafter) [V], and how it rebuilds p.

    Left, p and q side by side. Right, what is emitted: min(p, q), drafted and accepted, with
    max(p - q, 0), drawn from the residual after a rejection, on top; the marks show p.
    """
    p_, q_, place = np.asarray(p), np.asarray(q), np.arange(len(names))
    shared = np.minimum(p_, q_)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.6), sharey=True, layout="tight")
    left.bar(place - 0.2, p_, 0.4, color=color("target"), label="target p")
    left.bar(place + 0.2, q_, 0.4, color=color("draft model"), label="drafter q")
    right.bar(place, shared, 0.6, color=color("accepted"), label="accepted: min(p, q)")
    right.bar(
        place, p_ - shared, 0.6, shared, color=color("own"), hatch="//", label="residual: (p − q)₊"
    )
    right.hlines(p_, place - 0.4, place + 0.4, "black", linewidth=2, label="target p")
    label(left, "two laws", "next token", "probability")
    label(right, "what the rule emits", "next token", "")
    for ax in (left, right):
        ax.set_xticks(place, names)
        ax.legend()
    return figure
