"""The target's own first layers draft (self-speculation; Draft & Verify, arXiv 2309.08168)."""

from __future__ import annotations

from torch import Tensor

from ..cache import KVCache
from ..models import LanguageModel
from ..tree import TokenTree
from .base import Kept, Rows, at_least_one
from .draft_model import DraftModel


class EarlyExit(DraftModel):
    """Drafts with the target cut after ``layer`` layers: its final norm and LM head follow there.

    Nothing is copied: the layers are the target's own, and so are the keys and values. The first
    layers compute for a committed token exactly what the target computed, so the target's cache
    *is* the draft's cache; what the draft writes behind it is overwritten by the verifying pass.
    """

    def __init__(self, layer: int = 8, num_tokens: int = 4) -> None:
        self.layer = at_least_one("layer", layer)
        self.num_tokens = self.max_nodes = at_least_one("num_tokens", num_tokens)

    def check(self, target: LanguageModel, longest: int) -> None:
        target.first_layers(self.layer)  # complains if there are not so many

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        self.model = target.first_layers(self.layer)
        self.vocab_size = target.vocab_size
        self.target_cache = cache

    def propose(self, rows: Rows) -> TokenTree:
        self.cache = self.target_cache.first_layers(self.layer)  # same memory, lengths of its own
        return self.draft_chain(rows, *self.unread(rows))

    def unread(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The root alone: everything before it is in the target's cache."""
        return rows.root(), rows.host.new_ones(rows.batch)
