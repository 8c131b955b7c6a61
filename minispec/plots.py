"""How every figure looks: one style, one colour a method, legible at notebook width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from .shapes import Shape
from .show import COLORS
from .tree import ROOT, TokenTree
from .verify import Verdict

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


# Trees.


def draw_tree(
    tree: TokenTree | Shape,
    labels: Sequence[str] | None = None,
    *,
    verdict: Verdict | None = None,
    name: Callable[[int], str] = str,
    root: str = "root",
    row: int = 0,
) -> Figure:
    """A tree from left to right: what was proposed and, with ``verdict``, what became of it.

    A box holds its node's label [N], else ``name`` of its token (of its rank in a shape). root:
    what stands in the first box; row: which of the tree's rows. The token after the accepted path
    hangs on it: a correction where candidates were refused, a bonus where there were none.
    """
    parents, texts = _nodes(tree, labels, name, row)
    styles = dict.fromkeys(parents, "proposed")
    if verdict is not None:
        path = [i for i in verdict.path[row].tolist() if i in parents]
        styles = _fates(parents, path)
        last = path[-1] if path else ROOT
        own = "correction" if last in parents.values() else "bonus"
        parents, texts = (
            parents | {OWN_NODE: last},
            texts | {OWN_NODE: name(int(verdict.next_token[row]))},
        )
        styles[OWN_NODE] = own
    places = layout(parents)
    width = min(1.5 * (1 + max(x for x, _ in places.values())) + 0.5, 10)
    height = 0.36 * (1 + max(y for _, y in places.values())) + (0.9 if verdict is not None else 0.3)
    figure, ax = plt.subplots(figsize=(max(width, 5), max(height, 1.2)), layout="tight")
    shown = {node: as_label(text) for node, text in ({ROOT: root} | texts).items()}
    draw_nodes(ax, parents, shown, styles, places)
    if verdict is not None:
        ax.legend(handles=box_marks(["root", *styles.values()]), **BELOW)
    return figure


def draw_nodes(
    ax: Axes,
    parents: dict[int, int],
    texts: dict[int, str],
    styles: dict[int, str],
    places: dict[int, tuple[float, float]] | None = None,
    fontsize: float = 9,
) -> Axes:
    """A tree as boxes: parents by node, texts of the nodes and of ROOT, styles of ``BOXES``.

    places: (depth, height) of each node, those of a larger tree that this one is a part of; None:
    the tree's own.
    """
    frame = layout(parents) if places is None else places
    styles = {ROOT: "root"} | styles
    for node, parent in parents.items():
        (x, y), (x0, y0) = frame[node], frame[parent]
        face, _, kept = BOXES[styles[node]]
        shade = face if styles[node] in ("accepted", "correction", "bonus") else "#bbbbbb"
        ax.plot([x0, x], [y0, y], color=shade, linewidth=2.5 if kept else 1, zorder=1)
    for node in (ROOT, *parents):
        face, ink, _ = BOXES[styles[node]]
        box = {
            "boxstyle": "round,pad=0.3",
            "facecolor": face,
            "edgecolor": "#888888",
            "linestyle": "--" if styles[node] in DASHED else "-",
        }
        ax.text(
            *frame[node],
            texts[node],
            color=ink,
            bbox=box,
            fontsize=fontsize,
            ha="center",
            va="center",
        )
    right, bottom = (max(v) for v in zip(*frame.values(), strict=True))
    ax.set(xlim=(-0.5, right + 0.5), ylim=(bottom + 0.6, -0.6))
    ax.axis("off")
    return ax


def box_marks(styles: Iterable[str]) -> list[Patch]:
    """What the boxes' colours mean, for a legend."""
    used = set(styles)
    return [Patch(facecolor=BOXES[s][0], edgecolor="#888888", label=s) for s in BOXES if s in used]


BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, 0),
    "ncols": 5,
    "fontsize": 9,
}
OWN_NODE = -2  # the target's own token, as a node of the drawing
BOXES = {  # face, ink, thick line
    "root": ("#ffffff", "black", False),
    "proposed": ("#ffffff", "black", False),
    "accepted": (COLORS["accepted"], "white", True),
    "rejected": ("#cccccc", "black", False),
    "not reached": ("#f4f4f4", "#777777", False),
    "correction": (COLORS["own"], "white", True),
    "bonus": (COLORS["own"], "white", True),
    "candidate": ("#ffffff", "black", False),
    "expanded": ("#cfe6f5", "black", True),
    "kept": ("#fbe3b5", "black", True),
    "left out": ("#f4f4f4", "#777777", False),
    "the head's": ("#cfe6f5", "black", False),
    "the text's": ("#bfe5d9", "black", False),
    "both": ("#ead1dc", "black", True),
}
DASHED = ("not reached", "left out")


