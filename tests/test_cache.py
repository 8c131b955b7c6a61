"""The cache: what it holds, where it lies, and that nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import AlwaysWrong, RandomTree, prompts_of, tiny, tiny_transformer

import minispec as ms
from minispec.cache import KVCache
from minispec.generate import _Run


def held(cache: KVCache, row: int) -> list[torch.Tensor]:
    """All keys and values that the row has committed."""
    end = int(cache.lengths_host[row])
    return [t[row, :, :end] for pair in cache.layers for t in pair]


@pytest.mark.parametrize("drafter", ["none", "right", "wrong", "some", "tree"])
def test_after_every_round_the_cache_is_that_of_the_text(any_target, drafter):  # pitfall 17
    chosen = {
        "none": None,
        "right": ms.Oracle(1.0, 4),
        "wrong": AlwaysWrong(3),
        "some": ms.Oracle(0.6, 4),
        "tree": RandomTree(7),
    }[drafter]
    run = _Run(any_target, prompts_of(4, 9, 6), chosen, 12, eos=())
    for _ in run.rounds():
        assert (run.cache.lengths_host == run.rows.host - 1).all()  # the root is not read yet
    for row in range(3):
        text = run.rows.tokens[row, : int(run.rows.host[row]) - 1]
        fresh = any_target.new_cache(1, len(text))
        with torch.no_grad():
            any_target.forward(fresh, text[None])
        fresh.advance(len(text))
        for ours, theirs in zip(held(run.cache, row), held(fresh, 0), strict=True):
            torch.testing.assert_close(ours, theirs[: len(ours)], atol=1e-9, rtol=1e-7)


def test_bytes_are_those_of_the_formula():
    target = tiny("llama", torch.float32)
    cache = target.new_cache(batch=3, capacity=50)
    config = target.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cache.nbytes == 3 * 50 * per_token


def test_the_cache_holds_what_was_asked_for_and_no_more():
    target = tiny("llama", torch.float32)
    run = _Run(target, prompts_of(5, 9), ms.PromptLookup(3), 7)
    list(run.rounds())
    # the longest text, and room for the last round's root and nodes
    assert run.cache.capacity == 9 + 7 + 3 + 1


def test_nothing_grows_from_call_to_call(llama):
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    drafter = ms.DraftModel(tiny_transformer("llama", torch.float64, 1), 3)
    ms.generate(llama, prompts_of(4), drafter, max_new_tokens=5)
    before = tensors()
    for _ in range(3):
        ms.generate(llama, prompts_of(4), drafter, max_new_tokens=5)
    assert tensors() == before


def test_a_pass_that_does_not_fit_is_refused(llama):
    cache = llama.new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 4 tokens; this pass needs 5"):
        llama.forward(cache, torch.zeros(1, 5, dtype=torch.long))


def test_keep_moves_the_path_behind_the_root():
    shape = tiny("llama", torch.float32).layer_shapes[0]
    cache = KVCache([shape], batch=2, capacity=12)
    cache.set_lengths(torch.tensor([2, 4]))
    cache.begin(5)
    marks = torch.arange(10.0).view(2, 1, 5, 1).expand(2, shape.heads, 5, shape.key_dim)
    cache.update(0, marks, -marks)
    # row 0 keeps nodes 1 and 3 of its tree, row 1 keeps none
    cache.keep(torch.tensor([[1, 3, -1, -1], [-1, -1, -1, -1]]), torch.tensor([3, 1]))
    keys, values = cache.layers[0]
    assert keys[0, 0, 2:5, 0].tolist() == [0, 2, 4]  # root, node 1, node 3
    assert values[0, 0, 2:5, 0].tolist() == [0, -2, -4]
    assert keys[1, 0, 4, 0].item() == 5
    assert cache.lengths.tolist() == [5, 5]


def test_the_window_counts_positions_not_slots():
    shape = tiny("llama", torch.float32).layer_shapes[0]
    cache = KVCache([shape], batch=1, capacity=12)
    cache.set_lengths(torch.tensor([5]))
    cache.begin(3)
    # root at position 5; two siblings, both at position 6 though in slots 6 and 7
    depth = torch.tensor([[0, 1, 1]])
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    mask = cache.mask(depth, visible, torch.float32, window=3)
    seen = (mask[0, 0] == 0).int().tolist()
    assert seen == [
        [0, 0, 0, 1, 1, 1, 0, 0],  # positions 3, 4, 5
        [0, 0, 0, 0, 1, 1, 1, 0],  # positions 4, 5, 6
        [0, 0, 0, 0, 1, 1, 0, 1],
    ]


def test_masks_are_additive_floats(llama):  # pitfall 21
    cache = llama.new_cache(1, 4)
    cache.begin(2)
    mask = cache.mask(torch.tensor([[0, 1]]), torch.ones(1, 2, 2).tril().bool(), torch.float64)
    assert mask.dtype == torch.float64
    assert mask[0, 0].tolist() == [[0, torch.finfo(torch.float64).min], [0, 0]]
