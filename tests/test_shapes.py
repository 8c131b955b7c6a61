"""Static trees: their notation, the best of them against brute force, and how they are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minispec as ms
from minispec import plots
from minispec import shapes as sh
from minispec.verify import Verdict

SMALL = sh.from_paths([(1,), (0,), (0, 1), (1, 0), (0, 0), (0, 0, 0), (2,)])


def forests(size: int):
    """Every way to hang ``size`` nodes below a node: lists of paths, siblings from rank 0 on."""
    if size == 0:
        yield []
    for first in range(1, size + 1):  # nodes of the first child's subtree
        for below in forests(first - 1):
            for rest in forests(size - first):
                moved = [(path[0] + 1, *path[1:]) for path in rest]
                yield [(0,), *((0, *path) for path in below), *moved]


def value(paths, p) -> float:
    """Expected tokens by the definition: a product for every path."""
    total = 1.0
    for path in paths:
        product = 1.0
        for depth, rank in enumerate(path):
            row = p if np.ndim(p) == 1 else p[depth] if depth < len(p) else []
            product *= row[rank] if rank < len(row) else 0.0
        total += product
    return total


def tables(decreasing: bool):
    rng = np.random.default_rng(3)
    for width, depths in ((2, None), (3, None), (6, None), (3, 2), (4, 4)):
        p = rng.dirichlet(np.ones(width + 1), size=depths)[..., :width]
        yield -np.sort(-p) if decreasing else p


# Notation.


def test_a_shape_by_hand():
    assert SMALL.paths == ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert SMALL.parents == (-1, -1, -1, 0, 0, 1, 3)
    assert SMALL.ranks == (0, 1, 2, 0, 1, 0, 0)
    assert (SMALL.size, SMALL.depth, SMALL.branching, SMALL.inner) == (7, 3, 3, (0, 1, 3))
    first, second, third = SMALL.levels
    assert first == sh.Level((0, 0, 0), (0, 1, 2), (0, 1))
    assert second == sh.Level((0, 0, 1), (0, 1, 0), (0,))
    assert third == sh.Level((0,), (0,), ())
    assert (first.counts, second.counts, third.counts) == ((3,), (2, 1), (1,))
    assert not SMALL.is_chain
    assert sh.chain(3).is_chain
    assert sh.Shape(()).levels == ()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], "has no parent"),
        ([(0,), (0,)], "stands twice"),
        ([(), (0,)], "the root"),
        ([(-1,)], "from 0"),
    ],
)
def test_what_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        sh.from_paths(paths)


def test_the_order_of_nodes_is_fixed():
    with pytest.raises(ValueError, match="level by level"):
        sh.Shape(((0,), (0, 0), (1,)))


def test_full_trees():
    assert sh.chain(4).paths[-1] == (0, 0, 0, 0)
    full = sh.kary(3, 3)
    assert (full.size, full.depth, full.branching) == (3 + 9 + 27, 3, 3)
    cut = sh.kary(3, 3, max_nodes=7)
    assert cut.paths == full.paths[:7]
    assert sh.kary(2, 60, max_nodes=100).size == 100
    with pytest.raises(ValueError, match="max_nodes"):
        sh.kary(2, 60)
    with pytest.raises(ValueError, match="branching"):
        sh.kary(0, 2)


def test_tokens_stand_where_their_candidates_say():
    candidates = torch.arange(2 * 3 * 3).view(2, 3, 3)  # token = 9 b + 3 (depth - 1) + rank
    tree = SMALL.tree(candidates)
    assert tree.tokens.tolist() == [[0, 1, 2, 3, 4, 3, 6], [9, 10, 11, 12, 13, 12, 15]]
    assert tree.parents.tolist() == [list(SMALL.parents)] * 2
    assert tree.depths().tolist() == [list(SMALL.depths)] * 2
    tree.check(vocab_size=18)
    with pytest.raises(ValueError, match="3 depths and 3 ranks"):
        SMALL.tree(candidates[:, :2])
    with pytest.raises(ValueError, match="7 tokens a row"):
        SMALL.with_tokens(candidates[:, 0])
    assert sh.chain(3).tree(candidates).is_chain


# What a tree is worth.


def test_ceilings():
    """A chain cannot pass 1 / (1 - p_1), a binary tree 1 / (1 - p_1 - p_2)."""
    p = [0.5, 0.2, 0.1]
    assert sh.expected_tokens(sh.chain(60), p) == pytest.approx(1 / (1 - 0.5))
    full = [sh.expected_tokens(sh.kary(2, d), p) for d in range(8)]
    assert full == pytest.approx([(1 - 0.7 ** (d + 1)) / (1 - 0.7) for d in range(8)])
    assert sh.expected_tokens(sh.sequoia(p, 64), p) > 1 / (1 - 0.5)  # the best tree passes it


def test_expected_tokens_by_playing():
    p, rng = np.array([[0.5, 0.2, 0.1], [0.3, 0.3, 0.2]]), np.random.default_rng(0)
    shape = sh.from_paths([(0,), (2,), (0, 0), (2, 0), (2, 1)])  # ranks may be left out
    emitted = []
    for _ in range(20_000):
        path = ()
        while len(path) < 2:
            rank = int(rng.choice(4, p=[*p[len(path)], 1 - p[len(path)].sum()]))
            if (*path, rank) not in shape.paths:
                break
            path = (*path, rank)
        emitted.append(len(path) + 1)
    assert sh.expected_tokens(shape, p) == pytest.approx(np.mean(emitted), abs=0.02)
    assert sh.expected_tokens(sh.chain(5), p) == pytest.approx(1 + 0.5 + 0.15)  # 2 depths known


@pytest.mark.parametrize(
    ("p", "message"),
    [
        ([0.9, 0.2], "sum to at most 1"),  # cumulative rates are a likely slip
        ([1.2], "probabilities"),
        ([], "table"),
        (np.zeros((2, 2, 2)), "table"),
    ],
)
def test_rates_are_checked(p, message):
    with pytest.raises(ValueError, match=message):
        sh.sequoia(p, 4)


# The best tree.


def test_brute_force_sees_every_tree():
    catalan = [1, 1, 2, 5, 14, 42, 132, 429]
    assert [len({tuple(sorted(f)) for f in forests(n)}) for n in range(8)] == catalan


@pytest.mark.parametrize("decreasing", [False, True])
def test_sequoia_is_the_best_of_all_trees(decreasing):
    for p in tables(decreasing):
        for size in range(8):
            trees = [(f, value(f, p)) for f in forests(size)]
            best = sh.sequoia(p, size)
            assert best.size <= size
            assert sh.expected_tokens(best, p) == pytest.approx(value(best.paths, p))
            assert value(best.paths, p) == pytest.approx(max(v for _, v in trees), rel=1e-12)


@pytest.mark.parametrize(("depth", "branching"), [(1, None), (2, None), (3, 2), (None, 1)])
def test_sequoia_within_bounds(depth, branching):
    for p in tables(decreasing=False):
        allowed = [
            value(f, p)
            for f in forests(7)
            if max(map(len, f)) <= (depth or 9) and max(r for q in f for r in q) < (branching or 9)
        ]
        smaller = [value(f, p) for f in forests(2)] if not allowed else []
        best = sh.sequoia(p, 7, depth, branching)
        assert best.depth <= (depth or 9)
        assert best.branching <= (branching or 9)
        if allowed:
            assert value(best.paths, p) == pytest.approx(max(allowed), rel=1e-12)
        assert not smaller or value(best.paths, p) >= 1


def test_medusas_greedy_choice_is_the_best_where_rates_fall():
    for p in tables(decreasing=True):
        for size in (1, 4, 7, 30):
            greedy, best = sh.medusa_greedy(p, size), sh.sequoia(p, size)
            assert sh.expected_tokens(greedy, p) == pytest.approx(sh.expected_tokens(best, p))


def test_medusas_greedy_choice_leaves_out_what_is_never_right():
    shape = sh.medusa_greedy([[0.5, 0.0, 0.3], [0.4, 0.1, 0.0]], 100)
    assert shape.paths == ((0,), (2,), (0, 0), (0, 1), (2, 0), (2, 1))
    assert not shape.dense


def test_a_tree_by_hand_from_published_accuracies():
    """Top-1 .56 and .316 at depths 1 and 2 (Vicuna-7B); a second candidate of .11 at depth 1."""
    shape = sh.medusa_greedy([[0.56, 0.11], [0.316, 0.09]], 4)
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1))  # .56, .1770, .11, .0504 (.11 * .316 = .035)


# The best tree on a machine.


def cost(num: int) -> float:
    return 1.0 + 0.02 * num + 0.3 * (num > 16)


@pytest.mark.parametrize("step", [0.0, 0.05, 0.2])
def test_best_shape_against_every_size_and_depth(step):
    for p in tables(decreasing=True):
        plan = sh.best_shape(p, cost, step, max_nodes=18, round_s=0.1)
        tried = {}
        for depth in range(1, 19 if np.ndim(p) == 1 else len(p) + 1):
            for size in range(1, 19):
                shape = sh.sequoia(p, size, depth)
                seconds = cost(shape.size + 1) + depth * step + 0.1
                tried[size, depth] = sh.expected_tokens(shape, p) * cost(1) / seconds
        assert plan.speedup == pytest.approx(max(1.0, *tried.values()))
        assert plan.tokens == pytest.approx(sh.expected_tokens(plan.shape, p))
        seconds = cost(plan.shape.size + 1) + plan.shape.depth * step + 0.1
        if plan.shape.size:
            assert plan.speedup == pytest.approx(plan.tokens * cost(1) / seconds)


def test_where_nothing_pays_nothing_is_drafted():
    plan = sh.best_shape([0.3, 0.1], cost, draft_step_s=2.0)
    assert (plan.shape.size, plan.speedup) == (0, 1.0)


def test_cheap_steps_make_deep_trees_and_cheap_nodes_wide_ones():
    p = [0.6, 0.15, 0.05, 0.02]
    deep, shallow = (sh.best_shape(p, cost, step).shape for step in (0.0, 0.3))
    assert deep.depth > shallow.depth
    wide, narrow = (sh.best_shape(p, lambda n, c=c: 1 + c * n, 0.05).shape for c in (0.001, 0.1))
    assert wide.size > 3 * narrow.size


# Drawings.


def texts_of(figure) -> dict[str, str]:
    """Every text of the drawing and the colour of its box."""
    found = {}
    for text in figure.axes[0].texts:
        box = text.get_bbox_patch()
        found[text.get_text()] = mpl.colors.to_hex(box.get_facecolor()) if box else ""
    return found


@pytest.fixture(autouse=True)
def close_figures():
    mpl.use("Agg")
    yield
    plots.plt.close("all")


def test_a_drawing_shows_what_became_of_each_node():
    tree = SMALL.with_tokens(torch.arange(10, 17)[None])
    path = torch.tensor([[1, 5, -1, -1, -1, -1, -1]])
    verdict = Verdict(path, torch.tensor([2]), torch.tensor([30]), torch.tensor([2]))
    figure = plots.draw_tree(tree, verdict=verdict, root="here")
    colours = texts_of(figure)
    assert set(colours) == {"here", *map(str, range(10, 17)), "30"}
    accepted, rejected, unseen = (
        plots.BOXES[k][0] for k in ("accepted", "rejected", "not reached")
    )
    assert {t for t, c in colours.items() if c == accepted.lower()} == {"11", "15"}
    assert {t for t, c in colours.items() if c == rejected} == {"10"}  # 12 was never tried
    assert {t for t, c in colours.items() if c == unseen} == {"12", "13", "14", "16"}
    assert colours["30"] == plots.BOXES["bonus"][0].lower()
    legend = {t.get_text() for t in figure.axes[0].get_legend().get_texts()}
    assert "bonus" in legend
    nothing = Verdict(path * 0 - 1, torch.tensor([0]), torch.tensor([30]), torch.tensor([1]))
    figure = plots.draw_tree(tree, verdict=nothing)
    assert "correction" in {t.get_text() for t in figure.axes[0].get_legend().get_texts()}


def test_drawings_of_shapes_and_padding():
    assert set(texts_of(plots.draw_tree(SMALL))) == {"root", "0", "1", "2"}
    tree = ms.TokenTree.chain(torch.tensor([[5, 6, 7]]), valid=torch.tensor([[True, True, False]]))
    assert set(texts_of(plots.draw_tree(tree, name=lambda t: f"${t}\n"))) == {
        "root", r"\$5⏎", r"\$6⏎",
    }  # fmt: skip
    with pytest.raises(ValueError, match="labels"):
        plots.draw_tree(SMALL, ["a"])


def test_a_part_of_a_tree_is_drawn_where_it_stands_in_the_whole():
    parents, texts = {0: -1, 1: -1, 2: 0, 3: 0}, {-1: "root", 0: "a", 1: "b", 2: "c", 3: "d"}
    whole = plots.layout(parents)
    _, ax = plots.plt.subplots()
    styles = {0: "kept", 1: "left out"}
    plots.draw_nodes(ax, {0: -1, 1: -1}, texts, styles, whole)
    drawn = {t.get_text(): t for t in ax.texts}
    assert set(drawn) == {"root", "a", "b"}
    assert all(drawn[texts[i]].get_position() == whole[i] for i in (-1, 0, 1))
    assert drawn["b"].get_bbox_patch().get_linestyle() == "--"
    assert drawn["a"].get_bbox_patch().get_linestyle() == "-"
    assert [m.get_label() for m in plots.box_marks(styles.values())] == ["kept", "left out"]


def test_the_mask_picture_is_the_mask():
    tree = SMALL.with_tokens(torch.arange(7)[None])
    ax = plots.draw_mask(tree).axes[0]
    drawn = ax.collections[0].get_array().reshape(8, 9)
    _, visible = tree.with_root()
    assert ((drawn[:, 1:] == 1) == visible[0].numpy()).all()
    assert (drawn[:, 0] == 0.4).all()  # the committed text, seen by all
    assert [t.get_text() for t in ax.get_yticklabels()] == ["root", *map(str, range(7))]
    assert [t.get_text() for t in ax.texts] == [f"+{d}" for d in (0, *SMALL.depths)]


# From what was counted.


def test_path_values_are_counted_jointly():
    #                place  0  1  2  3  4  5  6  7
    ranks = np.array([[0, 0, 0, 0, 1, 1, 9, 2], [0, 0, 1, 9, 0, 9, 0, 9]])
    values = sh.path_values(ranks, most=3)
    assert values == {
        (0,): 4 / 8, (1,): 2 / 8, (0, 0): 2 / 8, (2,): 1 / 8, (0, 1): 1 / 8, (1, 0): 1 / 8
    }  # fmt: skip
    assert list(values) == [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0)], "best first, then shallow"
    assert list(sh.path_values(ranks, most=3, max_nodes=2)) == [(0,), (1,)]
    with pytest.raises(ValueError, match="depth, place"):
        sh.path_values([1, 2], 3)


@given(st.integers(0, 10_000))
def test_the_first_n_paths_are_the_best_tree_on_their_text(seed):
    """Against every tree of that size, by how many tokens each would have got right."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 4, 30)
    ranks = np.stack([first, np.where(rng.random(30) < 0.5, first, rng.integers(0, 4, 30))])
    values = sh.path_values(ranks, most=3)
    every = list(values)

    def accepted(paths: Sequence[tuple[int, ...]]) -> int:
        kept = set(paths)
        return sum(
            (int(a) < 3 and (int(a),) in kept) + (max(a, b) < 3 and (int(a), int(b)) in kept)
            for a, b in ranks.T
        )

    for size in (1, 2, 3):
        best = max(
            accepted(some)
            for some in itertools.combinations(every, size)
            if all(p[:-1] in some or len(p) == 1 for p in some)
        )
        chosen = sh.from_paths(every[:size])
        assert accepted(chosen.paths) == best
        assert sum(list(values.values())[:size]) * 30 == pytest.approx(best)