def _nodes(
    tree: TokenTree | Shape, labels: Sequence[str] | None, name: Callable[[int], str], row: int
) -> tuple[dict[int, int], dict[int, str]]:
    """Each real node's parent, and its text."""
    if isinstance(tree, Shape):
        parents, values, real = list(tree.parents), list(tree.ranks), [True] * tree.size
    else:
        parents, values = tree.parents[row].tolist(), tree.tokens[row].tolist()
        real = tree.is_valid[row].tolist()
    if labels is not None and len(labels) != len(parents):
        raise ValueError(f"{len(labels)} labels for a tree of {len(parents)} nodes")
    nodes = [i for i, r in enumerate(real) if r]
    texts = {i: name(values[i]) if labels is None else labels[i] for i in nodes}
    return {i: parents[i] for i in nodes}, texts


def _fates(parents: dict[int, int], path: list[int]) -> dict[int, str]:
    """Accepted; rejected: tried on the way; not reached: never looked at."""
    fates = dict.fromkeys(parents, "not reached") | dict.fromkeys(path, "accepted")
    for here, accepted in zip([ROOT, *path], [*path, None], strict=True):
        for i, parent in parents.items():
            if parent == here and (accepted is None or i < accepted):
                fates[i] = "rejected"
    return fates


def layout(parents: dict[int, int]) -> dict[int, tuple[float, float]]:
    """(depth, height) of each node: leaves one below the other, parents in the middle of theirs."""
    places: dict[int, tuple[float, float]] = {}
    leaves = iter(range(len(parents) + 1))

    def place(node: int, depth: int) -> float:
        heights = [place(i, depth + 1) for i, parent in parents.items() if parent == node]
        height = (heights[0] + heights[-1]) / 2 if heights else float(next(leaves))
        places[node] = (depth, height)
        return height

    place(ROOT, 0)
    return places


def as_label(text: str, width: int = 12) -> str:
    """A token as a label: white space made visible, no mathematics, not too long."""
    text = text.replace("\n", "⏎").replace(" ", "·").replace("$", r"\$")
    return text if len(text) <= width else f"{text[: width - 1]}…"


def draw_mask(
    tree: TokenTree,
    labels: Sequence[str] | None = None,
    *,
    name: Callable[[int], str] = str,
    root: str = "root",
    row: int = 0,
) -> Figure:
    """The tree's attention mask: each line a token that is read, each column one that it may see.

    The first column stands for all of the text before the root. On the right, how many positions
    behind the root a token stands: siblings share a position.
    """
    parents, texts = _nodes(tree, labels, name, row)
    kept = [0, *(i + 1 for i in parents)]
    depth, visible = (part[row].cpu().numpy() for part in tree.with_root())
    seen = np.pad(visible[np.ix_(kept, kept)].astype(float), ((0, 0), (1, 0)), constant_values=0.4)
    names = [as_label(root), *(as_label(texts[i]) for i in parents)]
    side = 0.3 * len(names) + 1.6
    figure, ax = plt.subplots(figsize=(side + 0.3, side), layout="tight")
    shades = LinearSegmentedColormap.from_list("seen", ["#ffffff", COLORS["accepted"]])
    ax.pcolormesh(seen, cmap=shades, vmin=0, vmax=1, edgecolors="#dddddd", linewidth=0.7)
    centre = np.arange(len(names)) + 0.5
    ax.set_xticks(np.append(0.5, centre + 1), ["text", *names], rotation=90, fontsize=9)
    ax.set_yticks(centre, names, fontsize=9)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.grid(False)
    for y, steps in zip(centre, depth[kept], strict=True):
        ax.text(len(names) + 1.2, y, f"+{steps}", fontsize=9, va="center")
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figure


# Methods side by side: ``lines`` is bench.BenchResult.summary(), or a part of it.

PEER_HATCH = "///"


def _method_color(method: str) -> str:
    """A method's colour; grey for one that the course does not know."""
    return COLORS.get(method, "#777777")


def _whiskers(lines: Any, name: str) -> Any:
    """[2, lines] how far the interval reaches below and above, 0 where there is none."""
    reach = np.stack([lines[name] - lines[f"{name}_low"], lines[f"{name}_high"] - lines[name]])
    return np.nan_to_num(reach.astype(float)).clip(min=0)


