"""Two drafters in one tree: what the union holds, and what becomes of each drafter's own state."""

from __future__ import annotations

import pytest
import torch
from conftest import cache_holds, prompts_of, tiny
from hypothesis import given
from hypothesis import strategies as st
from test_draft_tree import paths
from test_eagle import random_head

import minispec as ms
from minispec import shapes as sh
from minispec.drafters.merged import merge
from minispec.generate import _Run
from minispec.tree import TokenTree


def sets_of(tree: TokenTree, row: int) -> set[tuple[int, ...]]:
    """The paths of a row's real nodes, as token sequences."""
    valid, tokens = tree.is_valid[row].tolist(), tree.tokens[row].tolist()
    above = paths(tree, row)
    return {(*p, t) for p, t, v in zip(above, tokens, valid, strict=True) if v}


@st.composite
def trees(draw) -> TokenTree:
    """Two rows of a random tree over three tokens, siblings all different."""
    rows = []
    num = draw(st.integers(0, 6))
    for _ in range(2):
        tokens, parents = [], []
        for i in range(num):
            parent = draw(st.integers(-1, i - 1))
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            free = [t for t in range(8) if t not in taken]
            tokens.append(draw(st.sampled_from(free[:3])))
            parents.append(parent)
        rows.append((tokens, parents))
    shape = (2, num)
    return TokenTree(
        torch.tensor([t for t, _ in rows], dtype=torch.long).view(shape),
        torch.tensor([p for _, p in rows], dtype=torch.long).view(shape),
    )


@given(trees(), st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=2,
       max_size=2), st.integers(0, 4), st.integers(0, 4))  # fmt: skip
def test_the_union_holds_every_path_once(tree, chains, first, second):
    valid = torch.arange(4) < torch.tensor([[first], [second]])
    chain = TokenTree.chain(torch.tensor(chains), None, valid)
    both = merge(tree, chain)
    both.check(8)
    for row, length in enumerate((first, second)):
        wanted = sets_of(tree, row) | {tuple(chains[row][: i + 1]) for i in range(length)}
        assert sets_of(both, row) == wanted
        assert int(both.is_valid[row].sum()) == len(wanted), "a path stands twice"
        real = both.is_valid[row, tree.num_nodes :].tolist()
        assert real == sorted(real, reverse=True), "padding stands before a node"
    assert torch.equal(both.tokens[:, : tree.num_nodes], tree.tokens), "the tree's nodes moved"


def drafters(target):
    draft, head = tiny(seed=1), random_head(1).double()
    return {
        "draft tree": ms.TreeDraft(draft, sh.kary(2, 2)),
        "grown": ms.TreeDraft(draft, ms.Grow(6, 2, 3)),
        "itself": ms.TreeDraft(target, sh.kary(2, 2)),
        "eagle": ms.Eagle(head, ms.Grow(6, 2, 2)),
        "lookup": ms.PromptLookup(2),
    }


@pytest.mark.parametrize("name", ["draft tree", "grown", "itself", "eagle", "lookup"])
def test_greedy_text_stays_the_targets(llama, name):
    prompts = prompts_of(3, 9, 14)
    merged = ms.Merged(drafters(llama)[name], ms.Oracle(0.7, 4, seed=5))
    out = ms.generate(llama, prompts, merged, max_new_tokens=30, eos=())
    plain = ms.generate(llama, prompts, max_new_tokens=30, eos=())
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens, strict=True))
    alone = ms.generate(llama, prompts, drafters(llama)[name], max_new_tokens=30, eos=())
    assert out.trace.tau >= alone.trace.tau
    assert out.trace.tau > 2


@pytest.mark.parametrize("name", ["draft tree", "grown"])
def test_the_draft_forgets_what_the_other_had_accepted(llama, name):
    """After every round its cache equals one computed afresh from the committed text."""
    draft = drafters(llama)[name].model
    merged = ms.Merged(drafters(llama)[name], ms.Oracle(0.8, 5, seed=2))
    run, seen = _Run(llama, prompts_of(4, 11), merged, 30), 0
    for _ in run.rounds():
        cache = run.drafter.tree.cache
        for row in (~run.rows.stopped).nonzero().flatten().tolist():
            num = int(cache.lengths_host[row])
            if not num:
                continue
            seen += 1
            cache_holds(draft, cache, row, run.rows.tokens[row, :num])
    assert seen > 5
    assert max(int(r.accepted.max()) for r in run.trace.rounds) > 3, "the chain had its say"


def test_what_cannot_be_merged_is_refused(llama):
    draft = tiny(seed=1)
    with pytest.raises(ValueError, match="TreeDraft"):
        ms.Merged(ms.DraftModel(draft, 3), ms.PromptLookup())
    for chain in (ms.DraftModel(draft, 3), ms.TreeDraft(draft, sh.chain(2))):
        with pytest.raises(ValueError, match="cannot be the chain"):
            ms.Merged(ms.PromptLookup(), chain)
    with pytest.raises(TypeError, match="two drafters"):
        ms.Merged(ms.PromptLookup(), "lookup")
    drawn = ms.Merged(ms.TreeDraft(draft, sh.kary(2, 2), "draw"), ms.PromptLookup())
    with pytest.raises(ValueError, match="only chosen candidates"):
        ms.generate(llama, [[5, 5, 5]], drawn, max_new_tokens=9, sampling=ms.Sampling(1.0))
