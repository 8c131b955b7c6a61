"""minispec: speculative decoding, compact, exact and readable."""

import warnings

# Importing transformers in a notebook without ipywidgets warns about progress bars, each time.
warnings.filterwarnings("ignore", message="IProgress not found")

from .checkpoints import CheckpointError, load_eagle, load_medusa
from .costs import CostModel, measure_roofline, pass_cost, time_pass
from .drafters import (
    Drafter,
    DraftModel,
    Eagle,
    EarlyExit,
    Grow,
    Medusa,
    Merged,
    Oracle,
    PromptLookup,
    TreeDraft,
)
from .generate import Generation, generate, stream
from .models import LanguageModel, ModelLoadError, UnsupportedModelError, load_target
from .sampling import Sampling
from .shapes import Shape
from .show import Piece
from .trace import Trace
from .tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CostModel",
    "DraftModel",
    "Drafter",
    "Eagle",
    "EarlyExit",
    "Generation",
    "Grow",
    "LanguageModel",
    "Medusa",
    "Merged",
    "ModelLoadError",
    "Oracle",
    "Piece",
    "PromptLookup",
    "Sampling",
    "Shape",
    "TokenTree",
    "Trace",
    "TreeDraft",
    "UnsupportedModelError",
    "generate",
    "load_eagle",
    "load_medusa",
    "load_target",
    "measure_roofline",
    "pass_cost",
    "stream",
    "time_pass",
]
