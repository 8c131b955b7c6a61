"""Static trees: which nodes to draft, before any token is known, and which tree is the best.

A node is named by its *path*, the ranks of the candidates that lead to it (Medusa's notation):
(0,) is the likeliest child of the root, (0, 2) the third candidate after it. Where the i-th
candidate of a node is the accepted one with probability p_i, a tree emits the sum over its nodes
of the products of p along their paths, the root's 1 being the target's own token (Sequoia
2402.12374, Prop. 3.4). So a chain cannot pass 1 / (1 - p_1) however long it is, nor a binary tree
1 / (1 - p_1 - p_2); and which n nodes are the best ones is a matter of arithmetic.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tree import ROOT, TokenTree

Path = tuple[int, ...]
MAX_NODES = 4096  # more than any pass would read; stops a slip such as kary(10, 10)


@dataclass(frozen=True)
class Level:
    """All nodes of one depth, in order.

    places  per node, which of the level above's *inner* nodes is its parent
    ranks   per node, its rank among the candidates of that parent
    inner   those of this level's nodes, counted within it, that have children
    """

    places: tuple[int, ...]
    ranks: tuple[int, ...]
    inner: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many children each inner node of the level above has."""
        return tuple(Counter(self.places)[i] for i in range(self.places[-1] + 1))


@dataclass(frozen=True)
class Shape:
    """A tree without tokens. Make one by ``chain``, ``kary``, ``from_paths``, ``sequoia``, ...

    paths: the nodes' paths, level by level and within a level in order of rank, so that parents
    stand before children, siblings together, and equal trees are equal.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        if len(known) != len(self.paths) + 1:
            raise ValueError("a path stands twice, or the root () is named: it is always there")
        if any(rank < 0 for path in self.paths for rank in path):
            raise ValueError("ranks are counted from 0")
        orphan = next((path for path in self.paths if path[:-1] not in known), None)
        if orphan is not None:
            raise ValueError(f"the node {orphan} has no parent {orphan[:-1]} in the tree")
        if list(self.paths) != sorted(self.paths, key=_order):
            raise ValueError("paths stand level by level, in order of rank: see from_paths")

    def __repr__(self) -> str:
        return f"<Shape: {self.size} nodes, depth {self.depth}, branching {self.branching}>"

    @property
    def size(self) -> int:
        """Nodes, the root not among them."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels below the root: a round emits at most depth + 1 tokens."""
        return max(self.depths, default=0)

    @property
    def branching(self) -> int:
        """Candidates that a node needs at most: the largest rank + 1."""
        return max(self.ranks, default=-1) + 1

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Each node's parent by index, ROOT (-1) for the root's children; parents[i] < i."""
        index = {path: i for i, path in enumerate(self.paths)}
        return tuple(index.get(path[:-1], ROOT) for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(len(path) for path in self.paths)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children: those that a draft model has to read."""
        return tuple(sorted(set(self.parents) - {ROOT}))

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.size - 1))

    @cached_property
    def dense(self) -> bool:
        """Whether siblings have the ranks 0, 1, 2, ... without a gap."""
        known = set(self.paths)
        return all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in known for p in self.paths)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        found, above = [], [ROOT]
        for depth in range(1, self.depth + 1):
            nodes = [i for i, d in enumerate(self.depths) if d == depth]
            inner = [i for i in nodes if i in self.inner]
            places = tuple(above.index(self.parents[i]) for i in nodes)
            ranks = tuple(self.ranks[i] for i in nodes)
            found.append(Level(places, ranks, tuple(nodes.index(i) for i in inner)))
            above = inner
        return tuple(found)

    def tree(self, candidates: Tensor) -> TokenTree:
        """The tree of candidates [B, D, K] by depth and rank, the same whatever the path.

        Heads that see only the root propose so (Medusa 2401.10774): node (0, 2) holds candidate 2
        of depth 2, and so does node (1, 2).
        """
        if candidates.shape[1] < self.depth or candidates.shape[2] < self.branching:
            raise ValueError(
                f"candidates for {self.depth} depths and {self.branching} ranks are needed, "
                f"not {tuple(candidates.shape[1:])}"
            )
        depth = torch.tensor(self.depths, dtype=torch.long, device=candidates.device) - 1
        rank = torch.tensor(self.ranks, dtype=torch.long, device=candidates.device)
        return self.with_tokens(candidates[:, depth, rank])

    def with_tokens(self, tokens: Tensor, q: Tensor | None = None) -> TokenTree:
        """The tree with a token [B, N] at every node; q [B, N, V] if they were drawn."""
        if tokens.shape[1:] != (self.size,):
            raise ValueError(f"{self.size} tokens a row are needed, not {tuple(tokens.shape[1:])}")
        parents = torch.tensor(self.parents, dtype=torch.long, device=tokens.device)
        return TokenTree(tokens, parents.expand(tokens.shape), q, is_chain=self.is_chain)


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


