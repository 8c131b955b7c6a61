"""The same work by transformers itself: what a reader has today, to be measured beside ours.

transformers' generate() is reached through the loaded model, on the same weights and in the same
dtype. Its assisted generation, prompt lookup and early exit get the draft length (and n-gram, and
layer) of the drafter of ours that they stand beside; whatever else they have is their default. They
serve one row at a time and say so themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .drafters import Drafter, DraftModel, EarlyExit, PromptLookup
from .models import LanguageModel
from .sampling import Sampling


def has_peer(drafter: Drafter | None) -> bool:
    """Whether transformers has a method like this drafter; None is plain decoding."""
    return drafter is None or type(drafter) in (PromptLookup, EarlyExit, DraftModel)


def peer_generate(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    like: Drafter | None = None,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """What transformers' generate() adds to each prompt of ids: the new tokens, eos included.

    like: the drafter whose counterpart is wanted. The sampling law, the budget and the ids that end
    a text are those that ``minispec.generate`` would take; torch's global generator is left alone.
    Raises ValueError for a drafter that has no counterpart, and whatever transformers raises.
    """
    if not has_peer(like):
        raise ValueError(f"transformers has no method like {type(like).__name__}")
    if type(like) is DraftModel and like.model.token_map is not None:
        raise ValueError("transformers' assistants need the target's ids; this draft has its own")
    ids, mask = left_padded(prompts, target.device)
    devices = [target.device] if target.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(quiet_log())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        torch.manual_seed(seed)
        for model in {id(m): m for m in (target.model, assistant(target, like))}.values():
            stack.enter_context(bare_config(model, target.eos_ids, like))
        out = target.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            **law(sampling or Sampling()),
            **method(like),
        )
    return [until_eos(row, target.eos_ids) for row in out[:, ids.shape[1] :].cpu()]


def method(like: Drafter | None) -> dict[str, Any]:
    """The arguments of generate() by which transformers does what this drafter does."""
    if isinstance(like, PromptLookup):
        return {
            "prompt_lookup_num_tokens": like.num_tokens,
            "max_matching_ngram_size": like.max_ngram,
        }
    if isinstance(like, EarlyExit):
        return {"assistant_early_exit": like.layer}
    return {"assistant_model": like.model.model} if isinstance(like, DraftModel) else {}


def law(sampling: Sampling) -> dict[str, Any]:
    """The arguments by which generate() samples from the same law. Nothing is left to defaults."""
    if sampling.greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p,
    }


def assistant(target: LanguageModel, like: Drafter | None) -> Any:
    """The model whose generation config holds the draft length: the draft's, else the target's."""
    return like.model.model if type(like) is DraftModel else target.model


@contextmanager
def bare_config(model: Any, eos: Sequence[int], like: Drafter | None) -> Iterator[None]:
    """Lends a model a generation config that holds nothing but what both sides are told.

    A model's own may set penalties or a temperature; and the draft length is read from here.
    """
    before = model.generation_config
    config = type(before)()
    config.eos_token_id = list(eos) or None
    config.pad_token_id = eos[0] if eos else 0
    if isinstance(like, DraftModel):
        config.num_assistant_tokens = like.num_tokens
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def quiet_log() -> Iterator[None]:
    """Assisted generation warns of its own inner calls, once a call."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, S], padded on the left as generate() wants them."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def until_eos(row: Tensor, eos: Sequence[int]) -> Tensor:
    """A row [n] up to and with its first end-of-text token: what follows is padding."""
    ends = torch.isin(row, torch.tensor(eos, dtype=row.dtype)).nonzero()
    return row[: int(ends[0]) + 1] if len(ends) else row
