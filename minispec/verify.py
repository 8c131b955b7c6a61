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
from functools import partial
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
    return _walk(tree, law, rng, lenience=1.0)


def lenient(lenience: float = 0.5) -> Verifier:
    """Lossy: the same walk with the target's law raised to p / lenience (Leviathan et al., A.5).

    More is accepted, and no token's probability grows beyond p / lenience. 1 is exact.
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1], not {lenience!r}")
    return partial(_walk, lenience=lenience)


def _walk(tree: TokenTree, law: Law, rng: Random, lenience: float) -> Verdict:
    """The rule of this module's docstring, for B rows at once."""
    batch, num = tree.tokens.shape
    device = tree.tokens.device
    rows, valid = torch.arange(batch, device=device), tree.is_valid
    lazy = device.type == "cpu"  # asking the device "any?" is free there and a wait elsewhere

    current = torch.full((batch,), ROOT, device=device)  # the node each row stands at
    accepted = torch.zeros_like(current)
    tried = torch.zeros_like(current)
    path = torch.full((batch, num), ROOT, device=device)
    residual = law.at(current) / lenience  # R: [B, V]

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
        if tree.q is None:  # a chosen token that R does not hold takes nothing from R
            reject = reject & (r_x > 0)
        if not lazy or reject.any():
            left = leftover(residual, drawn_from(tree, i, residual))
            residual = torch.where(reject.unsqueeze(-1), left, residual)
        if not lazy or accept.any():
            residual = torch.where(accept.unsqueeze(-1), law.at(current) / lenience, residual)

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


def block(tree: TokenTree, law: Law, rng: Random) -> Verdict:
    """Exact, for chains: judges the draft as a whole and never keeps fewer tokens on average.

    Block verification (Sun et al. 2403.10444). With P the target's law, Q the draft's, x the
    draft and p_0 = 1:

        p_i = min(p_{i-1} P(x_i) / Q(x_i), 1)
        h_i = S_i / (S_i + 1 - p_i), S_i = sum_x max(p_i P(x) - Q(x), 0) at the next position;
        h_K = p_K at the chain's end
        keep the longest prefix i whose coin of probability h_i falls heads (none: i = 0);
        the next token from norm(max(p_i P - Q, 0)), at the chain's end from P.
    """
    batch, num = tree.tokens.shape
    device = tree.tokens.device
    rows, valid = torch.arange(batch, device=device), tree.is_valid
    steps = torch.arange(num, device=device)
    if not tree.is_chain and (valid & (tree.parents != steps - 1)).any():
        raise ValueError("block verification judges chains; this tree branches")

    here = law.at(torch.full((batch,), ROOT, device=device))  # P at the node reached: [B, V]
    weight = here.new_ones(batch)  # p_i
    accepted = torch.zeros(batch, dtype=torch.long, device=device)
    residual = here  # where nothing was drafted, the target's own law
    if num:
        residual = torch.where(valid[:, :1], leftover(here, drawn_from(tree, 0, here)), here)
    for i in range(num):
        x = tree.tokens[:, i].clamp(min=0)
        ratio = here[rows, x] / drawn_from(tree, i, here)[rows, x]
        weight = torch.where(valid[:, i], (weight * ratio).clamp(max=1), weight)
        here = law.at(torch.where(valid[:, i], i, i - 1).clamp(max=num - 1))
        last = valid[:, i] & (~valid[:, i + 1] if i + 1 < num else True)
        owed, h = here, weight
        if i + 1 < num:
            owed = weight.unsqueeze(1) * here - drawn_from(tree, i + 1, here)
            mass = owed.clamp(min=0).sum(-1)
            rest = mass + 1 - weight  # 0 only where P == Q ahead: then a later coin is certain
            h = torch.where(last, weight, torch.where(rest > 0, mass / rest, 1.0))
            owed = leftover(weight.unsqueeze(1) * here, drawn_from(tree, i + 1, here))
            owed = torch.where(last.unsqueeze(1), here, owed)
        heads = rng.coin(torch.where(valid[:, i], h, torch.zeros_like(h)))
        accepted = torch.where(heads, i + 1, accepted)
        residual = torch.where(heads.unsqueeze(1), owed, residual)
    path = torch.where(steps < accepted.unsqueeze(1), steps, ROOT)
    tried = torch.minimum(accepted + 1, valid.sum(1))
    return Verdict(path, accepted, rng.draw(residual), tried)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Verifier:
    """Lossy: keeps whatever the target finds typical (Medusa 2401.10774, section 2.3.1).

    A candidate x is kept where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the
    target's law p in nats: nothing is drawn, so the text is not a sample of the target's law.
    The token after the path is the target's likeliest.
    """
    if not (0 < epsilon <= 1 and 0 < delta <= 1):
        raise ValueError("epsilon and delta must be in (0, 1]")
    return partial(_typical, epsilon=epsilon, delta=delta)


def _typical(tree: TokenTree, law: Law, rng: Random, epsilon: float, delta: float) -> Verdict:
    batch, num = tree.tokens.shape
    rows, valid = torch.arange(batch, device=tree.tokens.device), tree.is_valid
    current = torch.full((batch,), ROOT, device=tree.tokens.device)
    accepted, tried = torch.zeros_like(current), torch.zeros_like(current)
    path = torch.full((batch, num), ROOT, device=tree.tokens.device)
    p = law.at(current)
    for i in range(num):
        here = valid[:, i] & (tree.parents[:, i] == current)
        entropy = torch.special.entr(p).sum(-1)
        threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
        accept = here & (p[rows, tree.tokens[:, i].clamp(min=0)] > threshold)
        step = accepted.clamp(max=num - 1)
        path[rows, step] = torch.where(accept, i, path[rows, step])
        tried = torch.where(here & (tried == accepted), tried + 1, tried)
        accepted = accepted + accept
        current = torch.where(accept, i, current)
        p = torch.where(accept.unsqueeze(-1), law.at(current), p)
    return Verdict(path, accepted, p.argmax(-1), tried)


VERIFIERS: dict[str, Verifier] = {
    "speculative": speculative,
    "block": block,
    "typical (lossy)": typical(),
    "lenient (lossy)": lenient(),
}
