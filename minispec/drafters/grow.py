"""EAGLE-2's tree: it grows where the draft is confident (arXiv 2406.16858, section 4).

Whatever can name the likeliest tokens after a node can grow one: a draft model, an EAGLE head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tree import TokenTree
from .base import at_least_one

# (tokens [B, k], above [B, k], steps [B, m], sees [B, k, m]) to the logits [B, k, V] after them.
# above: which of the nodes read last each hangs on; steps, sees: as in ``LanguageModel.forward``.
Read = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Name = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Grow:
    """How a tree grows.

    Expand: ``depth`` times, the ``top_k`` most valuable nodes of the last level get their
    ``top_k`` likeliest children; a node's value is the product of the draft's probabilities along
    its path, which is the draft's own guess at how likely it is to be accepted. Rerank: of all of
    these the ``num_nodes`` most valuable are proposed. A child is never worth more than its
    parent, and of equals the shallower goes first, so what is left is a tree. (The authors' code
    counts the root as a node and its children as no level: its 60, 7, 10 is ``Grow(59, 10, 8)``.)

    Two floors, 0 in the paper, save time where the draft is in doubt: a node worth less than
    ``min_value`` is not proposed, and no level is read whose nodes are together worth less than
    ``min_gain``. A pass is as wide as its widest row and a level is read for all rows, so in a
    batch the row that hopes for most decides; on a GPU each floor costs a wait.
    """

    num_nodes: int = 16
    top_k: int = 4
    depth: int = 5
    min_value: float = 0.0
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "top_k", "depth"):
            at_least_one(name, getattr(self, name))
        for name in ("min_value", "min_gain"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], not {getattr(self, name)!r}")

    @property
    def most(self) -> int:
        """Nodes that are looked at before the rerank."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def read(self) -> int:
        """Nodes that the draft itself reads."""
        return (self.depth - 1) * self.top_k


def grow(
    logits: Tensor, spec: Grow, read: Read, name: Name, live: Tensor | None = None
) -> tuple[TokenTree, Tensor]:
    """Expansion and rerank, from the logits [B, 1, V] after the root.

    name: the draft's ids as the target's. live: rows [B] that go on; None: all. The others have no
    say in how far the tree grows. Returns the tree and, [B, N + 1], each node's place
    among those that were read, in the order of reading; -1 for the others and for no node.
    """
    batch, k, device = len(logits), spec.top_k, logits.device
    value = torch.zeros(batch, 1, device=device)  # log of the path's product, [B, w]
    node = torch.full((batch, 1), -1, device=device)  # the frontier's place among all nodes
    seen = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B, w, read so far]
    tokens: list[Tensor] = []
    values: list[Tensor] = []
    parents: list[Tensor] = []
    read_at: list[Tensor] = []
    for depth in range(1, spec.depth + 1):
        best = logits.float().log_softmax(-1).topk(k, dim=-1)  # [B, w, k]
        child = (value.unsqueeze(-1) + best.values).flatten(1)  # [B, w * k]
        first = sum(t.shape[1] for t in tokens)
        tokens.append(name(best.indices).flatten(1))
        values.append(child)
        parents.append(node.repeat_interleave(k, 1))
        read_at.append(torch.full_like(parents[-1], -1))
        if depth == spec.depth:
            break
        value, place = child.topk(k, dim=-1)  # the frontier: [B, k] among the children
        if spec.min_gain and float(_of(live, value.exp().sum(1)).max()) < spec.min_gain:
            break
        number = torch.arange((depth - 1) * k, depth * k, device=device).expand(batch, k)
        read_at[-1].scatter_(1, place, number)
        node = first + place
        above = place // k  # which of the nodes read last each hangs on
        path = seen.gather(1, above.unsqueeze(-1).expand(-1, -1, seen.shape[-1]))
        own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
        seen = torch.cat([path, own], -1)
        steps = torch.arange(depth, device=device).repeat_interleave(k).expand(batch, -1)
        logits = read(tokens[-1].gather(1, place), above, steps, seen)
    worth, num = torch.cat(values, 1), spec.num_nodes
    if spec.min_value:
        num = min(num, int(_of(live, (worth.exp() >= spec.min_value).sum(1)).max()))
    tree, order = rerank(torch.cat(tokens, 1), worth, torch.cat(parents, 1), num)
    return tree, F.pad(torch.cat(read_at, 1).gather(1, order), (0, 1), value=-1)


def _of(live: Tensor | None, values: Tensor) -> Tensor:
    """values [B] with 0 for the rows that have stopped."""
    return values if live is None else values * live


def rerank(
    tokens: Tensor, values: Tensor, parents: Tensor, num_nodes: int
) -> tuple[TokenTree, Tensor]:
    """The ``num_nodes`` most valuable of all nodes, as a tree; all [B, M], parents before children.

    Returns it with each node's place [B, N] among all. The order is stable: of equal values the
    earlier, and so the shallower, node comes first, and no node is kept whose parent is not (a
    draft probability of 1 makes them equal).
    """
    order = torch.argsort(values, dim=1, descending=True, stable=True)[:, :num_nodes]
    order = order.sort(1).values  # back to topological order; siblings stay in order of rank
    place = torch.full((len(values), values.shape[1] + 1), -1, device=values.device)
    number = torch.arange(order.shape[1], device=values.device).expand_as(order)
    place.scatter_(1, order, number)  # the last column stays -1: the root's
    above = parents.gather(1, order) % place.shape[1]  # -1 is the last column
    return TokenTree(tokens.gather(1, order), place.gather(1, above)), order
