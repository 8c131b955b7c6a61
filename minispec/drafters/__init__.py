"""Drafters: whatever proposes a tree of tokens."""

from .base import Drafter, Rows
from .draft_model import DraftModel
from .draft_tree import TreeDraft
from .early_exit import EarlyExit
from .lookup import PromptLookup
from .oracle import Oracle

__all__ = ["DraftModel", "Drafter", "EarlyExit", "Oracle", "PromptLookup", "Rows", "TreeDraft"]
