"""The text itself drafts: what followed the last time these words stood here.

Prompt lookup decoding (Saxena 2023; LLMA, arXiv 2304.04487): no model at all, and strong where
the answer repeats the prompt: summaries, quotations, code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tree import TokenTree
from .base import Drafter, Rows, at_least_one


class PromptLookup(Drafter):
    """Finds the last ``max_ngram`` tokens (else fewer) earlier in the text and drafts what follows.

    Where fewer than the last ``min_ngram`` tokens stood before, it drafts nothing. The longest
    n-gram wins, and among its places the latest. The candidates are chosen and not drawn, so they
    are point masses at every temperature.
    """

    def __init__(self, num_tokens: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.num_tokens = self.max_nodes = at_least_one("num_tokens", num_tokens)
        self.max_ngram = at_least_one("max_ngram", max_ngram)
        self.min_ngram = at_least_one("min_ngram", min_ngram)
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram {min_ngram} is above max_ngram {max_ngram}")

    def propose(self, rows: Rows) -> TokenTree:
        tokens, lengths = rows.tokens[:, : int(rows.host.max())], rows.lengths.unsqueeze(1)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        # run[b, s]: how many tokens up to and with s equal those up to and with the root.
        run = torch.zeros_like(tokens)
        same = place < lengths - 1  # [B, S] an earlier place, not the root itself
        for back, suffix in enumerate(rows.recent(self.max_ngram).flip(1).unbind(1)):
            same = same & (self._shifted(tokens, back) == suffix.unsqueeze(1))
            run = run + same
        score = run * tokens.shape[1] + place  # longest first, then latest
        best = score.masked_fill(run < self.min_ngram, -1).max(1, keepdim=True)  # [B, 1]
        follow = best.indices + torch.arange(1, self.num_tokens + 1, device=tokens.device)
        valid = (best.values >= 0) & (follow < lengths)
        return TokenTree.chain(tokens.gather(1, follow.clamp(max=tokens.shape[1] - 1)), None, valid)

    @staticmethod
    def _shifted(tokens: Tensor, back: int) -> Tensor:
        """[B, S] the token ``back`` places before each; -2 (no token) before the beginning."""
        return F.pad(tokens, (back, 0), value=-2)[:, : tokens.shape[1]]
