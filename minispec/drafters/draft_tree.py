"""A draft model grows a tree, a level a pass (SpecInfer 2305.09781; Sequoia 2402.12374).

The draft model reads all nodes of a level at once, each seeing its own path only, and names the
candidates after each of them. Those that have no children in the shape are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache
from ..models import LanguageModel, load_target
from ..shapes import Level, Shape
from ..tree import TokenTree
from .base import Kept, Rows
from .draft_model import DraftModel
from .grow import Grow, grow

CHOICES = ("top", "draw")
Pick = Callable[[Tensor, Level], tuple[Tensor, Tensor | None]]
Read = Callable[[Tensor], Tensor]


def expand(shape: Shape, logits: Tensor, pick: Pick, read: Read) -> TokenTree:
    """Grows a tree of a static shape, level by level; how a level is read is the drafter's matter.

    logits [B, 1, V] after the root. pick(logits [B, w, V], level) gives the tokens [B, n] of a
    level's nodes and the laws [B, n, V] they were drawn from, or None; read(tokens [B, w]) the
    logits [B, w, V] after those of them that have children.
    """
    tokens, laws = [], []
    for level in shape.levels:
        chosen, q = pick(logits, level)
        tokens.append(chosen)
        laws += [] if q is None else [q]
        if level.inner:
            logits = read(chosen[:, level.inner])
    return shape.with_tokens(torch.cat(tokens, 1), torch.cat(laws, 1) if laws else None)


def reading_plan(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """How the I nodes that have children are read, level behind level.

    sees [I, I]: who sees whom; steps [I]: how far behind the root's children each stands; place
    [N + 1]: each node's place among the I, -1 for those that are not read and for no node (-1).
    """
    inner = list(shape.inner)
    ancestors = shape.with_tokens(torch.zeros(1, shape.size).long()).ancestors()[0]
    sees = ancestors[inner][:, inner]
    place = torch.full((shape.size + 1,), -1)
    place[inner] = torch.arange(len(inner))
    return sees, sees.sum(1) - 1, place


class TreeDraft(DraftModel):
    """Drafts a tree with any causal language model, of a fixed shape or one that grows.

    tree: a ``Shape`` (see ``minispec.shapes``), or ``Grow``: EAGLE-2's, context by context.
    choose: "top" takes each node's likeliest candidates, by rank: point masses, nothing drawn.
    "draw" draws them without replacement from the draft's law under the target's sampling
    settings, in the order in which they then are tried; at temperature 0 that is "top". Only a
    fixed shape can be drawn.
    """

    def __init__(self, model: Any, tree: Shape | Grow, choose: str = "top") -> None:
        if not isinstance(tree, Shape | Grow) or (isinstance(tree, Shape) and tree.size == 0):
            raise ValueError(f"tree must be a Shape of one node or more, or Grow, not {tree!r}")
        if choose not in CHOICES:
            raise ValueError(f"choose must be one of {', '.join(CHOICES)}, not {choose!r}")
        if choose == "draw" and not isinstance(tree, Shape):
            raise ValueError("a tree that grows takes the likeliest candidates: choose='top'")
        if choose == "draw" and isinstance(tree, Shape) and not tree.dense:
            raise ValueError(
                "drawn siblings have the ranks 0, 1, 2, ...: this shape leaves some out"
            )
        self.model = load_target(model)
        self.tree, self.choose = tree, choose
        self.num_tokens = tree.depth
        self.max_nodes, self.wide, self.num_inner = (
            (tree.size, tree.branching, len(tree.inner))
            if isinstance(tree, Shape)
            else (min(tree.num_nodes, tree.most), tree.top_k, tree.read)
        )

    def check(self, target: LanguageModel, longest: int) -> None:
        super().check(target, longest)
        size = min(self.model.vocab_size, target.vocab_size)
        if self.wide > size:
            raise ValueError(f"the tree asks for {self.wide} candidates of a vocabulary of {size}")

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        self.vocab_size = target.vocab_size
        self.cache = self.model.new_cache(rows.batch, rows.tokens.shape[1] + self.num_inner + 1)
        if isinstance(self.tree, Shape):
            plan = reading_plan(self.tree)
            self.sees, self.steps, place = (part.to(rows.tokens.device) for part in plan)
            self.place = place.expand(rows.batch, -1)  # [B, N + 1]

    def propose(self, rows: Rows) -> TokenTree:
        self.cache.set_lengths(torch.minimum(self.cache.lengths_host, rows.host - 1))
        self.read_prompt(rows)
        self.num_read = 0
        logits = self.read_text(*self.unread(rows))
        if isinstance(self.tree, Grow):
            logits = logits[..., : self.vocab_size]
            tree, self.place = grow(logits, self.tree, self.read_grown, self.named, ~rows.stopped)
            return tree
        top = self.choose == "top" or rows.sampling.greedy
        pick: Pick = self.pick_top if top else partial(self.draw, rows)
        return expand(self.tree, logits, pick, self.read)

    def pick_top(self, logits: Tensor, level: Level) -> tuple[Tensor, None]:
        """The likeliest candidates of each parent, by rank: logits [B, w, V] to tokens [B, n]."""
        best = self.best(logits, max(level.ranks) + 1)
        return best[:, level.places, level.ranks], None

    def draw(self, rows: Rows, logits: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        """Candidates without replacement: tokens [B, n] and each one's own law [B, n, V]."""
        tokens, laws = [], []
        for q, count in zip(self.law(logits, rows.sampling).unbind(1), level.counts, strict=True):
            drawn, drawn_from = rows.rng.draw_siblings(q, count)
            tokens.append(drawn)
            laws.append(drawn_from)
        return torch.cat(tokens, 1), torch.cat(laws, 1)

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next w of the nodes that have children: tokens [B, w] to logits [B, w, V]."""
        batch, begin, end = len(tokens), self.num_read, self.num_read + tokens.shape[1]
        self.num_read = end
        steps = self.steps[:end].expand(batch, -1)
        sees = self.sees[begin:end, :end].expand(batch, -1, -1)
        return self.model.forward(self.cache, self.readable(tokens), steps, sees).logits

    def read_grown(self, tokens: Tensor, above: Tensor, steps: Tensor, sees: Tensor) -> Tensor:
        """Reads k nodes of a growing tree: tokens [B, k] to logits [B, k, V]."""
        logits = self.model.forward(self.cache, self.readable(tokens), steps, sees).logits
        return logits[..., : self.vocab_size]

    def named(self, ids: Tensor) -> Tensor:
        """Draft ids as the target's."""
        return ids if self.model.token_map is None else self.model.token_map[ids]

    def observe(self, rows: Rows, kept: Kept) -> None:
        """The accepted nodes that were read move down behind the root, to be read no more."""
        none = self.place.shape[1] - 1  # the column of no node, and of one that another drafted
        index = kept.path.masked_fill(kept.path < 0, none).clamp(max=none)
        path = self.place.gather(1, index)  # [B, N]: a path's last node may not have been read
        count = (path >= 0).sum(1).cpu()
        self.cache.set_lengths(self.cache.lengths_host - 1)  # ``keep`` counts from the root on
        self.cache.keep(path, count + 1)
