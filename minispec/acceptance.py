"""How often a draft model's i-th candidate is the accepted one, measured on the target's own text.

SpecInfer (2305.09781, Table 1) asks how much more often one of k candidates succeeds than one
alone; Sequoia (2402.12374) needs the same numbers, p_1, p_2, ..., to say which tree is the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from .models import CHUNK, LanguageModel, check_same_tokens
from .sampling import Random, Sampling
from .verify import leftover


@dataclass(frozen=True)
class RankAccuracy:
    """Acceptance by depth and rank.

    rates [D, K]: probability that candidate i of depth d is the accepted one, all tokens before it
    in the round having been candidates that were accepted. positions [D]: over how many positions
    of the texts that was averaged (a weight above temperature 0 where candidates are drawn).
    """

    rates: np.ndarray
    positions: np.ndarray

    @property
    def success(self) -> np.ndarray:
        """[D, K] probability that one of the first 1, 2, ..., K candidates is accepted."""
        return self.rates.cumsum(1)

    def to_frame(self) -> pd.DataFrame:
        """A line a depth; a column "top 1", "top 2", ... a number of candidates: ``success``."""
        depths = pd.Index(range(1, len(self.rates) + 1), name="depth")
        names = [f"top {k}" for k in range(1, self.rates.shape[1] + 1)]
        return pd.DataFrame(self.success, depths, names)


def sibling_acceptance(p: Tensor, tokens: Tensor, laws: Tensor | None) -> Tensor:
    """[M, K] probability that the i-th sibling is the accepted one, all coins of the rule weighed.

    p [M, V] the target's laws; tokens [M, K] the siblings in the order in which they are tried;
    laws [M, K, V] what each was drawn from, or None where they were chosen: then it is p itself
    at the token (0 if the token stood before), as the rule keeps the target's law.
    """
    residual, reached, found = p, torch.ones_like(p[:, 0]), []
    for i, x in enumerate(tokens.unbind(1)):
        q = F.one_hot(x, p.shape[1]).to(p) if laws is None else laws[:, i]
        ratio = (residual.gather(1, x[:, None]) / q.gather(1, x[:, None])).squeeze(1).clamp(max=1)
        found.append(reached * ratio)
        reached = reached * (1 - ratio)
        residual = leftover(residual, q)
    return torch.stack(found, 1)


def rank_accuracy(
    target: LanguageModel,
    draft: LanguageModel,
    texts: Iterable[tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]],
    k: int = 8,
    *,
    depths: int = 1,
    sampling: Sampling | None = None,
    choose: str = "top",
    seed: int = 0,
) -> RankAccuracy:
    """Measures a draft model's candidates at every position of the target's own texts.

    texts: pairs of a prompt and the answer that the target gave to it under ``sampling`` (None:
    greedy), as token ids: ``zip(out.prompts, out.tokens)`` of a Generation. choose: "top", the k
    likeliest candidates, or "draw", k drawn without replacement (see ``TreeDraft``). Depth d > 1
    looks at the positions that come after d - 1 accepted ones, which are easier than the rest;
    above temperature 0 by weights of which a few may be large, so that it needs many texts.

    Both models read each text once, whole: it costs little beside generating it.
    """
    sampling = sampling or Sampling()
    check_same_tokens(target, draft)
    if depths < 1:
        raise ValueError(f"depths must be at least 1, not {depths}")
    if choose not in ("top", "draw"):
        raise ValueError(f"choose must be top or draw, not {choose!r}")
    if not 1 <= k <= min(target.vocab_size, draft.vocab_size):
        raise ValueError(f"k must be in 1..{min(target.vocab_size, draft.vocab_size)}, not {k}")
    rng = Random(seed, target.device)
    rates = torch.zeros(depths, k, dtype=torch.float64)
    weights = torch.zeros(depths, dtype=torch.float64)
    for prompt, answer in texts:
        if not len(answer):
            continue
        ids = torch.tensor([*map(int, prompt), *map(int, answer)], device=target.device)
        said = ids[len(prompt) :].unsqueeze(1)  # [T, 1]
        p = sampling.probs(_logits(target, ids, len(said)))  # [T, V]
        logits = _draft_logits(draft, ids, len(said), target.vocab_size)
        tokens, laws = logits.topk(k, dim=-1).indices, None
        if choose == "draw" and not sampling.greedy:
            tokens, laws = rng.draw_siblings(sampling.probs(logits), k)
        accepted = sibling_acceptance(p, tokens, laws).double()  # [T, K]
        # Given the token that the text goes on with: how likely it came from a candidate.
        hit = (accepted * (tokens == said)).sum(1) / p.gather(1, said).squeeze(1)
        weight = torch.ones_like(hit)
        for depth in range(depths):
            rates[depth] += (weight[:, None] * accepted).sum(0).cpu()
            weights[depth] += weight.sum().cpu()
            weight = F.pad(weight * hit, (1, 0))[:-1]
    if not weights[0]:
        raise ValueError("there are no texts, or their answers are empty")
    found = rates / weights.clamp(min=torch.finfo(weights.dtype).tiny).unsqueeze(1)
    return RankAccuracy(found.numpy(), weights.numpy())


def candidate_ranks(
    target: LanguageModel,
    draft: LanguageModel,
    texts: Iterable[tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]],
) -> list[np.ndarray]:
    """At which rank a draft model held each token of the texts' answers: [T] for each text.

    0: its first choice; a token that it does not have ranks behind all that it has. texts: as in
    ``rank_accuracy``, greedy ones. A draft up to here that was right is the text itself, so these
    ranks decide what a greedy run of any shape accepts; the target is asked nothing.
    """
    check_same_tokens(target, draft)
    found = []
    for prompt, answer in texts:
        if not len(prompt):
            raise ValueError("a text without a prompt: nothing says its first token")
        if not len(answer):
            found.append(np.zeros(0, dtype=np.int64))
            continue
        ids = torch.tensor([*map(int, prompt), *map(int, answer)], device=target.device)
        logits = _draft_logits(draft, ids, len(answer), target.vocab_size)  # [T, V]
        own = logits.gather(1, ids[len(prompt) :, None])
        found.append((logits > own).sum(1).cpu().numpy())
    return found


def _logits(model: LanguageModel, ids: Tensor, num: int) -> Tensor:
    """[num, V] the logits from which each of a text's last ``num`` tokens is said."""
    cache = model.new_cache(1, len(ids))
    found = []
    with torch.inference_mode():
        prompt, answer = ids[None, :-1].split([len(ids) - 1 - num, num], 1)
        for part in prompt.split(CHUNK, 1) if prompt.numel() else ():
            model.forward(cache, part, read=part.new_zeros(1, 1))
            cache.advance(part.shape[1])
        for part in answer.split(CHUNK, 1):
            found.append(model.forward(cache, part).logits[0])
            cache.advance(part.shape[1])
    return torch.cat(found)


def _draft_logits(draft: LanguageModel, ids: Tensor, num: int, vocab_size: int) -> Tensor:
    """The same of a draft, over the target's vocabulary: -inf where the draft has no token."""
    if draft.read_map is not None:
        ids = draft.read_map[ids]
    own = _logits(draft, ids.clamp(max=draft.vocab_size - 1), num)[:, :vocab_size]
    held = draft.token_map if draft.token_map is not None else torch.arange(own.shape[1])
    wide = own.new_full((num, vocab_size), -torch.inf)
    return wide.index_copy_(1, held.to(own.device), own)