def speedup_bars(lines: Any) -> Figure:
    """Speed-up of each method over plain with its interval: rounds, and whole call (peers too)."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=False, layout="tight")
    for ax, name, title in zip(
        axes, ("speedup", "whole"), ("rounds alone", "whole call"), strict=True
    ):
        shown = lines[lines[name].notna()].iloc[::-1]  # the first on top
        peers = shown["engine"] != "minispec"
        names = shown["method"] + np.where(peers, " (" + shown["engine"] + ")", "")
        bars = ax.barh(
            names,
            shown[name],
            xerr=_whiskers(shown, name),
            color=[_method_color(m) for m in shown["method"]],
            capsize=3,
        )
        for bar, peer in zip(bars, peers, strict=True):
            bar.set(hatch=PEER_HATCH if peer else None, edgecolor="white")
        ax.axvline(1, color=color("plain"), linewidth=1)
        ax.set_xlim(left=0)
        label(ax, title, "times as fast as plain", "")
    return figure


def kind_bars(lines: Any) -> Figure:
    """Speed-up by kind of prompt, a group a kind and a bar a method; ``all`` stands last."""
    kinds = sorted(dict.fromkeys(lines["kind"]), key=lambda kind: kind == "all")
    methods = [m for m in dict.fromkeys(lines["method"]) if m != "plain"]
    figure, ax = plt.subplots(figsize=(10, 4), layout="tight")
    width = 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        own = lines[lines["method"] == method].set_index("kind").reindex(kinds)
        place = np.arange(len(kinds)) + (i - (len(methods) - 1) / 2) * width
        ax.bar(
            place,
            own["speedup"].fillna(0),
            width * 0.92,
            yerr=_whiskers(own, "speedup"),
            color=_method_color(method),
            error_kw={"linewidth": 1},
            label=method,
        )
    ax.axhline(1, color=color("plain"), linewidth=1)
    ax.set_xticks(range(len(kinds)), [k.replace("_", "\n") for k in kinds])
    label(ax, "speed-up by kind of prompt", "", "times as fast as plain")
    if methods:
        ax.legend(ncols=4, loc="upper left", fontsize=9)
        ax.set_ylim(top=ax.get_ylim()[1] * 1.15)
    return figure


def share_bars(lines: Any) -> Figure:
    """A round of each method in plain steps, and what of it goes to draft, target and the rest."""
    shown = lines[lines["overhead"].notna()].iloc[::-1]
    figure, ax = plt.subplots(layout="tight")
    left = np.zeros(len(shown))
    parts = {"target": color("target"), "draft": color("draft model"), "rest": "#000000"}
    if shown[list(parts)].isna().all(axis=None):  # on a GPU the parts are not timed
        ax.barh(shown["method"], shown["overhead"], color=color("target"))
    else:
        for part, shade in parts.items():
            length = (shown[part] * shown["overhead"]).astype(float).fillna(0).to_numpy()
            ax.barh(shown["method"], length, left=left, color=shade, label=part)
            left = left + length
        ax.legend()
    ax.axvline(1, color="black", linewidth=1, linestyle=":")
    label(ax, "a round, in plain steps", "time of a round / time of a plain step (overhead)", "")
    return figure


# Costs: ``roof`` is a costs.Roofline, ``frame`` what costs.time_pass returns.

PART_COLORS = {
    "attention projections": "#0072B2",
    "attention over the cache": "#D55E00",
    "MLP": "#56B4E9",
    "LM head": "#E69F00",
    "other": "#000000",
}


def cost_bars(costs: Any) -> Figure:
    """What passes read and compute, by part: bytes on the left, FLOPs on the right.

    costs: a label and a costs.PassCost for each bar, the first on top.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 0.55 * len(costs) + 1.6), layout="tight")
    for ax, what in zip(axes, ("bytes", "flops"), strict=True):
        unit, scale = ("MB", 1e6) if what == "bytes" else ("GFLOP", 1e9)
        left = np.zeros(len(costs))
        for part, shade in PART_COLORS.items():
            length = np.array([getattr(c.parts[part], what) for c in costs.values()]) / scale
            ax.barh(list(costs), length, left=left, color=shade, label=part, height=0.65)
            left = left + length
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        label(ax, f"a pass: {what.replace('flops', 'FLOPs')}", unit, "")
    axes[1].set_yticklabels([])
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5, fontsize=9
    )
    return figure


