"""From logits to laws, and from laws to tokens.

``Sampling`` says which law the user asked for; drafter and target use the same object, so the two
cannot disagree. ``Law`` turns the target's logits into that law, node by node, only where the
verifier looks. ``Random`` is the one source of chance in the package: verifiers and drafters ask
it for coins and draws, and so an exact enumeration can put itself in its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """The widest float of a device: chance is compared in float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Sampling:
    """Which law to sample from: temperature first, then top-k, then top-p, then min-p.

    temperature 0 (the default) is greedy: the argmax, ties to the smaller id.
    top_k keeps the k likeliest tokens; top_p the smallest set of likeliest tokens whose mass
    reaches top_p; min_p those with at least min_p times the likeliest token's probability.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if (name == "temperature" or value is not None) and (
                isinstance(value, bool) or not isinstance(value, Real)
            ):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature!r}")
        if self.top_k is not None and not (self.top_k >= 1 and float(self.top_k).is_integer()):
            raise ValueError(f"top_k must be a whole number >= 1, not {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p!r}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p!r}")

    @property
    def greedy(self) -> bool:
        """Also for temperatures so small that fp32 cannot divide by them."""
        return self.temperature < torch.finfo(torch.float32).tiny

    def probs(self, logits: Tensor) -> Tensor:
        """[..., V] logits to [..., V] probabilities, in fp32 (fp64 for fp64 logits).

        A row whose logits hold a NaN or +inf comes back with a NaN in it, never as a law.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        top = logits.amax(-1, keepdim=True)
        if self.greedy:
            # 1 + 0*max is 1, or NaN where the maximum is: bad logits stay visible in the law.
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1 + 0 * top)
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        scaled = (logits - top) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            floor = scaled.topk(int(self.top_k), dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < floor, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            p = _nucleus(p, self.top_p)
        if self.min_p:
            p = p.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), 0)
            p = p / p.sum(-1, keepdim=True)
        return p


def _nucleus(p: Tensor, top_p: float, first_try: int = 512) -> Tensor:
    """Keeps the likeliest tokens until their mass reaches top_p (Holtzman et al., 1904.09751)."""
    # Sorting 50k probabilities costs more than a draft step; the first few hundred nearly always
    # hold the nucleus, and where they do not, the full sort decides.
    num = min(first_try, p.shape[-1])
    ranked, ids = p.topk(num, dim=-1)
    if num < p.shape[-1] and bool((ranked.sum(-1) < top_p).any()):
        ranked, ids = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked  # mass of the likelier tokens
    ranked = ranked.masked_fill(before >= top_p, 0)
    kept = torch.zeros_like(p).scatter_(-1, ids, ranked)
    return kept / kept.sum(-1, keepdim=True)


class Law:
    """The target's law at the nodes of a tree, computed where the verifier stands.

    A walk visits a few nodes of many. ``at(node)`` turns just those rows of logits into
    probabilities; ``faulty`` [B] remembers the rows in which a NaN was met.
    """

    def __init__(self, logits: Tensor, sampling: Sampling) -> None:
        """logits [B, N+1, V]: entry 0 is the root's, entry i+1 node i's."""
        self.logits, self.sampling = logits, sampling
        self.rows = torch.arange(logits.shape[0], device=logits.device)
        self.faulty = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)

    def at(self, node: Tensor) -> Tensor:
        """[B] node index (-1: the root) to the target's probabilities there [B, V]."""
        p = self.sampling.probs(self.logits[self.rows, node + 1])
        self.faulty |= p.amax(-1).isnan()
        return p


class Random:
    """Seeded coins and draws, apart from torch's global generator."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def uniform(self, num: int) -> Tensor:
        """[num] uniforms in [0, 1)."""
        dtype = wide(self.device)
        return torch.rand(num, generator=self.generator, device=self.device, dtype=dtype)

    def coin(self, prob: Tensor) -> Tensor:
        """[B] bool: heads with probability prob [B]; prob >= 1 is always heads, 0 never."""
        return self.uniform(prob.shape[0]) < prob

    def draw(self, probs: Tensor) -> Tensor:
        """[B] one token a row from the laws probs [B, V], by inverting the cumulative sum."""
        total = probs.to(wide(probs.device)).cumsum(-1)
        mass = total[:, -1:]
        point = self.uniform(probs.shape[0]).unsqueeze(-1) * mass
        # right=True: the first token whose cumulative mass exceeds the point, so that a token of
        # probability 0 is never drawn. The clamp keeps u * mass from rounding up to mass itself.
        point = torch.minimum(point, torch.nextafter(mass, torch.zeros_like(mass)))
        return (
            torch.searchsorted(total, point, right=True).squeeze(-1).clamp(max=probs.shape[1] - 1)
        )

    def draw_siblings(self, q: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """``num`` different tokens a row from q [B, V], in the order in which they were drawn.

        Returns tokens [B, num] and, for each, the law it was drawn from [B, num, V] (see
        ``sibling_laws``). All at once by the Gumbel-top-k trick: the num largest of log q + Gumbel
        noise are num draws without replacement (Kool et al. 1903.06059; Recursive SD 2402.14160).
        """
        if num > q.shape[1]:
            raise ValueError(f"{num} different tokens asked for of a vocabulary of {q.shape[1]}")
        uniform = self.uniform(q.numel()).view_as(q).clamp(min=1e-300)
        noise = -torch.log(-torch.log(uniform))
        # Where q runs out, the tokens that are left come after all others, in random order.
        key = torch.where(q > 0, q.to(noise.dtype).log() + noise, noise - 1e6)
        tokens = key.topk(num, dim=-1).indices
        return tokens, sibling_laws(q, tokens)


def sibling_laws(q: Tensor, tokens: Tensor) -> Tensor:
    """[B, K, V] the law from which each of K tokens [B, K] was drawn without replacement.

    The first sibling's law is q; the next one's is q without the first token, renormalised; and so
    on. Where q has run out, uniform over what is left. With these laws as the nodes' q, the rule
    of ``verify.py`` serves siblings drawn without replacement too (Sequoia 2402.12374, Alg. 2).
    """
    laws, left, free = [], q, torch.ones_like(q)
    for token in tokens.unbind(1):
        mass = left.sum(-1, keepdim=True)
        laws.append(torch.where(mass > 0, left / mass, free / free.sum(-1, keepdim=True)))
        left = left.scatter(1, token.unsqueeze(1), 0.0)
        free = free.scatter(1, token.unsqueeze(1), 0.0)
    return torch.stack(laws, 1)


class Certain(Random):
    """Chance at temperature 0: only what is certain happens, and every law is a point mass."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def uniform(self, num: int) -> Tensor:
        """The largest number below 1, so that only a coin of probability 1 falls heads."""
        below = 1 - torch.finfo(wide(self.device)).eps
        return torch.full((num,), below, dtype=wide(self.device), device=self.device)

    def draw(self, probs: Tensor) -> Tensor:
        return probs.argmax(-1)