# Shapes by hand.


def from_paths(paths: Iterable[Sequence[int]]) -> Shape:
    """Medusa's notation, in any order: from_paths([(0,), (0, 0), (1,)])."""
    return Shape(tuple(sorted((tuple(p) for p in paths), key=_order)))


def chain(num_tokens: int) -> Shape:
    """One candidate a node: what speculative decoding began with."""
    return kary(1, num_tokens)


def kary(branching: int, depth: int, max_nodes: int | None = None) -> Shape:
    """``branching`` children a node, ``depth`` levels; of these the first ``max_nodes`` nodes."""
    if branching < 1 or depth < 0:
        raise ValueError(f"branching must be >= 1 and depth >= 0, not {branching} and {depth}")
    limit = MAX_NODES if max_nodes is None else max_nodes
    paths: list[Path] = []
    level: list[Path] = [()]
    for _ in range(depth):
        ranks = range(min(branching, limit + 1))
        level = [(*path, rank) for path in level[:limit] for rank in ranks]
        paths += level
        if len(paths) > limit:
            break
    if max_nodes is None and len(paths) > limit:
        raise ValueError(f"this tree has more than {limit} nodes: give max_nodes")
    return Shape(tuple(paths[:max_nodes]))


def cartesian(sizes: Sequence[int]) -> Shape:
    """Every combination: the best sizes[d] candidates of depth d + 1 below each node above.

    Medusa's dense tree (2401.10774, section 2.1.2): sum over d of the product of sizes[:d + 1].
    """
    if any(size < 1 for size in sizes):
        raise ValueError(f"every depth needs one candidate or more, not {tuple(sizes)}")
    if sum(np.cumprod(sizes, dtype=float)) > MAX_NODES:
        raise ValueError(f"this tree has more than {MAX_NODES} nodes")
    levels = [itertools.product(*map(range, sizes[:d])) for d in range(1, len(sizes) + 1)]
    return from_paths(itertools.chain.from_iterable(levels))


# The best shape.


def rates(p: Any) -> np.ndarray:
    """[D, K] acceptance by depth and rank from [K] (D = 1: alike at every depth) or [D, K]."""
    table = np.atleast_2d(np.asarray(p, dtype=float))
    if table.ndim != 2 or table.size == 0:
        raise ValueError("acceptance rates are a table [rank] or [depth, rank]")
    if not ((table >= 0) & (table <= 1)).all():
        raise ValueError("acceptance rates are probabilities")
    if (table.sum(1) > 1 + 1e-6).any():
        raise ValueError("at most one sibling is accepted: the rates of all ranks sum to at most 1")
    return table


def _deepest(p: Any, depth: int | None, num_nodes: int) -> int:
    """How many levels there can be: a table by depth ends where it ends."""
    known = np.shape(p)[0] if np.ndim(p) == 2 else num_nodes
    return min(known, num_nodes if depth is None else depth)


def node_rates(shape: Shape, p: Any) -> np.ndarray:
    """[N] probability that each node is accepted: the product of the rates along its path.

    p: [K] by rank or [D, K] by depth and rank; beyond the table nothing is accepted.
    """
    table = rates(p)
    found: list[float] = []
    for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths, strict=True):
        row = depth - 1 if np.ndim(p) == 2 else 0
        inside = row < table.shape[0] and rank < table.shape[1]
        above = found[parent] if parent >= 0 else 1.0
        found.append(above * float(table[row, rank]) if inside else 0.0)
    return np.array(found)


def expected_tokens(shape: Shape, p: Any) -> float:
    """Tokens a round, the target's own among them: 1 + the sum of ``node_rates``.

    Sequoia 2402.12374, Prop. 3.4. Exact where acceptance depends on rank (and depth) alone.
    """
    return 1.0 + float(node_rates(shape, p).sum())