def pass_times(frame: Any, floor: Sequence[float] | None = None, title: str = "") -> Figure:
    """Time of a pass against its tokens, with intervals; floor [points]: the roofline's seconds."""
    figure, ax = plt.subplots(layout="tight")
    n, ms = frame["tokens"], 1e3 * frame["seconds"]
    reach = 1e3 * np.stack(
        [frame["seconds"] - frame["low"], frame["high"] - frame["seconds"]]
    ).clip(min=0)
    ax.plot(n, ms.iloc[0] * n, ":", color="black", linewidth=1.5, label="as many separate steps")
    ax.errorbar(
        n, ms, reach, fmt="o-", color=color("accepted"), capsize=3, label="one pass, measured"
    )
    if floor is not None:
        shade = color("own")
        ax.plot(n, 1e3 * np.asarray(floor), "--", color=shade, label="least time by the roofline")
    ax.axhline(2 * ms.iloc[0], color=color("plain"), linewidth=1, label="twice one token's")
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(n, [str(i) for i in n])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(top=4 * ms.max())
    ax.legend(loc="upper right")
    label(ax, title, "tokens in the pass", "ms")
    return figure


def roofline(roof: Any, points: Any, title: str = "") -> Figure:
    """The two ceilings, and measured work below them.

    points: for each label, intensities [FLOP/byte] and what was attained there [FLOP/s].
    """
    figure, ax = plt.subplots(layout="tight")
    all_x = [x for xs, _ in points.values() for x in xs]
    line = np.geomspace(min(all_x) / 2, max(*all_x, roof.ridge) * 3, 200)
    ax.plot(line, roof.attainable(line) / 1e9, color="black", label="the machine's roof")
    ax.axvline(roof.ridge, color=color("plain"), linewidth=1, linestyle=":")
    ax.text(roof.ridge * 1.06, 0.02, "ridge", transform=ax.get_xaxis_transform(), fontsize=9)
    for name, (x, y) in points.items():
        ax.plot(x, np.asarray(y) / 1e9, "o-", linewidth=1, markersize=5, label=name)
    ax.set(xscale="log", yscale="log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(loc="lower right")
    label(ax, title, "arithmetic intensity (FLOP/byte)", "GFLOP/s")
    return figure


def speedup_by_length(model: Any, alphas: Sequence[float], measured: Any = None) -> Figure:
    """Speed-up against K: a costs.CostModel's prediction, and Thm 3.8 for c = 0 (thin, dashed).

    measured: a table with the columns alpha, k, measured, low, high, drawn as points.
    """
    figure, ax = plt.subplots(figsize=(7.5, 4.6), layout="tight")
    k = np.arange(0, 17)
    shades = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for alpha, shade in zip(alphas, shades, strict=False):
        ax.plot(k, np.cumsum(alpha ** k.astype(float)), "--", color=shade, linewidth=1)  # Eq. 1
        ax.plot(k, model.chain_speedup(alpha, k), color=shade, label=f"α = {alpha:g}")
        if measured is not None:
            own = measured[np.isclose(measured["alpha"], alpha)].rename(columns={"measured": "m"})
            reach = np.stack([own["m"] - own["low"], own["high"] - own["m"]]).clip(min=0)
            ax.errorbar(own["k"], own["m"], reach, fmt="o", color=shade, capsize=3)
    ax.plot([], [], "--", color="black", linewidth=1, label="Thm 3.8, c = 0")
    ax.axhline(1, color=color("plain"), linewidth=1)
    ax.legend(loc="upper left")
    label(ax, "", "K (drafted tokens a round)", "speed-up (× plain decoding)")
    return figure


def speedup_map(
    ax: Axes, model: Any, points: Sequence[tuple[str, float, float, str]] = (), title: str = ""
) -> Axes:
    """Speed-up of the best chain (K of 0..64) over (c, α), from a costs.CostModel's passes.

    points: (name, c, α, colour). White: the best K is 0. c below .002 is drawn at the left edge.
    """
    c, alpha, k = np.geomspace(0.002, 1, 120), np.linspace(0.01, 0.99, 99), np.arange(65)
    tau = np.cumsum(alpha[:, None] ** k, axis=1)  # [α, K] Eq. 1
    passes = model.overhead(k) - k * model.c  # [K] a round without its drafting, in plain steps
    best = np.stack([(tau / (passes + k * each)).max(1) for each in c], axis=1)  # [α, c]
    levels = [1.01, 1.25, 1.5, 2, 3, 4, 6]
    ax.set(xscale="log", xlim=(c[0], 1), ylim=(0, 1))  # before the labels find their places
    ax.contourf(c, alpha, best, levels, cmap="Blues", alpha=0.55, extend="max")
    lines = ax.contour(c, alpha, best, levels, colors="#555555", linewidths=0.8)
    ax.clabel(lines, fmt=lambda level: f"{level:.3g}×" if level > 1.1 else "1×", fontsize=9)
    for name, x, y, shade in points:
        ax.plot(max(x, c[0]), y, "o", color=shade, markersize=8, label=name, clip_on=False)
    ax.xaxis.set_major_formatter("{x:g}")
    return label(ax, title, "c (draft step / plain step)", "acceptance probability α")


def tree_map(ax: Axes, sizes: Sequence[int], speedups: Any, title: str = "") -> Axes:
    """Speed-up of trees by their nodes and their depth; a star marks the best.

    speedups [D, S]: of the best tree of at most 1..D levels and of ``sizes`` nodes; nan: there is
    none. White: slower than plain decoding.
    """
    table = np.asarray(speedups, dtype=float)
    depths = np.arange(1, len(table) + 1)
    top = max(float(np.nanmax(table)), 1.05)
    shades = ax.pcolormesh(
        np.arange(len(sizes) + 1) - 0.5,
        np.append(depths, len(table) + 1) - 0.5,
        np.ma.masked_invalid(np.where(table > 1, table, np.nan)),
        cmap="Blues",
        vmin=1,
        vmax=top,
    )
    for d, row in zip(depths, table, strict=True):
        for s, value in enumerate(row):
            if np.isfinite(value):
                ink = "white" if value > 1 + 0.6 * (top - 1) else "black"
                ax.text(
                    s, float(d), f"{value:.2f}", color=ink, fontsize=8, ha="center", va="center"
                )
    deep, size = np.unravel_index(np.nanargmax(table), table.shape)
    ax.plot(size, deep + 1.32, "*", color=COLORS["own"], markersize=11, markeredgecolor="white")
    ax.set_xticks(range(len(sizes)), [str(n) for n in sizes])
    ax.set_yticks(depths)
    ax.grid(False)
    ax.figure.colorbar(shades, ax=ax, label="speed-up (× plain)")
    return label(ax, title, "nodes in the tree", "levels (draft passes a round)")


# Training: ``log`` is what training.fit.fit returns, and gives to its ``watch``.


def training_curves(log: Any) -> Figure:
    """The loss of every update with its running mean, and what held-out text shows.

    That is, where the log has them (after each validation): alpha by position in the draft, and
    tau of a greedy chain.
    """
    seen = log[log["tau"].notna()] if "tau" in log else log[:0]
    figure, axes = plt.subplots(1, 3 if len(seen) else 1, figsize=(10.5, 3.4), layout="tight")
    loss, *held_out = np.atleast_1d(axes)
    loss.plot(log["step"], log["loss"], color=color("target"), linewidth=1, label="an update")
    mean = log["loss"].rolling(10, min_periods=1).mean()
    loss.plot(log["step"], mean, color=color("accepted"), label="mean of the last ten")
    loss.legend(fontsize=9)
    label(loss, "training: loss", "update", "nats")
    if held_out:
        alpha, tau = held_out
        names = [n for n in log.columns if n.startswith("alpha_")]
        shades = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        for name, shade in zip(names, shades, strict=False):
            text = f"token {name.removeprefix('alpha_')}"
            alpha.plot(seen["step"], seen[name], "o-", color=shade, markersize=4, label=text)
        tau.plot(seen["step"], seen["tau"], "o-", color="black", markersize=4)
        alpha.legend(fontsize=9)
        alpha.set_ylim(bottom=0)
        label(alpha, "held-out text: α by position", "update", "acceptance probability")
        label(tau, "held-out text: τ", "update", "tokens a pass")
    return figure


def live_training() -> Callable[[Any], None]:
    """A ``watch`` for ``fit``: in a notebook, ``training_curves`` redrawn in one place."""
    from IPython.display import DisplayHandle

    place = DisplayHandle()
    begun = False

    def watch(log: Any) -> None:
        nonlocal begun
        figure = training_curves(log)
        (place.update if begun else place.display)(figure)
        begun = True
        plt.close(figure)  # else the cell shows it once more

    return watch
