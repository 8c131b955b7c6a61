"""How Medusa's heads learn (Medusa-1: the target is frozen; arXiv 2401.10774, section 2.2.1).

    loss = sum_k 0.8^k CE(p^(k)_t, y_{t+2+k})

with y the text's own token (the paper) or, as the default here, the target's whole law at that
place: the text is one draw from it, so the law says the same with less noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints import save_medusa
from ..drafters.medusa import MedusaHeads
from ..models import LanguageModel
from .data import Batch, places_of
from .fit import Laws, Learner, law_rows, rank_of

DECAY = 0.8


class MedusaLearner(Learner):
    """Trains ``heads`` on the target's features; labels: "soft" (its law) or "hard" (its text)."""

    rows: Tensor
    known: Tensor

    def __init__(self, heads: MedusaHeads, target: LanguageModel, labels: str = "soft") -> None:
        super().__init__()
        if labels not in ("soft", "hard"):
            raise ValueError(f"labels must be 'soft' or 'hard', not {labels!r}")
        self.heads, self.labels = heads, labels
        rows = law_rows(target, heads.token_map)
        known = places_of(heads.token_map, target.vocab_size)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("known", known, persistent=False)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        total = self.rows.new_zeros(())
        count = self.rows.new_zeros(())
        hidden = batch.hidden.to(self.rows.dtype)
        # The law at place t says token t+1; head k learns what stands k+1 places on.
        if self.labels == "soft":
            laws = Laws(self.rows, hidden, batch.has_ahead(1) & batch.ahead(batch.answer, 1))
        for k, head in enumerate(self.heads):
            learn = batch.has_ahead(2 + k) & batch.ahead(batch.answer, 2 + k)
            label = self.known[batch.ahead(batch.tokens, 2 + k)]
            learn = learn & (label >= 0)
            logits = head(hidden[learn])  # [M, H] or [M, V_d]
            logits = logits if self.heads.vocab_size else F.linear(logits, self.rows)
            if self.labels == "hard":
                loss = F.cross_entropy(logits.float(), label[learn], reduction="sum")
            else:
                law = laws.ahead(batch, 1 + k, learn)
                loss = F.cross_entropy(logits.float(), law, reduction="sum")
            total = total + DECAY**k * loss
            count = count + learn.sum()
        return total, count

    @torch.no_grad()
    def ranks(self, batch: Batch, most: int = 10) -> tuple[Tensor, Tensor]:
        """A draft hangs on token t+1, which the target has said; head 0 guesses t+2."""
        found = []
        hidden = batch.hidden.to(self.rows.dtype)
        for k, head in enumerate(self.heads):
            label = self.known[batch.ahead(batch.tokens, 2 + k)]
            inside = batch.has_ahead(2 + k) & (label >= 0)
            logits = head(hidden[inside])
            logits = logits if self.heads.vocab_size else F.linear(logits, self.rows)
            full = torch.full(label.shape, most, device=label.device)
            found.append(full.masked_scatter(inside, rank_of(logits, label[inside], most)))
        return torch.stack(found), batch.has_ahead(2) & batch.ahead(batch.greedy, 2)

    def save(self, folder: Path) -> None:
        save_medusa(self.heads, folder)
