"""A smaller model drafts, token by token (Leviathan et al. 2211.17192; Chen et al. 2302.01318)."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache
from ..models import CHUNK, LanguageModel, check_same_tokens, load_target
from ..sampling import Sampling
from ..tree import TokenTree
from .base import Drafter, Kept, Rows, at_least_one


class DraftModel(Drafter):
    """Drafts a chain of ``num_tokens`` tokens with any causal language model of the same tokens.

    model: what ``load_target`` takes. The draft draws from its own law under the *same* sampling
    settings as the target's. Two ways to stop a chain early, both judged on the draft's softmax
    at temperature 1 before anything is drawn, so that no drawn token is ever dropped (dropping
    one would bend the emitted law): ``min_top`` stops where the likeliest token is less likely
    than that, ``max_entropy`` where the entropy in nats is above that.
    """

    min_top: float | None = None
    max_entropy: float | None = None

    def __init__(
        self,
        model: Any,
        num_tokens: int = 4,
        *,
        min_top: float | None = None,
        max_entropy: float | None = None,
    ) -> None:
        self.model: LanguageModel = load_target(model)
        self.num_tokens = self.max_nodes = at_least_one("num_tokens", num_tokens)
        for name, value in (("min_top", min_top), ("max_entropy", max_entropy)):
            if value is not None and not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, not {value!r}")
        self.min_top, self.max_entropy = min_top, max_entropy

    def check(self, target: LanguageModel, longest: int) -> None:
        check_same_tokens(target, self.model)
        limit = self.model.context_limit
        if limit is not None and longest > limit:
            raise ValueError(
                f"the draft model reads at most {limit} tokens; this call may reach {longest}"
            )

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        self.vocab_size = target.vocab_size
        self.cache = self.model.new_cache(rows.batch, rows.tokens.shape[1] + self.num_tokens + 1)

    def propose(self, rows: Rows) -> TokenTree:
        # What was drafted beyond the committed text is forgotten; the root is read anew.
        self.cache.set_lengths(torch.minimum(self.cache.lengths_host, rows.host - 1))
        self.read_prompt(rows)
        return self.draft_chain(rows, *self.unread(rows))

    def read_prompt(self, rows: Rows) -> None:
        """Reads long unread texts up to their last chunk, a chunk a pass, as the target does."""
        while int((rows.host - self.cache.lengths_host).max()) > CHUNK:
            tokens, count = self.unread(rows)
            tokens, count = tokens[:, :CHUNK], count.clamp(max=CHUNK)
            # Each row keeps at least its root for the drafting pass.
            count = torch.minimum(count, rows.host - 1 - self.cache.lengths_host)
            self.model.forward(self.cache, tokens, read=count.new_zeros(len(count), 1))
            self.cache.set_lengths(self.cache.lengths_host + count)

    def unread(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The committed tokens that the draft model has not read: [B, m], and how many: [B], CPU.

        After a rejection that is the root alone; after a fully accepted chain also the last
        drafted token, which was drawn and never read; at the start the whole prompt.
        """
        count = rows.host - self.cache.lengths_host
        step = torch.arange(int(count.max()), device=rows.tokens.device)
        place = self.cache.lengths.unsqueeze(1) + step
        tokens = rows.tokens.gather(1, place.clamp(max=rows.tokens.shape[1] - 1))
        return self.readable(tokens), count

    def readable(self, tokens: Tensor) -> Tensor:
        """The target's ids as ids that the draft model knows."""
        if self.model.read_map is not None:
            return self.model.read_map[tokens]
        return tokens.clamp(max=self.model.vocab_size - 1)  # an id only the target pads to

    def read_text(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Reads ``tokens`` [B, m], of which ``count`` [B] are real: the logits after them."""
        last = count.to(tokens.device).unsqueeze(1) - 1  # [B, 1]
        logits = self.model.forward(self.cache, tokens, read=last).logits  # [B, 1, V]
        self.cache.set_lengths(self.cache.lengths_host + count)
        return logits

    def draft_chain(self, rows: Rows, tokens: Tensor, count: Tensor) -> TokenTree:
        """Reads the text's last tokens (see ``read_text``), then draws K tokens."""
        greedy = rows.sampling.greedy
        valid = torch.ones(rows.batch, 1, dtype=torch.bool, device=tokens.device)
        drawn, laws, valids = [], [], []
        logits = self.read_text(tokens, count)
        for step in range(self.num_tokens):
            valid = valid & self.goes_on(logits[:, 0]).unsqueeze(1)
            if tokens.device.type == "cpu" and step and not valid.any():
                break
            if greedy:  # the law is a point mass on the argmax; saying so saves carrying it
                token = self.best(logits[:, 0], 1).squeeze(-1)
            else:
                laws.append(self.law(logits[:, 0], rows.sampling))  # [B, V]
                token = rows.rng.draw(self.settled(laws[-1], valid))
            drawn.append(token)
            valids.append(valid)
            if step < self.num_tokens - 1:
                logits = self.model.forward(self.cache, self.readable(token).unsqueeze(1)).logits
                self.cache.advance()
        q_all = None if greedy else torch.stack(laws, 1)
        return TokenTree.chain(torch.stack(drawn, 1), q_all, torch.cat(valids, 1))

    def law(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """[..., V of the draft] logits to the draft's law over the target's vocabulary."""
        # Some models pad their vocabulary to a round size; padding is no token.
        q = sampling.probs(logits[..., : self.vocab_size])
        if self.model.token_map is None:
            return F.pad(q, (0, self.vocab_size - q.shape[-1]))
        wide = q.new_zeros(*q.shape[:-1], self.vocab_size)
        return wide.index_copy_(-1, self.model.token_map, q)

    def best(self, logits: Tensor, num: int) -> Tensor:
        """[..., num] the target's ids of the likeliest tokens, from logits [..., V of the draft].

        Ties go to the smaller id, as everywhere at temperature 0.
        """
        logits = logits[..., : self.vocab_size]
        ids = logits.argmax(-1, keepdim=True) if num == 1 else logits.topk(num, dim=-1).indices
        return ids if self.model.token_map is None else self.model.token_map[ids]

    @property
    def stops_early(self) -> bool:
        return self.min_top is not None or self.max_entropy is not None

    def settled(self, q: Tensor, valid: Tensor) -> Tensor:
        """[B, V] q; where a row has stopped early, a point mass: nothing is left to chance there.

        So the draws that a row makes do not depend on whether its neighbours have stopped.
        """
        if not self.stops_early:
            return q
        point = torch.zeros_like(q)
        point[:, 0] = 1
        return torch.where(valid, q, point)

    def goes_on(self, logits: Tensor) -> Tensor:
        """[B] whether to draft one more token, from the draft's logits [B, V]."""
        on = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        if not self.stops_early:
            return on
        p = logits.float().softmax(-1)
        if self.min_top is not None:
            on = on & (p.amax(-1) >= self.min_top)
        if self.max_entropy is not None:
            on = on & (torch.special.entr(p).sum(-1) <= self.max_entropy)
        return on