def test_best_of_weighs_depth_against_its_price():
    values = {(0,): 0.6, (0, 0): 0.5, (0, 0, 0): 0.4, (1,): 0.1}

    def flat(n: int) -> float:
        return 1.0 + 0.01 * n

    free = sh.best_of(values, flat, 0.0)
    assert free.shape.paths == ((0,), (1,), (0, 0), (0, 0, 0))
    assert free.tokens == pytest.approx(2.6)
    assert free.speedup == pytest.approx(2.6 * 1.01 / 1.05)
    dear = sh.best_of(values, flat, 0.3)
    assert dear.shape.depth < 3
    assert sh.best_of(values, flat, 0.0, max_depth=1).shape.paths == ((0,), (1,))
    assert sh.best_of(values, flat, 5.0).shape.size == 0
    assert sh.best_of({}, flat, 0.0).speedup == 1.0


def test_the_map_of_trees_marks_the_best_and_leaves_slow_ones_white():
    _, ax = plots.plt.subplots()
    plots.tree_map(ax, [1, 2, 4], [[0.9, 1.1, 1.2], [np.nan, 1.3, 1.0]], "here")
    star = next(line for line in ax.lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], round(star.get_ydata()[0])) == (1, 2)
    assert [t.get_text() for t in ax.texts] == ["0.90", "1.10", "1.20", "1.30", "1.00"]
    white = ax.collections[0].get_array().mask  # [D, S]
    assert white.tolist() == [[True, False, False], [True, False, True]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2", "4"]


def test_cartesian_is_every_combination():
    assert sh.cartesian((2, 3)).paths == (
        *((0,), (1,)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)),
    )
    assert sh.cartesian((3, 3)) == sh.kary(3, 2)
    assert sh.cartesian((1, 1, 1)).is_chain
    assert sh.cartesian(()).size == 0
    with pytest.raises(ValueError, match="one candidate"):
        sh.cartesian((2, 0))
    with pytest.raises(ValueError, match="more than"):
        sh.cartesian((10, 10, 10, 10, 10, 10))
