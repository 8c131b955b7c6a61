"""The rule: which drafted tokens are kept, and what the target says after them.

Speculative sampling (Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318) and its
form for several candidates at a node (SpecInfer 2305.09781, Algorithm 2) are one walk down the
tree. At each node stands a residual law R, at first the target's own law there:

    for each child, in order, with token x drawn from q:
        accept with probability min(1, R(x) / q(x))   and go down to it,
        else R <- norm(max(R - q, 0))                 and try the next sibling;
    no child accepted: draw the next token from R.

A child that was chosen and not drawn has q = a point mass, so R(x) / q(x) = R(x) and the residual
is R without x. At temperature 0 the target's law is a point mass. So greedy and sampling, chains
and trees, drawn and chosen candidates need no case of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .sampling import Law, Random
from .tree import ROOT, TokenTree


@dataclass
class Verdict:
    """What one walk decided, for B rows.

    path        [B, N] accepted nodes in order, then -1
    accepted    [B] how many of them
    next_token  [B] the token after them: the bonus token where the path was accepted to its end,
                the correction where a candidate was rejected
    tried       [B] positions at which there was a candidate to accept; accepted, or accepted + 1
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    tried: Tensor


class Verifier(Protocol):
    """A rule: (tree, the target's law, source of chance) to a Verdict."""

    def __call__(self, tree: TokenTree, law: Law, rng: Random) -> Verdict: ...


def speculative(tree: TokenTree, law: Law, rng: Random) -> Verdict:
    """Exact: the emitted tokens follow the target's law, whatever the drafter proposed."""
    batch, num = tree.tokens.shape
    device = tree.tokens.device
    rows, valid = torch.arange(batch, device=device), tree.is_valid
    lazy = device.type == "cpu"  # asking the device "any?" is free there and a wait elsewhere

    current = torch.full((batch,), ROOT, device=device)  # the node each row stands at
    accepted = torch.zeros_like(current)
    tried = torch.zeros_like(current)
    path = torch.full((batch, num), ROOT, device=device)
    residual = law.at(current)  # R: [B, V]

    for i in range(num):  # topological order: parents before children, siblings as drawn
        here = valid[:, i] & (tree.parents[:, i] == current)
        if lazy and not here.any():
            continue
        x = tree.tokens[:, i].clamp(min=0)
        r_x = residual[rows, x]
        q_x = torch.ones_like(r_x) if tree.q is None else tree.q[rows, i, x]
        # Rows that do not stand at this node's parent toss a coin that cannot fall heads.
        accept = rng.coin(torch.where(here, r_x / q_x, torch.zeros_like(r_x)))
        reject = here & ~accept

        step = accepted.clamp(max=num - 1)
        path[rows, step] = torch.where(accept, i, path[rows, step])
        tried = torch.where(here & (tried == accepted), tried + 1, tried)
        accepted = accepted + accept
        current = torch.where(accept, i, current)
        if not lazy or reject.any():
            left = leftover(residual, drawn_from(tree, i, residual))
            residual = torch.where(reject.unsqueeze(-1), left, residual)
        if not lazy or accept.any():
            residual = torch.where(accept.unsqueeze(-1), law.at(current), residual)

    return Verdict(path, accepted, rng.draw(residual), tried)


def drawn_from(tree: TokenTree, i: int, like: Tensor) -> Tensor:
    """[B, V] the law q that node i was drawn from; a point mass where it was chosen."""
    if tree.q is not None:
        return tree.q[:, i]
    return torch.zeros_like(like).scatter_(1, tree.tokens[:, i, None].clamp(min=0), 1.0)


def leftover(residual: Tensor, q: Tensor) -> Tensor:
    """norm(max(R - q, 0)) of [B, V] laws: what is still owed after a draw from q was rejected.

    Where R == q up to rounding nothing is owed: a rejection there has probability 0 and happens
    only by rounding, and R itself is the right answer.
    """
    left = (residual - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, residual)  # NaN > 0 is False


VERIFIERS: dict[str, Verifier] = {"speculative": speculative}
