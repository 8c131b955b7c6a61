"""What a drafter is: something that proposes, and is told what became of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import KVCache
from ..models import LanguageModel, is_whole
from ..sampling import Random, Sampling
from ..tree import TokenTree


@dataclass
class Rows:
    """The text so far: B rows, each with its own length.

    tokens   [B, capacity] prompt and committed tokens, then padding
    lengths  [B] how many are committed; tokens[b, lengths[b] - 1] is the root
    host     [B] the same numbers on the CPU
    limit    [B] the length at which each row must stop
    stopped  [B] bool, rows that have
    """

    tokens: Tensor
    lengths: Tensor
    host: Tensor
    limit: Tensor
    stopped: Tensor
    sampling: Sampling
    rng: Random

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    def root(self) -> Tensor:
        """[B, 1] the last committed token of each row."""
        return self.tokens.gather(1, self.lengths.unsqueeze(1) - 1)

    def recent(self, num: int) -> Tensor:
        """[B, num] the last ``num`` committed tokens; -1 before the beginning of the text."""
        place = self.lengths.unsqueeze(1) + torch.arange(-num, 0, device=self.tokens.device)
        return self.tokens.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)


@dataclass
class Kept:
    """What became of a round.

    path     [B, N] accepted nodes in order, then -1
    emitted  [B] tokens each row emitted (0: it had stopped before)
    hidden   [B, N+1, H] the target's features at the root and the nodes (after the final norm)
    taps     the inputs of the layers that the drafter asked for, [B, N+1, H] each
    """

    path: Tensor
    emitted: Tensor
    hidden: Tensor
    taps: dict[int, Tensor]


class Drafter:
    """Proposes a token tree each round. Subclass it and write ``propose``.

    ``generate`` works on a shallow copy, so what ``start`` sets on self belongs to one call.
    """

    max_nodes: int = 0  # the most nodes that a proposal may have: the cache makes room for them
    taps: tuple[int, ...] = ()  # target layers whose inputs the drafter wants to see
    wants_features: bool = False  # whether start() wants the target's features over the prompt
    off_clock: float = 0.0  # seconds of the last propose() that are no part of the method's cost

    def check(self, target: LanguageModel, longest: int) -> None:
        """Called before any work: raise ValueError if this drafter cannot serve this target.

        longest: the most tokens, prompt included, that a row may come to have.
        """

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        """Called once, after the prefill has emitted each row's first token.

        cache is the target's; prompt, if asked for, holds the features at the prompt's tokens, and
        as ``emitted`` how many tokens [B] each prompt has.
        """

    def propose(self, rows: Rows) -> TokenTree:
        """The round's tree, hanging on the root of each row."""
        raise NotImplementedError

    def observe(self, rows: Rows, kept: Kept) -> None:
        """Called after each round, when ``rows`` already holds the new tokens."""


def at_least_one(name: str, value: int) -> int:
    """Checks a count that a user gave."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
    return int(value)


def head_rows(target: LanguageModel, token_map: Tensor | None) -> Tensor:
    """The rows [V_d, H] of the target's LM head for the ids of ``token_map``; None: all."""
    weight = target.model.get_output_embeddings().weight
    return weight if token_map is None else weight[token_map.to(weight.device)]


def check_head(
    target: LanguageModel, width: int, token_map: Tensor | None, vocab: int, candidates: int
) -> None:
    """Raises ValueError unless a trained head fits the target and its tree the head.

    width: of the features that it reads; vocab: of what it drafts; candidates: the most that a
    node of its tree is given.
    """
    theirs = target.model.get_output_embeddings().weight.shape[1]
    if width != theirs:
        raise ValueError(f"this head reads features of width {width}; the target's have {theirs}")
    if token_map is not None and int(token_map.max()) >= target.vocab_size:
        raise ValueError("the head's token map names ids that the target does not have")
    if candidates > vocab:
        raise ValueError(f"{candidates} candidates of a vocabulary of {vocab}")
