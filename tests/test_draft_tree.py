"""A draft model's tree: its candidates path by path, its cache, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from conftest import cache_holds, prompts_of, tiny, tiny_transformer

import minispec as ms
from minispec import shapes as sh
from minispec.generate import _Run
from minispec.verify import speculative

SHAPE = sh.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (1, 0, 0), (1, 0, 1)])
LENGTHS = (1, 5, 12, 3)  # past the window of 8


def trees_of(target, drafter, num=20, sampling=None, prompts=None):
    """The trees of a run, each with the texts that it hung on, and the generation."""
    seen = []
    prompts = prompts or prompts_of(*LENGTHS)

    def watch(tree, law, rng):
        if tree.num_nodes:
            texts = [run.rows.tokens[b, :n].tolist() for b, n in enumerate(run.rows.host.tolist())]
            seen.append((tree, texts))
        return speculative(tree, law, rng)

    run = _Run(target, prompts, drafter, num, sampling, 0, watch, ())
    for _ in run.rounds():
        pass
    return seen, run


def paths(tree: ms.TokenTree, row: int) -> list[list[int]]:
    """The tokens from the root's child down to each node's parent."""
    above: list[list[int]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        own = above[parent] if parent >= 0 else []
        above.append([*own, token])
    return [path[:-1] for path in above]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "gemma3"])
@pytest.mark.parametrize("shape", [SHAPE, sh.kary(2, 3)])
def test_candidates_are_the_bare_models_own(name, shape):  # pitfalls 24 and 26
    """Node by node: the ranked candidates after a path, asked of the model without a cache."""
    target, draft = tiny(name), tiny(name, seed=1)
    seen, _ = trees_of(target, ms.TreeDraft(draft, shape))
    assert len(seen) > 3
    for tree, texts in seen[::2]:
        for row in range(len(texts)):
            for i, above in enumerate(paths(tree, row)):
                with torch.no_grad():
                    ids = torch.tensor([texts[row] + above])
                    logits = draft.model(ids, use_cache=False).logits[0, -1]
                wanted = int(logits.argsort(descending=True)[shape.ranks[i]])
                assert int(tree.tokens[row, i]) == wanted


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
@pytest.mark.parametrize("choose", ["top", "draw"])
def test_the_target_drafting_for_itself_is_always_right(name, choose):
    target = tiny(name)
    for shape in (SHAPE, sh.kary(2, 3), sh.kary(3, 1), sh.chain(4)):
        drafter = ms.TreeDraft(target, shape, choose)
        deep = len(max((p for p in shape.paths if not any(p)), key=len)) + 1  # the top path
        out = ms.generate(
            target, prompts_of(*LENGTHS), drafter, max_new_tokens=3 * deep + 1, eos=()
        )
        assert out.trace.tau == deep


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("tree", [sh.kary(3, 3), ms.Grow(num_nodes=20, top_k=3, depth=3)])
def test_the_draft_cache_holds_the_accepted_text(name, tree):  # pitfall 26
    """After every round the cache equals one computed afresh from the committed text."""
    target = tiny(name)
    draft = target.first_layers(2)
    run = _Run(target, prompts_of(*LENGTHS), ms.TreeDraft(draft, tree), 24, None, 0)
    kept = 0  # rows in which an accepted node was kept
    for _ in run.rounds():
        cache, live = run.drafter.cache, ~run.rows.stopped
        for row in live.nonzero().flatten().tolist():
            num = int(cache.lengths_host[row])
            if num == 0:
                continue
            cache_holds(draft, cache, row, run.rows.tokens[row, :num])
        if run.trace.rounds:
            unread = (run.rows.host - cache.lengths_host)[live]
            accepted = run.trace.rounds[-1].accepted[live]
            # The new root, and at most an accepted leaf, which was not read: in a tree that grows
            # it may stand at any depth.
            leaf = accepted == 3 if isinstance(tree, sh.Shape) else accepted > 0
            assert ((unread == 1) | ((unread == 2) & leaf)).all()
            kept += int((accepted > 0).sum())
    assert kept > 3


def test_a_chain_shape_drafts_what_the_chain_does():
    target, draft = tiny(), tiny(seed=1)
    a, _ = trees_of(target, ms.TreeDraft(draft, sh.chain(3)))
    b, _ = trees_of(target, ms.DraftModel(draft, 3))
    assert a[0][0].is_chain
    for (one, _), (other, _) in zip(a, b, strict=True):
        assert torch.equal(one.tokens, other.tokens)


def test_drawn_siblings_name_the_laws_they_came_from():
    target, draft = tiny(), tiny(seed=1)
    sampling = ms.Sampling(0.9, top_k=5)
    seen, _ = trees_of(target, ms.TreeDraft(draft, SHAPE, "draw"), sampling=sampling)
    for tree, texts in seen:
        tree.check(target.vocab_size)
        for row in range(len(texts)):
            for i, above in enumerate(paths(tree, row)):
                with torch.no_grad():
                    ids = torch.tensor([texts[row] + above])
                    q = sampling.probs(draft.model(ids, use_cache=False).logits[0, -1])
                for older in range(i):  # without the siblings that came before
                    if tree.parents[row, older] == tree.parents[row, i]:
                        q[tree.tokens[row, older]] = 0
                torch.testing.assert_close(tree.q[row, i], q / q.sum())


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5])
def test_a_tree_keeps_to_the_budget(num):  # pitfall 15
    target = tiny()
    out = ms.generate(
        target, prompts_of(*LENGTHS), ms.TreeDraft(target, SHAPE), max_new_tokens=num, eos=()
    )
    assert [len(t) for t in out.tokens] == [num] * len(LENGTHS)


def test_more_candidates_than_tokens_are_refused():  # pitfall 24
    small = ms.load_target(tiny_transformer("llama", torch.float64, 0, vocab_size=4))
    with pytest.raises(ValueError, match="5 candidates of a vocabulary of 4"):
        ms.generate(small, [[1]], ms.TreeDraft(small, sh.kary(5, 1)), max_new_tokens=3)
    out = ms.generate(small, [[1]], ms.TreeDraft(small, sh.kary(4, 2)), max_new_tokens=7, eos=())
    assert out.trace.tau == 3


@pytest.mark.parametrize(
    ("shape", "choose", "message"),
    [
        ((-1, 0), "top", "must be a Shape"),
        (ms.Grow(), "draw", "takes the likeliest"),
        (sh.Shape(()), "top", "one node or more"),
        (SHAPE, "best", "top, draw"),
        (sh.from_paths([(1,)]), "draw", "leaves some out"),
    ],
)
def test_what_cannot_be_drafted_is_refused(llama, shape, choose, message):
    with pytest.raises(ValueError, match=message):
        ms.TreeDraft(llama, shape, choose)


def test_ranks_may_be_left_out_where_candidates_are_chosen(llama):
    seen, _ = trees_of(llama, ms.TreeDraft(tiny(seed=1), sh.from_paths([(1,), (1, 2)])))
    tree, texts = seen[0]
    with torch.no_grad():
        logits = tiny(seed=1).model(torch.tensor([texts[0]]), use_cache=False).logits[0, -1]
    assert int(tree.tokens[0, 0]) == int(logits.argsort(descending=True)[1])


# Trees that grow.


def values_of(draft, tree, row: int, text: list[int]) -> list[float]:
    """What each node is worth by the bare model: the product of its path's probabilities."""
    found = []
    for i, above in enumerate(paths(tree, row)):
        path, value = [*above, int(tree.tokens[row, i])], 1.0
        with torch.no_grad():
            law = draft.model(torch.tensor([text + path]), use_cache=False).logits[0].softmax(-1)
        for depth, token in enumerate(path):
            value *= float(law[len(text) - 1 + depth, token])
        found.append(value)
    return found


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_a_grown_tree_holds_the_most_valuable_paths(name):
    """Two levels, every node of the first expanded: so none of the best can be missed."""
    target, draft, k = tiny(name), tiny(name, seed=1), 4
    seen, _ = trees_of(target, ms.TreeDraft(draft, ms.Grow(num_nodes=7, top_k=k, depth=2)))
    assert len(seen) > 3
    for tree, texts in seen[::3]:
        tree.check(target.vocab_size)
        for row, text in enumerate(texts):
            ids = torch.tensor([text])
            with torch.no_grad():
                first = draft.model(ids, use_cache=False).logits[0, -1].softmax(-1).topk(k)
                nexts = torch.cat([ids.expand(k, -1), first.indices[:, None]], 1)
                second = draft.model(nexts, use_cache=False).logits[:, -1].softmax(-1).topk(k)
            every = torch.cat([first.values, (first.values[:, None] * second.values).flatten()])
            ours = values_of(draft, tree, row, text)
            assert sorted(ours) == pytest.approx(sorted(every.topk(7).values.tolist()), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_growing_tree_of_the_target_itself_is_always_right(name):
    target = tiny(name)
    prompts = prompts_of(*LENGTHS)
    grown = ms.TreeDraft(target, ms.Grow(num_nodes=30, top_k=3, depth=3))
    out = ms.generate(target, prompts, grown, max_new_tokens=13, eos=())
    assert out.trace.tau == 4
    plain = ms.generate(target, prompts, max_new_tokens=13, eos=())
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens, strict=True))


def test_floors_leave_out_what_is_not_worth_it():
    target, draft = tiny(), tiny(seed=1)
    prompts = prompts_of(6)

    def trees(**floors):
        spec = ms.Grow(num_nodes=12, top_k=3, depth=4, **floors)
        return trees_of(target, ms.TreeDraft(draft, spec), prompts=prompts)[0]

    free = trees()
    worth = [sorted(values_of(draft, tree, 0, texts[0])) for tree, texts in free]
    every = sorted(v for values in worth for v in values)
    floor = (every[len(free) * 6] + every[len(free) * 6 + 1]) / 2  # half of them pass
    kept = trees(min_value=floor)
    assert {t.num_nodes for t, _ in kept} != {12}
    for tree, texts in kept:
        values = values_of(draft, tree, 0, texts[0])
        assert min(values) >= floor * (1 - 1e-5)
        same = next((w for (_, t), w in zip(free, worth, strict=True) if t == texts), None)
        if same is not None:
            assert len(values) == sum(v >= floor for v in same)
    shallow = trees(min_gain=1.0)
    assert all(int(t.depths().max()) == 1 for t, _ in shallow)
    with pytest.raises(ValueError, match="min_value"):
        ms.Grow(min_value=2.0)
