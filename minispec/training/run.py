"""From a corpus to a head that can be shipped: texts, features, the loop, the file, its card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState

from ..checkpoints import default_taps
from ..drafters.eagle import EagleConfig, EagleHead
from ..drafters.medusa import MedusaHeads
from ..fetch import sha256
from ..models import LanguageModel
from ..prompts import data_dir
from ..shapes import path_values
from .corpus import Text, load_batch
from .data import TextData, cache_features, held_out
from .distil import DraftLearner, frequent_tokens, new_draft
from .eagle import EagleLearner
from .fit import Learner, Recipe, fit, held_out_ranks, write_text
from .medusa import MedusaLearner

RANKS = 10  # candidates a place, from which a tree is chosen


def load_corpus(path: Path | None = None) -> tuple[list[Text], str]:
    """The texts of a packed corpus, the project's own by default, and its name for a card."""
    path = path or data_dir() / "corpus" / "smollm2.npz"
    if not path.is_file():
        raise FileNotFoundError(f"there is no corpus {path}: see minispec corpus write")
    return load_batch(path), f"{path.name}, sha256 {sha256(path)}"


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """For training and for validation."""
    out = [held_out(t) for t in texts]
    learn = [t for t, held in zip(texts, out, strict=True) if not held]
    return learn, [t for t, held in zip(texts, out, strict=True) if held]


def data_of(
    target: LanguageModel,
    texts: Sequence[Text],
    *,
    width: int = 640,
    taps: Sequence[int] = (),
    features: Path | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> tuple[TextData, TextData]:
    """Training and validation data; features: a folder to keep the target's features in."""
    found = []
    for name, part in zip(("train", "validation"), split(texts), strict=True):
        folder = None if features is None else features / name
        if folder is not None:
            cache_features(target, part, folder, width=width, taps=taps, tell=tell)
        found.append(TextData(part, target, width=width, taps=taps, features=folder))
    return found[0], found[1]


def medusa_learner(
    target: LanguageModel,
    texts: Sequence[Text],
    *,
    num_heads: int = 4,
    num_layers: int = 1,
    vocab: int = 8192,
    labels: str = "soft",
) -> MedusaLearner:
    """Heads that share the target's LM head over the ``vocab`` most frequent tokens."""
    width = target.model.get_output_embeddings().weight.shape[1]
    ids = frequent_tokens(texts, vocab, target.eos_ids)
    heads = MedusaHeads(width, num_heads, num_layers, token_map=ids)
    return MedusaLearner(heads, target, labels)


def draft_learner(
    target: LanguageModel,
    texts: Sequence[Text],
    *,
    vocab: int = 8192,
    width: int = 256,
    layers: int = 4,
    loss: str = "forward kl",
    seed: int = 0,
) -> DraftLearner:
    """A small Llama over the ``vocab`` most frequent tokens, distilled from the target."""
    ids = frequent_tokens(texts, vocab, target.eos_ids)
    draft = new_draft(target, ids, width=width, layers=layers, seed=seed)
    return DraftLearner(draft, target, loss)


def eagle_learner(
    target: LanguageModel,
    texts: Sequence[Text],
    *,
    version: int = 3,
    vocab: int = 4096,
    steps: int | None = None,
    single: int = 0,
    taps: Sequence[int] | None = None,
    near: bool = True,
) -> EagleLearner:
    """A head as wide as the target over the ``vocab`` most frequent tokens.

    taps: by default those of EAGLE-3's authors. near: start from the target's own weights where
    the shapes allow it.
    """
    config = target.config
    heads = int(config.num_attention_heads)
    width = target.model.get_output_embeddings().weight.shape[1]
    chosen = () if version == 1 else tuple(taps or default_taps(target.num_layers))
    ids = frequent_tokens(texts, vocab, target.eos_ids)
    head = EagleHead(
        EagleConfig(
            version=version,
            width=width,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or width // heads),
            intermediate=int(config.intermediate_size),
            vocab=len(ids),
            target_width=width,
            taps=chosen,
        ),
        ids,
    )
    if near:
        head.start_from(target)
    return EagleLearner(head, target, steps, single=single)


def train(
    learner: Learner,
    data: tuple[TextData, TextData],
    recipe: Recipe,
    work: Path,
    out: Path,
    facts: dict[str, Any],
    *,
    watch: Callable[[pd.DataFrame], None] | None = None,
    cpu: bool = False,
) -> pd.DataFrame:
    """Trains in ``work`` (checkpoints, log), then writes the draft and its card to ``out``.

    facts: what the card says beside the recipe and the validation: the target, its hash, the
    corpus.
    """
    if not any(t.temperature == 0 and t.answer for t in data[1].texts):
        raise ValueError("no greedy answer is held out: nothing could tell what the draft is worth")
    log = fit(learner, data[0], recipe, work, validation=data[1], watch=watch, facts=facts, cpu=cpu)
    if not PartialState().is_main_process:
        return log
    learner.eval()
    learner.save(out)
    last = log[log["tau"].notna()].iloc[-1]
    card = dict(facts)
    values = path_values(held_out_ranks(learner, data[1], RANKS).numpy(), RANKS)
    card["path values"] = {" ".join(map(str, path)): round(v, 4) for path, v in values.items()}
    card["training tokens"], card["recipe"] = data[0].tokens, asdict(recipe)
    card["validation"] = {
        name: round(float(last[name]), 4)
        for name in log.columns
        if name not in ("step", "lr") and last[name] == last[name]  # a depth never reached is nan
    }
    write_text(out / "card.json", json.dumps(card, indent=2, default=str) + "\n")
    return log
