"""Temperature 0: the tokens are those of transformers' own greedy search, whoever drafts."""

from __future__ import annotations

import pytest
import torch
from conftest import AlwaysWrong, RandomTree, prompts_of, tiny_transformer

import minispec as ms
from minispec.shapes import kary

LENGTHS = (1, 5, 12, 3)
NEW = 24  # past the window of 8 in the models that have one


def transformers_greedy(target: ms.LanguageModel, prompt: list[int], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def drafters(target: ms.LanguageModel, num: int):
    other = tiny_transformer("llama", torch.float64, seed=1)
    yield None
    yield ms.DraftModel(other, num)
    yield ms.DraftModel(other, num, min_top=0.2)
    yield ms.DraftModel(target, num)  # always right
    yield ms.PromptLookup(num, max_ngram=2)
    yield ms.EarlyExit(2, num)
    yield ms.TreeDraft(other, kary(2, num, max_nodes=9))
    yield ms.TreeDraft(target, kary(3, num, max_nodes=8))
    yield ms.TreeDraft(target.first_layers(2), kary(2, num, max_nodes=6), "draw")
    yield ms.Oracle(0.6, num)
    yield AlwaysWrong(num)


@pytest.mark.parametrize("num", [1, 3, 7])
def test_every_drafter_gives_the_tokens_of_transformers(any_target, num):
    prompts = prompts_of(*LENGTHS)
    expected = [transformers_greedy(any_target, p, NEW) for p in prompts]
    for drafter in drafters(any_target, num):
        out = ms.generate(any_target, prompts, drafter, max_new_tokens=NEW)
        assert [t.tolist() for t in out.tokens] == expected, type(drafter).__name__


def test_a_random_tree_gives_the_tokens_of_transformers(any_target):
    prompts = prompts_of(*LENGTHS[:3])
    expected = [transformers_greedy(any_target, p, NEW) for p in prompts]
    out = ms.generate(any_target, prompts, RandomTree(8), max_new_tokens=NEW)
    assert [t.tolist() for t in out.tokens] == expected
    assert out.trace.tau > 1.3  # the tree was of use, so moved slots were put to the test
