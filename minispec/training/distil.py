"""A small draft model learns the target's law, token by token (distillation).

Given the text so far, the target's law is p and the draft's q. Three losses:

    forward kl    sum_x p(x) log(p(x) / q(x))     q must cover all that p may say
    reverse kl    sum_x q(x) log(q(x) / p(x))     q must say nothing that p would not
    tvd           1/2 sum_x |p(x) - q(x)|         1 - alpha itself (Leviathan 2211.17192, Cor. 3.6)

Forward KL is what DistilBERT and most drafts use; DistillSpec (2310.08461) compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints import save_draft
from ..models import LanguageModel, load_target, new_llama
from .corpus import Text
from .data import Batch, places_of
from .fit import Learner, law_rows, rank_of

LOSSES = ("forward kl", "reverse kl", "tvd")


def frequent_tokens(texts: Sequence[Text], size: int, always: Sequence[int] = ()) -> Tensor:
    """[at most size] the target ids that stand most often in the answers, smallest id first.

    ``always`` (end-of-text) are among them whatever their count. FR-Spec (2502.14856): a draft
    that ranks only frequent tokens saves most of the LM head's work and loses little.
    """
    counts = Counter(t for text in texts for t in text.answer)
    for token in always:
        counts[token] = 2**60
    return torch.tensor(sorted(t for t, _ in counts.most_common(size)))


def nearest_known(target: LanguageModel, token_map: Tensor) -> Tensor:
    """[V] for each target id the draft id to read it as: its own, or that of the most similar.

    A draft with a reduced vocabulary must read what it cannot write. Similar: by the angle
    between the target's own embeddings.
    """
    weight = F.normalize(target.model.get_input_embeddings().weight.detach().float(), dim=-1)
    known = weight[token_map]
    nearest = torch.cat([(part @ known.T).argmax(-1) for part in weight.split(4096)])
    nearest[token_map] = torch.arange(len(token_map), device=nearest.device)
    return nearest


def new_draft(
    target: LanguageModel,
    token_map: Tensor,
    *,
    width: int = 256,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
    near: bool = True,
) -> LanguageModel:
    """An untrained small Llama over the target ids ``token_map`` [V_d].

    near: its (tied) embeddings begin as the target's, in their ``width`` principal directions, so
    that it need not learn anew which tokens are alike.
    """
    model = new_llama(
        seed,
        vocab_size=len(token_map),
        hidden_size=width,
        intermediate_size=round(8 * width / 3 / 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=target.context_limit or 8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    draft = load_target(model)
    draft.token_map, draft.read_map = token_map, nearest_known(target, token_map)
    if near:
        theirs = target.model.get_input_embeddings().weight.detach()[token_map].float()
        ours: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        with torch.no_grad():
            ours.copy_(_narrowed(theirs, width) * ours.std())
    return draft


def _narrowed(rows: Tensor, width: int) -> Tensor:
    """[V, H] to [V, width], scaled to a standard deviation of 1: the nearest of that rank."""
    u, s, _ = torch.linalg.svd(rows, full_matrices=False)
    found = F.pad(u * s, (0, max(0, width - len(s))))[:, :width]
    # Each direction's spread is the target's; which way it points in the draft does not matter.
    return found / found.std()


class DraftLearner(Learner):
    """Trains ``draft`` (with a token map) to the law of the target that made the features."""

    rows: Tensor
    known: Tensor
    read_map: Tensor

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        loss: str = "forward kl",
        answers_only: bool = False,
        steps: int = 5,
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {loss!r}")
        if draft.token_map is None or draft.read_map is None:
            raise ValueError("the draft has no token map: see new_draft")
        self.draft, self.loss, self.answers_only, self.steps = draft, loss, answers_only, steps
        self.model = draft.model  # registered, so that its parameters are found
        rows = law_rows(target, draft.token_map)
        self.register_buffer("rows", rows, persistent=False)
        known = places_of(draft.token_map, target.vocab_size)
        self.register_buffer("known", known, persistent=False)
        self.register_buffer("read_map", draft.read_map, persistent=False)

    def logits(self, batch: Batch) -> Tensor:
        """[R, T, V_d]"""
        ids = self.read_map[batch.tokens]
        return self.draft.teacher_forced(ids, batch.position, batch.visible())

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        learn = batch.has_ahead(1)
        if self.answers_only:
            learn = learn & batch.ahead(batch.answer, 1)
        log_q = self.logits(batch)[learn].float().log_softmax(-1)  # [M, V_d]
        with torch.no_grad():
            log_p = F.linear(batch.hidden[learn].to(self.rows.dtype), self.rows)
            log_p = log_p.float().log_softmax(-1)
        if self.loss == "forward kl":
            loss = (log_p.exp() * (log_p - log_q)).sum()
        elif self.loss == "reverse kl":
            loss = (log_q.exp() * (log_q - log_p)).sum()
        else:
            loss = 0.5 * (log_p.exp() - log_q.exp()).abs().sum()
        return loss, learn.sum()

    @torch.no_grad()
    def ranks(self, batch: Batch, most: int = 10) -> tuple[Tensor, Tensor]:
        """The text up to a draft that is right is the text: one pass judges every step."""
        label = self.known[batch.ahead(batch.tokens, 1)]
        inside = batch.has_ahead(1) & (label >= 0)
        rank = torch.full(label.shape, most, device=label.device)
        rank = rank.masked_scatter(inside, rank_of(self.logits(batch)[inside], label[inside], most))
        found = [
            batch.ahead(rank, i).masked_fill(~batch.has_ahead(i + 1), most)
            for i in range(self.steps)
        ]
        return torch.stack(found), batch.has_ahead(1) & batch.ahead(batch.greedy, 1)

    def save(self, folder: Path) -> None:
        save_draft(self.draft, folder)
