"""A drafter that knows the answer and spoils it on purpose: any acceptance rate on demand.

For tests and for studies of cost. It is no way to save time: it has asked the target already.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache
from ..models import LanguageModel
from ..sampling import Random, Sampling
from ..tree import TokenTree
from .base import Kept, Rows, at_least_one
from .draft_model import DraftModel


class Oracle(DraftModel):
    """Proposes the target's own continuation, each token spoiled with probability 1 - alpha.

    At temperature 0 the continuation is worked out in ``start`` by plain decoding, so that
    ``propose`` costs next to nothing (c = 0). In 16 bits the verifying pass rounds differently and
    may settle a near-tie the other way; the oracle then asks again, off the clock. Above
    temperature 0 it drafts with the target itself from q = alpha p + (1 - alpha) (a point mass on
    the token least likely under p), for which the acceptance probability sum_x min(p, q) is
    alpha, up to that least likely token's p.
    """

    def __init__(self, alpha: float = 0.8, num_tokens: int = 4, seed: int = 0) -> None:
        if isinstance(alpha, str) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], not {alpha!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, not {seed!r}")
        self.alpha, self.seed = float(alpha), seed
        self.num_tokens = self.max_nodes = at_least_one("num_tokens", num_tokens)

    def check(self, target: LanguageModel, longest: int) -> None:
        """The target can always draft for itself."""

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        self.model: Any = target
        super().start(target, rows, cache, prompt)
        # Its own chance: spoiling must not shift the draws that the run itself makes.
        self.chance = Random(self.seed, rows.tokens.device)
        if rows.sampling.greedy:
            self.answer = self._continuation(rows)

    def _continuation(self, rows: Rows) -> Tensor:
        """[B, capacity + K] the rows' texts, continued greedily to the end."""
        width = rows.tokens.shape[1] + self.num_tokens
        answer = rows.tokens.new_zeros(rows.batch, width)
        answer[:, : rows.tokens.shape[1]] = rows.tokens
        text = replace(rows, tokens=answer)  # the same rows, on paper of their own
        end = rows.limit.cpu()
        while bool((text.host < end).any()):
            tokens, count = self.unread(text)
            last = count.to(answer.device).unsqueeze(1) - 1
            logits = self.model.forward(self.cache, tokens, read=last).logits[:, 0]
            answer.scatter_(1, text.lengths.unsqueeze(1), logits.float().argmax(-1, keepdim=True))
            host = torch.minimum(text.host + 1, end)
            self.cache.set_lengths(host - 1)  # a row at its end reads its last token again
            text = replace(text, host=host, lengths=host.to(answer.device))
        return answer

    def propose(self, rows: Rows) -> TokenTree:
        if not rows.sampling.greedy:
            return super().propose(rows)
        began = time.perf_counter()
        place = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        told = self.answer[:, : rows.tokens.shape[1]]
        if bool(((told != rows.tokens) & (place < rows.lengths.unsqueeze(1))).any()):
            self.cache.set_lengths(torch.zeros_like(rows.host))
            self.answer = self._continuation(rows)
        self.off_clock = time.perf_counter() - began
        step = torch.arange(self.num_tokens, device=rows.tokens.device)
        place = (rows.lengths.unsqueeze(1) + step).clamp(max=self.answer.shape[1] - 1)
        tokens = self.answer.gather(1, place)
        spoil = self.chance.uniform(tokens.numel()).view_as(tokens) >= self.alpha
        return TokenTree.chain(torch.where(spoil, (tokens + 1) % self.vocab_size, tokens))

    def law(self, logits: Tensor, sampling: Sampling) -> Tensor:
        p = super().law(logits, sampling)
        spoiled = torch.zeros_like(p).scatter_(1, p.argmin(-1, keepdim=True), 1 - self.alpha)
        return self.alpha * p + spoiled
