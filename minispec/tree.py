"""The token tree: what a drafter proposes and the target reads in one pass.

One row of a tree is a list of drafted tokens in *topological order*: a parent stands before its
children, and siblings stand in the order in which they were drawn. ``parents`` says where each
token hangs; -1 is the root, the last committed token. A chain is a tree with one child a node;
plain decoding is the tree with no nodes at all.

Token trees: SpecInfer (arXiv 2305.09781, section 4); the mask is its "topology-aware" causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """B trees of at most N drafted nodes each.

    tokens   [B, N] the drafted token of each node
    parents  [B, N] index of its parent node, ROOT (-1) for a child of the root; parents[b, i] < i
    q        [B, N, V] the law that each node was drawn from, or None where the nodes were chosen
             and not drawn (argmax, lookup): a chosen token is a point mass, whatever its score was
    valid    [B, N] False for the padding of rows with fewer nodes, or None: all N are real
    is_chain the caller's word that parents are -1, 0, 1, ... : saves moving the cache about
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None
    valid: Tensor | None = None
    is_chain: bool = False

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> TokenTree:
        """The tree with no nodes: a round with it is one step of plain decoding."""
        none = torch.empty(batch, 0, dtype=torch.long, device=device)
        return cls(none, none, is_chain=True)

    @classmethod
    def chain(
        cls, tokens: Tensor, q: Tensor | None = None, valid: Tensor | None = None
    ) -> TokenTree:
        """A chain of K tokens a row: tokens [B, K], q [B, K, V] or None, valid [B, K] or None."""
        batch, num = tokens.shape
        parents = torch.arange(-1, num - 1, device=tokens.device).expand(batch, num)
        return cls(tokens, parents, q, valid, is_chain=True)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_valid(self) -> Tensor:
        """[B, N] bool, also where ``valid`` was left out."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: entry (i, j) is True where j is i or an ancestor of i."""
        batch, num = self.tokens.shape
        eye = torch.eye(num, device=self.tokens.device)
        if self.is_chain or num < 2:
            return torch.tril(torch.ones_like(eye)).bool().expand(batch, num, num)
        # One step up, as a matrix: S[i, j] = 1 where j is i or i's parent. Powers of S climb
        # further; squaring reaches every ancestor in log2(N) products.
        columns = torch.arange(num, device=self.tokens.device)
        reach = eye + (self.parents.unsqueeze(-1) == columns).to(eye.dtype)  # [B, N, N]
        for _ in range((num - 1).bit_length()):
            reach = (reach @ reach).clamp_(max=1)
        return reach.bool()

    def depths(self) -> Tensor:
        """[B, N] depth of each node; the root's children have depth 1."""
        return self.ancestors().sum(-1)

    def with_root(self) -> tuple[Tensor, Tensor]:
        """The tree as the target reads it, root first.

        Returns depth [B, N+1] (root 0) and visible [B, N+1, N+1] bool: who sees whom. Every node
        sees the root, itself and its ancestors; the root sees itself.
        """
        batch, num = self.tokens.shape
        visible = self.tokens.new_zeros(batch, num + 1, num + 1, dtype=torch.bool)
        visible[:, :, 0] = True
        visible[:, 1:, 1:] = self.ancestors()
        return visible.sum(-1) - 1, visible

    def tidy(self) -> TokenTree:
        """Padding as the target can read it: token 0 on the root, whatever the drafter left."""
        if self.valid is None:
            return self
        return replace(
            self,
            tokens=self.tokens.masked_fill(~self.valid, 0),
            parents=self.parents.masked_fill(~self.valid, ROOT)
            if not self.is_chain
            else self.parents,
        )

    def cut(self, max_depth: Tensor) -> TokenTree:
        """Drops nodes deeper than max_depth [B]: they could not be emitted any more."""
        keep = self.is_valid & (self.depths() <= max_depth.unsqueeze(-1))
        return replace(self, valid=keep)

    def trim(self) -> TokenTree:
        """Without the last columns that are padding in every row: no pass need read them."""
        if self.valid is None:
            return self
        used = int((self.valid.any(0).nonzero() + 1).max()) if bool(self.valid.any()) else 0
        if used == self.num_nodes:
            return self
        q = None if self.q is None or not used else self.q[:, :used]
        return TokenTree(
            self.tokens[:, :used], self.parents[:, :used], q, self.valid[:, :used], self.is_chain
        )

    def check(self, vocab_size: int) -> None:
        """Raises ValueError with the reason if this is no token tree over this vocabulary."""
        batch, num = self.tokens.shape
        if self.tokens.dtype != torch.long or self.parents.dtype != torch.long:
            raise ValueError("a TokenTree needs int64 tokens and parents")
        if self.parents.shape != self.tokens.shape or self.is_valid.shape != self.tokens.shape:
            raise ValueError("tokens, parents and valid of a TokenTree must have the same shape")
        if self.q is not None and self.q.shape != (batch, num, vocab_size):
            raise ValueError(
                f"q has shape {tuple(self.q.shape)}; it needs {(batch, num, vocab_size)}, "
                "a law over the target's whole vocabulary for every node"
            )
        if num == 0:
            return
        valid = self.is_valid
        bad = valid & ((self.tokens < 0) | (self.tokens >= vocab_size))
        if bad.any():
            token = int(self.tokens[bad][0])
            raise ValueError(f"drafted token {token} is outside the vocabulary of {vocab_size}")
        order = torch.arange(num, device=self.tokens.device)
        if ((self.parents < ROOT) | (self.parents >= order)).logical_and(valid).any():
            raise ValueError("a node's parent must stand before it: -1 <= parents[b, i] < i")
        above = self.parents.clamp(min=0)
        if (valid & (self.parents >= 0) & ~valid.gather(1, above)).any():
            raise ValueError("a node hangs on a node that is not valid: the tree is not connected")
        if self.q is not None:
            chosen = self.q.gather(2, self.tokens.clamp(0).unsqueeze(-1)).squeeze(-1)
            if (valid & ~(chosen > 0)).any():
                raise ValueError("a node's token has probability 0 (or NaN) in the law q it names")
            total = self.q.sum(-1)
            if (valid & ~((total - 1).abs() < 1e-3)).any() or bool((self.q < 0).any()):
                raise ValueError("q is no law: its probabilities must be >= 0 and sum to 1")
