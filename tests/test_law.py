"""Temperature above 0: the joint law of the emitted tokens is the target's, whoever drafts.

Thousands of rows of a tiny model are thousands of independent draws in one call. The law of four
tokens in a row is worked out without any of the package's machinery: by asking the bare model
for every prefix.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Scripted, tiny, tiny_transformer

import minispec as ms
from minispec.drafters import MedusaHeads
from minispec.exactness import detectable, g_test
from minispec.head_checks import random_eagle
from minispec.mutants import FixedTree
from minispec.shapes import from_paths

VOCAB, DEPTH, ROWS = 4, 4, 20_000  # the prefill emits the first token, rounds the other three
PROMPT = [3, 1, 2]
TESTS = 49  # the false-failure rate is shared out over all tests of this file
TREE = from_paths([(0,), (1,), (0, 0), (1, 0)])
DISTANCE = 0.07  # total variation that every test must notice

SETTINGS = {
    "temperature 1": ms.Sampling(1.0),
    "temperature .5, top-k 3": ms.Sampling(0.5, top_k=3),
    "temperature 1.3, top-p .8": ms.Sampling(1.3, top_p=0.8),
}


def small(name: str = "llama", seed: int = 0) -> ms.LanguageModel:
    return tiny(name, torch.float32, seed, vocab_size=VOCAB, initializer_range=0.15)


def sampled_law(model, sampling: ms.Sampling, prefix: list[int]) -> np.ndarray:
    """The law after a prefix, by numpy alone: no code of minispec."""
    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0, -1].double().numpy()
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    p = weights / weights.sum()
    if sampling.top_p:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
        p /= p.sum()
    return p


def joint_law(model, sampling: ms.Sampling) -> np.ndarray:
    """[V, V, V, V] the probability of every continuation of four tokens."""
    law = np.zeros((VOCAB,) * DEPTH)

    def extend(text: list[int], weight: float) -> None:
        if len(text) == DEPTH:
            law[tuple(text)] = weight
            return
        for token, p in enumerate(sampled_law(model, sampling, [*PROMPT, *text])):
            extend([*text, token], weight * p)

    extend([], 1.0)
    return law


def drafters(target: ms.LanguageModel) -> dict[str, ms.Drafter | None]:
    other = ms.load_target(
        tiny_transformer("llama", torch.float32, 1, vocab_size=VOCAB, initializer_range=0.15)
    )
    laws = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.0, 0.0, 0.5, 0.5]])
    return {
        "plain": None,
        "draft model": ms.DraftModel(other, 2),
        "draft model, early stop": ms.DraftModel(other, 2, min_top=0.3),
        "prompt lookup": ms.PromptLookup(2, max_ngram=2),
        "early exit": ms.EarlyExit(1, 2),
        "oracle": ms.Oracle(0.7, 2),
        "draft tree, top": ms.TreeDraft(other, TREE),
        "draft tree, drawn": ms.TreeDraft(other, TREE, "draw"),
        "medusa": ms.Medusa(random_heads(), TREE),
        "eagle, grown": ms.Eagle(random_eagle(target, 1).float(), ms.Grow(4, 2, 2)),
        "draft tree, grown": ms.TreeDraft(other, ms.Grow(4, 2, 2, min_value=0.05, min_gain=0.3)),
        "merged": ms.Merged(ms.Medusa(random_heads(), TREE), ms.PromptLookup(2, max_ngram=2)),
        "eagle-3, drawn": ms.Eagle(random_eagle(target, 3).float(), TREE, "draw"),
        "scripted, chosen": Scripted([2, 3]),
        "scripted, drawn": Drawn(laws),
    }


def random_heads() -> MedusaHeads:
    heads = MedusaHeads(32, 2)
    with torch.no_grad():
        for i, p in enumerate(heads.parameters()):
            p.normal_(std=0.3, generator=torch.Generator().manual_seed(i))
    return heads


class Drawn(Scripted):
    """Draws each row's tokens from fixed laws [K, V], which share little with the target's."""

    def __init__(self, laws: torch.Tensor) -> None:
        super().__init__([0] * len(laws), laws)

    def propose(self, rows):  # type: ignore[no-untyped-def]
        q = self.q.expand(rows.batch, *self.q.shape)
        tokens = torch.stack([rows.rng.draw(q[:, i]) for i in range(q.shape[1])], 1)
        return ms.TokenTree.chain(tokens, q)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", sorted(drafters(small())))
def test_joint_law_of_four_tokens(name, setting):  # pitfalls 4, 7 and 10
    target, sampling = small(), SETTINGS[setting]
    law = joint_law(target.model, sampling)
    out = ms.generate(
        target,
        [PROMPT] * ROWS,
        drafters(target)[name],
        max_new_tokens=DEPTH,
        sampling=sampling,
        seed=1,
        eos=(),
    )
    tokens = torch.stack(out.tokens).numpy()
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(tokens.T), 1)
    test = g_test(counts, law)
    assert test.outside == 0, "a token outside the nucleus was emitted"
    assert test.passes(TESTS), f"p = {test.p_value:.2e}"
    assert detectable(ROWS, test.df, TESTS) < DISTANCE


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize("shape", [(-1, -1, 0, 1), (-1, 0, 0, 2)])
def test_joint_law_with_a_tree_of_drawn_siblings(name, shape):  # pitfall 13
    target, sampling = small(name), ms.Sampling(1.0)
    law = joint_law(target.model, sampling)
    tree = FixedTree(shape, VOCAB)
    out = ms.generate(
        target, [PROMPT] * ROWS, tree, max_new_tokens=DEPTH, sampling=sampling, eos=()
    )
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(torch.stack(out.tokens).numpy().T), 1)
    test = g_test(counts, law)
    assert test.passes(TESTS), f"p = {test.p_value:.2e}"
    assert detectable(ROWS, test.df, TESTS) < DISTANCE


def test_the_test_sees_a_wrong_law():
    """The same counts fail against a law at the stated distance: the test is not asleep."""
    target = small()
    law = joint_law(target.model, ms.Sampling(1.0))
    out = ms.generate(
        target, [PROMPT] * ROWS, max_new_tokens=DEPTH, sampling=ms.Sampling(1.0), eos=()
    )
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(torch.stack(out.tokens).numpy().T), 1)
    wrong = law.ravel().copy()
    order = np.argsort(-wrong)
    wrong[order[0]] -= DISTANCE
    wrong[order[1:20]] += DISTANCE / 19
    assert not g_test(counts, wrong.reshape(law.shape)).passes(TESTS)
