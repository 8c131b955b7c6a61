"""Two drafters in one tree: a trained one's candidates, and beside them a chain from the text.

A head knows the language and a look-up knows the document. A pass over a few more nodes costs
little, so both propose, and where they agree their nodes are one.
"""

from __future__ import annotations

import copy

import torch

from ..cache import KVCache
from ..models import LanguageModel
from ..tree import ROOT, TokenTree
from .base import Drafter, Kept, Rows
from .draft_model import DraftModel
from .draft_tree import TreeDraft


class Merged(Drafter):
    """Drafts ``tree``'s nodes and those of ``chain`` that are not among them.

    tree: any drafter whose candidates are chosen (point masses). chain: one that proposes chosen
    chains and keeps nothing of them, such as ``PromptLookup``. What both chose is one node, so
    nothing is read twice.
    """

    def __init__(self, tree: Drafter, chain: Drafter) -> None:
        if not isinstance(tree, Drafter) or not isinstance(chain, Drafter):
            raise TypeError(
                "two drafters are merged: one that drafts trees, one that drafts chains"
            )
        if type(tree) is DraftModel:
            raise ValueError(
                "DraftModel takes every accepted token for its own: merge "
                "TreeDraft(model, chain(num_tokens))"
            )
        if type(chain) in (DraftModel, TreeDraft, Merged):
            raise ValueError(
                f"{type(chain).__name__} cannot be the chain: its cache counts its own nodes alone"
            )
        self.tree, self.chain = tree, chain
        self.max_nodes = tree.max_nodes + chain.max_nodes
        self.taps = tuple(dict.fromkeys((*tree.taps, *chain.taps)))
        self.wants_features = tree.wants_features or chain.wants_features

    def check(self, target: LanguageModel, longest: int) -> None:
        for drafter in (self.tree, self.chain):
            drafter.check(target, longest)

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        # What start() sets belongs to one call: each part is copied as this drafter was.
        self.tree, self.chain = copy.copy(self.tree), copy.copy(self.chain)
        for drafter in (self.tree, self.chain):
            drafter.start(target, rows, cache, prompt)

    @property
    def off_clock(self) -> float:  # type: ignore[override]
        return self.tree.off_clock + self.chain.off_clock

    def propose(self, rows: Rows) -> TokenTree:
        return merge(self.tree.propose(rows), self.chain.propose(rows))

    def observe(self, rows: Rows, kept: Kept) -> None:
        """``tree``'s nodes stand first, under their own numbers."""
        self.tree.observe(rows, kept)
        self.chain.observe(rows, kept)


def merge(tree: TokenTree, chain: TokenTree) -> TokenTree:
    """``tree``, and behind its N nodes the nodes of ``chain`` that it does not hold already.

    The chain is followed down the tree as far as their tokens agree, row by row; what is left of
    it hangs there. Raises ValueError for drawn candidates: a node that two have drawn has no one
    law.
    """
    if tree.q is not None or chain.q is not None or not chain.is_chain:
        raise ValueError("only chosen candidates can be merged: a tree, and a chain")
    batch, num = tree.tokens.shape
    length = chain.num_nodes
    here = tree.tokens.new_full((batch,), ROOT)  # [B] the node reached
    follows = chain.is_valid  # [B, K]
    agreed = torch.zeros_like(here)  # [B] how many of the chain's tokens the tree holds
    for step in range(length if num else 0):
        same = (tree.parents == here.unsqueeze(1)) & (tree.tokens == chain.tokens[:, step, None])
        same = same & tree.is_valid & (follows[:, step] & (agreed == step)).unsqueeze(1)
        here = torch.where(same.any(1), same.long().argmax(1), here)
        agreed = agreed + same.any(1)
    # The rest moves up, so that padding stays behind: [B, K] which of the chain's nodes.
    place = torch.arange(length, device=here.device) + agreed.unsqueeze(1)
    tokens = chain.tokens.gather(1, place.clamp(max=max(length - 1, 0)))
    valid = follows.gather(1, place.clamp(max=max(length - 1, 0))) & (place < length)
    parents = torch.arange(num - 1, num + length - 1, device=here.device).repeat(batch, 1)
    parents[:, :1] = here.unsqueeze(1)
    return TokenTree(
        torch.cat([tree.tokens, tokens], 1),
        torch.cat([tree.parents, parents], 1),
        None,
        torch.cat([tree.is_valid, valid], 1),
    )
