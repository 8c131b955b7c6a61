"""Drafters: whatever proposes a tree of tokens."""

from .base import Drafter, Rows
from .draft_model import DraftModel
from .draft_tree import TreeDraft
from .eagle import Eagle, EagleConfig, EagleHead
from .early_exit import EarlyExit
from .grow import Grow
from .lookup import PromptLookup
from .medusa import Medusa, MedusaHeads
from .merged import Merged
from .oracle import Oracle

__all__ = [
    "DraftModel",
    "Drafter",
    "Eagle",
    "EagleConfig",
    "EagleHead",
    "EarlyExit",
    "Grow",
    "Medusa",
    "MedusaHeads",
    "Merged",
    "Oracle",
    "PromptLookup",
    "Rows",
    "TreeDraft",
]
