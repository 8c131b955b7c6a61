"""minispec: speculative decoding, compact, exact and readable."""

import warnings

# Importing transformers in a notebook without ipywidgets warns about progress bars, each time.
warnings.filterwarnings("ignore", message="IProgress not found")

from .drafters import Drafter, DraftModel, EarlyExit, Oracle, PromptLookup
from .generate import Generation, generate, stream
from .models import LanguageModel, ModelLoadError, UnsupportedModelError, load_target
from .sampling import Sampling
from .show import Piece
from .trace import Trace
from .tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "Generation",
    "LanguageModel",
    "ModelLoadError",
    "Oracle",
    "Piece",
    "PromptLookup",
    "Sampling",
    "TokenTree",
    "Trace",
    "UnsupportedModelError",
    "generate",
    "load_target",
    "stream",
]