def medusa_greedy(accuracy: Any, num_nodes: int) -> Shape:
    """Adds, again and again, the node that is likeliest to be accepted among those within reach.

    accuracy [D, K]: how often candidate r of depth d is right (Medusa 2401.10774, section 2.3.3).
    A node is never likelier than its parent, so the n likeliest nodes of all are a tree already,
    and this one is optimal. If the rates fall with the rank, ``sequoia`` finds no better.
    """
    table = rates(accuracy)
    deep = _deepest(accuracy, None, num_nodes)
    heap: list[tuple[float, int, Path]] = []
    paths: list[Path] = []

    def offer(path: Path, value: float) -> None:
        if len(path) < deep:
            row = table[min(len(path), len(table) - 1)]
            for rank, p in enumerate(row):
                heapq.heappush(heap, (-value * p, len(path) + 1, (*path, rank)))

    offer((), 1.0)
    while heap and len(paths) < num_nodes:
        value, _, path = heapq.heappop(heap)
        if value == 0:  # what is never accepted is not worth reading
            break
        paths.append(path)
        offer(path, -value)
    return from_paths(paths)


def path_values(ranks: Any, most: int, max_nodes: int = 128) -> dict[Path, float]:
    """How often each path of ranks was the text's own: the likeliest paths, best first.

    ranks [D, M]: at M places of a text, at which rank a draft held each of the next D tokens;
    ``most`` and above: not among its candidates. Counted jointly, so that nothing is assumed:
    where a head is right, the next one often is too, which products of accuracies by depth
    (``medusa_greedy``, ``sequoia``) cannot know. A path is never more frequent than its parent,
    so the first n of them are a tree for every n, and the best of n nodes on that text.
    """
    table = np.asarray(ranks)
    if table.ndim != 2 or not table.shape[1]:
        raise ValueError("ranks are a table [depth, place] with one place or more")
    found: list[tuple[float, int, Path]] = []
    live = np.arange(table.shape[1])  # places whose path is a draft's candidate so far
    which = np.zeros(len(live), dtype=np.int64)  # of ``paths``, each place's own
    paths: list[Path] = [()]
    for row in table:
        inside = row[live] < most
        live, which = live[inside], which[inside]
        codes, which, counts = np.unique(
            which * most + row[live], return_inverse=True, return_counts=True
        )
        paths = [(*paths[int(c) // most], int(c) % most) for c in codes]
        found += [(-n / table.shape[1], len(p), p) for p, n in zip(paths, counts, strict=True)]
    return {path: -value for value, _, path in sorted(found)[:max_nodes]}


def sequoia(
    p: Any, num_nodes: int, depth: int | None = None, branching: int | None = None
) -> Shape:
    """The tree of at most ``num_nodes`` nodes, and that depth and branching, with most tokens.

    p [K]: probability that the i-th sibling is the accepted one; or [D, K], by depth. Sequoia's
    dynamic programme (2402.12374) over nodes, siblings and levels; siblings have the ranks 0, 1,
    2, ... whatever their rates.
    """
    if num_nodes < 0:
        raise ValueError(f"num_nodes must be >= 0, not {num_nodes}")
    best = _Optimum(p, num_nodes, branching)
    deep = _deepest(p, depth, num_nodes)
    size = int(best.subtree(0, deep).argmax())  # the smallest of the best
    return from_paths(best.paths(0, deep, size))


class _Optimum:
    """Sequoia's tables, filled as they are asked for.

    A subtree of n nodes counts its own root: T[n] = 1 + max over b of F_b[n - 1], where F_b[n] is
    the best that b children with n nodes in all bring: F_b[n] = max over m of F_{b-1}[n - m] +
    p_b T'[m], T' being the table one level further down.
    """

    def __init__(self, p: Any, num_nodes: int, branching: int | None) -> None:
        self.table = rates(p)[:, :branching]
        self.by_depth = np.ndim(p) == 2
        n = np.arange(num_nodes + 2)
        self.rest = n[:, None] - n  # [n, m] nodes left for the siblings before
        self.values: dict[tuple[int, int], np.ndarray] = {}
        self.choices: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def key(self, level: int, deep: int) -> tuple[int, int]:
        return (level if self.by_depth else 0), deep

    def subtree(self, level: int, deep: int) -> np.ndarray:
        """[num_nodes + 2] T[n] for a root at ``level`` with ``deep`` levels below it."""
        key = self.key(level, deep)
        if key not in self.values:
            self.values[key] = self._fill(*key)
        return self.values[key]

    def _fill(self, level: int, deep: int) -> np.ndarray:
        size = len(self.rest)
        forest = np.full(size, -np.inf)
        forest[0] = 0.0
        forests, takes = [forest], [np.zeros(size, int)]
        if deep > 0:
            below = self.subtree(level + 1, deep - 1)
            for p in self.table[level]:
                gain = np.where(below > 0, p * np.maximum(below, 0), -np.inf)  # [m]
                options = np.where(self.rest >= 0, forest[self.rest] + gain, -np.inf)  # [n, m]
                takes.append(options.argmax(1))
                forest = options.max(1)
                forests.append(forest)
        every = np.stack(forests)  # [b, n]
        self.choices[level, deep] = (every.argmax(0), np.stack(takes))
        return np.concatenate([[-np.inf], 1 + every.max(0)[:-1]])

    def paths(self, level: int, deep: int, size: int) -> list[Path]:
        """The nodes below the root of the best subtree of ``size`` nodes."""
        self.subtree(level, deep)
        branches, takes = self.choices[self.key(level, deep)]
        found: list[Path] = []
        left = size - 1
        for rank in range(int(branches[left]), 0, -1):
            take = int(takes[rank, left])
            found += [(rank - 1,)]
            found += [(rank - 1, *path) for path in self.paths(level + 1, deep - 1, take)]
            left -= take
        return found


@dataclass(frozen=True)
class Plan:
    """A shape and what it promises: tokens a round, and speed against plain decoding."""

    shape: Shape
    tokens: float
    speedup: float


def best_shape(
    p: Any,
    t: Callable[[int], float],
    draft_step_s: float,
    *,
    max_nodes: int = 64,
    max_depth: int | None = None,
    branching: int | None = None,
    round_s: float = 0.0,
) -> Plan:
    """The shape with the largest speed-up on a machine: Sequoia's E(n, d) / (t(n) + d c).

    p: acceptance rates as in ``sequoia``. t(m): seconds of a target pass over m tokens; a tree of
    n nodes is a pass over n + 1, the root among them. draft_step_s: seconds a level takes to
    draft, c t(1) in the paper's words. round_s: seconds of a round that no shape changes (a draft
    that makes all levels at once, the verifier). Where nothing pays, the empty shape: speed-up 1.
    """
    best = _Optimum(p, max_nodes, branching)
    plain = t(1)
    seconds = np.array([t(n + 1) for n in range(max_nodes + 1)])
    won, place = 1.0, None
    for deep in range(1, _deepest(p, max_depth, max_nodes) + 1):
        tokens = best.subtree(0, deep)[1:]  # by nodes beside the root
        speedups = tokens * plain / (seconds + deep * draft_step_s + round_s)
        size = int(speedups[1:].argmax()) + 1
        if speedups[size] > won:
            won, place = float(speedups[size]), (deep, size)
    if place is None:
        return Plan(Shape(()), 1.0, 1.0)
    deep, size = place
    shape = from_paths(best.paths(0, deep, size + 1))
    return Plan(shape, float(best.subtree(0, deep)[size + 1]), won)


def best_of(
    values: Mapping[Path, float],
    t: Callable[[int], float],
    draft_step_s: float,
    *,
    max_depth: int | None = None,
    round_s: float = 0.0,
) -> Plan:
    """``best_shape`` from ``path_values``: the best depth, and the likeliest paths within it."""
    deepest = max((len(path) for path in values), default=0)
    plain, plan = t(1), Plan(Shape(()), 1.0, 1.0)
    for deep in range(1, min(deepest, deepest if max_depth is None else max_depth) + 1):
        within = [path for path in values if len(path) <= deep]
        tokens = 1.0
        for size, path in enumerate(within, 1):
            tokens += values[path]
            speedup = tokens * plain / (t(size + 1) + deep * draft_step_s + round_s)
            if speedup > plan.speedup:
                plan = Plan(from_paths(within[:size]), tokens, speedup)
    return plan
