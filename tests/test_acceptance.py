"""Acceptance by rank: against the walk itself, by hand, and against the tokens of a real run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import prompts_of, tiny

import minispec as ms
from minispec import shapes as sh
from minispec.acceptance import candidate_ranks, rank_accuracy, sibling_acceptance
from minispec.sampling import Law, Random
from minispec.verify import speculative

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
ROWS = 40_000


def answers(target, sampling=None, num=24, count=12):
    out = ms.generate(
        target, prompts_of(*range(1, count + 1)), max_new_tokens=num, sampling=sampling, eos=()
    )
    return list(zip(out.prompts, out.tokens, strict=True))


@pytest.mark.parametrize("drawn", [True, False])
def test_the_coins_weighed_are_the_coins_tossed(drawn):
    """The mean of the probabilities equals how often the walk accepts each sibling."""
    tokens, laws = Random(0).draw_siblings(Q.expand(ROWS, 4), 3)
    if not drawn:
        tokens, laws = torch.tensor([[2, 0, 3]]).expand(ROWS, 3), None
    expected = sibling_acceptance(P.expand(ROWS, 4), tokens, laws).mean(0)
    tree = ms.TokenTree(tokens, torch.full((ROWS, 3), -1), laws)
    verdict = speculative(tree, Law(P.log().expand(ROWS, 4, 4), ms.Sampling(1.0)), Random(1))
    counted = [float((verdict.path[:, 0] == i).double().mean()) for i in range(3)]
    assert expected.tolist() == pytest.approx(counted, abs=0.012)
    if not drawn:  # a chosen candidate is accepted where the target would have said it
        assert expected.tolist() == pytest.approx(P[[2, 0, 3]].tolist())


def test_the_first_drawn_candidate_is_accepted_as_often_as_the_laws_overlap():
    tokens, laws = Random(0).draw_siblings(Q.expand(ROWS, 4), 1)
    mean = float(sibling_acceptance(P.expand(ROWS, 4), tokens, laws).mean())
    assert mean == pytest.approx(float(torch.minimum(P, Q).sum()), abs=0.01)


@pytest.mark.parametrize("choose", ["top", "draw"])
def test_a_target_as_its_own_draft(choose):
    target = tiny()
    found = rank_accuracy(target, target, answers(target), 3, depths=3, choose=choose)
    assert found.rates.tolist() == [[1, 0, 0]] * 3
    assert found.positions.tolist() == [12 * 24, 12 * 23, 12 * 22]
    sampled = answers(target, ms.Sampling(1.0))
    drawn = rank_accuracy(target, target, sampled, 2, sampling=ms.Sampling(1.0), choose="draw")
    assert drawn.rates[0] == pytest.approx([1, 0], abs=1e-9)


def test_greedy_rates_by_counting():
    """Depth 1: every position; depth 2: those behind a position whose token was a candidate."""
    target = tiny()
    draft, k = target.first_layers(2), 4
    counts, seen = np.zeros((2, k)), np.zeros(2)
    texts = answers(target)
    for prompt, answer in texts:
        text, before = list(prompt), False
        for token in answer.tolist():
            with torch.no_grad():
                logits = draft.model(torch.tensor([text]), use_cache=False).logits[0, -1]
            ranked = logits.topk(k).indices.tolist()
            for depth in (0, 1):
                if depth == 0 or before:
                    seen[depth] += 1
                    if token in ranked:
                        counts[depth, ranked.index(token)] += 1
            before = token in ranked
            text.append(token)
    found = rank_accuracy(target, draft, texts, k, depths=2)
    assert found.positions.tolist() == seen.tolist()
    np.testing.assert_allclose(found.rates, counts / seen[:, None])
    assert found.rates[0, 0] > 0.2  # there is something to count
    frame = found.to_frame()
    assert list(frame.columns) == ["top 1", "top 2", "top 3", "top 4"]
    np.testing.assert_allclose(frame.to_numpy(), found.rates.cumsum(1))


def test_ranks_decide_what_a_greedy_run_accepts():
    """Walking a shape along the ranks gives the rounds of a real run; the ranks give the rates."""
    target = tiny()
    draft, texts = target.first_layers(2), answers(target)
    ranks = candidate_ranks(target, draft, texts)
    assert [len(r) for r in ranks] == [24] * 12
    found = rank_accuracy(target, draft, texts, 4)
    np.testing.assert_allclose(found.rates[0], [(np.stack(ranks) == r).mean() for r in range(4)])
    shape = sh.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    out = ms.generate(
        target,
        [prompt for prompt, _ in texts],
        ms.TreeDraft(draft, shape),
        max_new_tokens=24,
        eos=(),
    )
    frame = out.trace.to_frame()
    for row, own in enumerate(ranks):
        place, path, emitted = 1, (), []
        while place < 24:
            path = (*path, int(own[place]))
            place += 1
            if path not in shape.paths or place == 24:
                emitted.append(len(path))
                path = ()
        assert emitted == frame[frame["row"] == row]["emitted"].tolist()
    assert out.trace.tau > 1.2


@pytest.mark.parametrize("choose", ["top", "draw"])
def test_rates_foretell_the_tokens_a_round(choose):
    """Sequoia's sum over the measured rates is the tau of the tree, above temperature 0 too."""
    target, sampling = tiny(initializer_range=0.2), ms.Sampling(0.7)
    draft, shape = target.first_layers(2), sh.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    texts = answers(target, sampling, num=40, count=60)
    found = rank_accuracy(target, draft, texts, 2, depths=2, sampling=sampling, choose=choose)
    prompts = [prompt for prompt, _ in texts]
    out = ms.generate(
        target,
        prompts,
        ms.TreeDraft(draft, shape, choose),
        max_new_tokens=60,
        sampling=sampling,
        eos=(),
    )
    foretold = sh.expected_tokens(shape, found.rates)
    assert foretold == pytest.approx(out.trace.tau, rel=0.06)
    assert foretold > 1.2


def test_what_cannot_be_measured_is_refused(llama):
    texts = answers(llama, count=1)
    for changes, message in (
        ({"k": 99}, "k must be in 1..61"),
        ({"depths": 0}, "depths"),
        ({"choose": "best"}, "top or draw"),
    ):
        with pytest.raises(ValueError, match=message):
            rank_accuracy(llama, llama, texts, **changes)
    with pytest.raises(ValueError, match="no texts"):
        rank_accuracy(llama, llama, [([1, 2], [])], 2)
