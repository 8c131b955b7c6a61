"""The exactness suite itself: its laws by hand, its tests' power, and every mutant dead."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import prompts_of

import minispec as ms
from minispec import exactness as ex
from minispec import mutants as mu
from minispec.sampling import Law, Random, sibling_laws
from minispec.verify import VERIFIERS, lenient, typical

# Enumeration.


def test_every_outcome_is_walked_once_with_its_probability():
    law = torch.tensor([[0.5, 0.2, 0.3, 0.0]], dtype=torch.float64)

    def run(chance, instance):
        first = chance.draw(law.expand(len(instance), -1))
        heads = chance.coin(torch.where(first == 1, 0.25, 1.0).double())
        return [first, heads]

    weights, _, (first, heads) = ex.enumerate_outcomes(run, 1)
    found = {(int(a), bool(b)): float(w) for a, b, w in zip(first, heads, weights, strict=True)}
    assert found == pytest.approx(
        {(0, True): 0.5, (1, True): 0.05, (1, False): 0.15, (2, True): 0.3}
    )


def test_one_uniform_compared_twice_is_one_uniform():
    def run(chance, instance):
        u = chance.uniform(len(instance))
        return [u < torch.tensor([0.6]).double(), u < torch.tensor([0.3]).double()]

    def wide(chance, instance):
        return [x.expand(len(instance)) for x in run(chance, instance)]

    weights, _, (a, b) = ex.enumerate_outcomes(wide, 1)
    found = {(bool(x), bool(y)): float(w) for x, y, w in zip(a, b, weights, strict=True)}
    assert found == pytest.approx({(True, True): 0.3, (True, False): 0.3, (False, False): 0.4})


def test_over_five_hundred_instances_emit_the_targets_law():
    instances, outcomes, worst, _ = mu.survey()
    assert instances >= 500
    assert outcomes > 20_000
    assert worst < 1e-12


def test_the_survey_covers_what_it_should():  # pitfall 12
    kinds = ex.families()
    assert max(f.vocab_size for f in kinds) == 5
    assert max(f.depth for f in kinds) == 3
    assert {f.draft for f in kinds} == set(ex.DRAFTS)
    assert {f.support for f in kinds} == set(ex.SUPPORTS)
    assert {f.sampling for f in kinds} == set(ex.SETTINGS)
    assert {f.verifier for f in kinds} == {"speculative", "block"}
    tables = kinds[0].tables()[0]
    assert not torch.allclose(tables[:, 0], tables[:, 1])  # laws depend on the prefix


def test_generate_emits_the_law_of_the_tables():  # pitfall 11: early stop is among the drafters
    found = mu.loop_distances(vocab_size=2, num=5) | mu.loop_distances(vocab_size=3, num=3)
    assert {name for name, _ in found} == set(mu.loop_drafters(2))
    for key, (distance, outcomes) in found.items():
        assert distance < 1e-12, key
        assert outcomes >= 3


def test_the_table_model_reads_exactly_what_it_is_shown():
    model = ex.TableLM(3, seed=4)
    target = ms.LanguageModel(model)
    ids = torch.tensor([[2, 0, 1, 1]])
    with torch.no_grad():
        logits = target.forward(target.new_cache(1, 4), ids).logits[0]
    for i in range(4):
        torch.testing.assert_close(logits[i], model.logits_after([2, 0, 1, 1][: i + 1]))


# Block verification, siblings, and the lossy ones.


def test_block_verification_on_the_papers_case():
    """P = (1/3, 2/3), Q = (2/3, 1/3), two tokens: 10/9 accepted by token, 11/9 by block."""
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log().expand(1, 7, 2)
    q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log().expand(1, 7, 2)
    expected = {}
    for name in ("speculative", "block"):
        family = ex.Family("chain of 2", "drawn", 2, ms.Sampling(1.0), "full", name, 1)

        class Fixed(ex.Family):
            def tables(self):
                return p, q

        found = ex.enumerate_family(Fixed(**family.__dict__))
        assert found.distance < 1e-15
        expected[name] = float(found.tokens[0]) - 1
    assert expected["speculative"] == pytest.approx(10 / 9)
    assert expected["block"] == pytest.approx(11 / 9)


def test_block_never_keeps_fewer_tokens_than_token_by_token():
    from dataclasses import replace

    gains = []
    for family in ex.families(instances=3):
        if family.verifier == "block":
            by_token = ex.enumerate_family(replace(family, verifier="speculative")).tokens
            gains.append(ex.enumerate_family(family).tokens - by_token)
    assert torch.cat(gains).min() > -1e-12
    assert torch.cat(gains).max() > 0.01


def test_block_refuses_trees():
    tree = ms.TokenTree(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[-1, -1]]))
    with pytest.raises(ValueError, match="chains"):
        VERIFIERS["block"](tree, Law(torch.zeros(1, 3, 4), ms.Sampling(1.0)), Random(0))


def test_block_in_generate_gives_greedy_tokens(llama):
    prompts = prompts_of(3, 6)
    plain = ms.generate(llama, prompts, max_new_tokens=14)
    block = ms.generate(llama, prompts, ms.Oracle(0.7, 3), max_new_tokens=14, verifier="block")
    assert [t.tolist() for t in block.tokens] == [t.tolist() for t in plain.tokens]


def test_gumbel_draws_are_draws_without_replacement():
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens, laws = Random(0).draw_siblings(q.expand(60_000, 4), 2)
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(tokens.numpy().T), 1)
    law = np.array(
        [[0 if i == j else q[i] * q[j] / (1 - q[i]) for j in range(4)] for i in range(4)]
    )
    assert ex.g_test(counts, law).passes()
    assert ex.g_test(counts, np.outer(q, q)).outside == 0
    assert not ex.g_test(counts, np.outer(q, q)).passes()
    torch.testing.assert_close(laws, sibling_laws(q.expand(60_000, 4), tokens))


def test_siblings_of_a_law_that_runs_out():
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    tokens, laws = Random(0).draw_siblings(q, 3)
    assert tokens[0, 0] == 1
    assert laws[0, 1].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert sorted(tokens[0].tolist()) != [1, 1, 1]
    with pytest.raises(ValueError, match="5 different tokens asked for of a vocabulary of 4"):
        Random(0).draw_siblings(q, 5)


@pytest.mark.parametrize("lenience", [0.25, 0.5, 0.9])
def test_lenience_is_lossy_and_keeps_its_promise(lenience, monkeypatch):
    """No token's probability exceeds p / l, and the law is not the target's."""
    monkeypatch.setitem(VERIFIERS, "test", lenient(lenience))
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.2, 0.7])
    tree = ms.TokenTree.chain(
        Random(1).draw(q.expand(100_000, 3))[:, None], q.expand(100_000, 1, 3)
    )
    law = Law(p.log().expand(100_000, 2, 3), ms.Sampling(1.0))
    verdict = VERIFIERS["test"](tree, law, Random(2))
    first = torch.where(verdict.accepted > 0, tree.tokens[:, 0], verdict.next_token)
    emitted = first.bincount(minlength=3) / 100_000
    assert (emitted <= p / lenience + 0.01).all()
    assert (emitted - p).abs().sum() / 2 > 0.02
    accepted = verdict.accepted.double().mean()
    assert float(accepted) == pytest.approx(float(torch.minimum(p / lenience, q).sum()), abs=0.01)


def test_typical_acceptance_keeps_what_is_typical():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    threshold = min(0.09, 0.3 * math.exp(-float(torch.special.entr(p).sum())))
    law = Law(p.log().expand(4, 2, 4), ms.Sampling(1.0))
    tree = ms.TokenTree.chain(torch.arange(4)[:, None])
    verdict = typical()(tree, law, Random(0))
    assert verdict.accepted.bool().tolist() == [x > threshold for x in p.tolist()]
    assert verdict.next_token.tolist() == [0] * 4


@pytest.mark.parametrize(("make", "bad"), [(lenient, 0.0), (lenient, 1.5), (typical, 0.0)])
def test_lossy_settings_are_checked(make, bad):
    with pytest.raises(ValueError, match="must be in"):
        make(bad)


def test_lossy_verifiers_fail_the_exactness_test_and_say_so_in_their_names():
    assert all(distance > 0.05 for distance in mu.lossy_distances().values())
    assert {name for name in VERIFIERS if "lossy" in name} == set(mu.lossy_distances())


# Statistics.


def test_the_g_test_keeps_its_false_failure_rate():
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(60))
    p_values = [ex.g_test(rng.multinomial(3000, law), law).p_value for _ in range(2000)]
    assert np.mean(np.array(p_values) < 0.01) < 0.025  # about 1 in 100, a little more when pooled
    assert min(p_values) > 1e-6


def test_the_stated_power_is_there():
    """A law at the detectable distance is failed; the bound is for the worst kind of difference."""
    rng = np.random.default_rng(1)
    law = np.full(60, 1 / 60)
    distance = ex.detectable(3000, 59)
    off = law.copy()
    off[:30] += distance / 30
    off[30:] -= distance / 30
    failed = [not ex.g_test(rng.multinomial(3000, off), law).passes() for _ in range(200)]
    assert np.mean(failed) >= 0.99
    assert ex.power(3000, 59, distance) == pytest.approx(0.999, abs=1e-4)
    assert ex.power(3000, 59, 0.0) == pytest.approx(1e-6, rel=1e-3)


def test_draws_outside_the_support_always_fail():
    assert not ex.g_test(np.array([50, 50, 1]), np.array([0.5, 0.5, 0.0])).passes()


def test_pooling_keeps_every_draw():
    observed, expected = ex.pool(np.array([1.0, 2, 3, 100]), np.array([0.5, 1, 2, 102.5]))
    assert observed.sum() == 106
    assert expected.min() >= ex.MIN_EXPECTED


def test_the_readable_bound():
    assert ex.tv_bound(1000, 4, 0.1) == pytest.approx(16 * math.exp(-20))
    assert ex.tv_bound(10, 50, 0.01) == 1.0


def test_the_permutation_test_tells_two_laws_apart_and_one_law_together():
    generator = torch.Generator().manual_seed(0)
    same = torch.randint(0, 6, (2, 150, 4), generator=generator)
    other = torch.randint(0, 4, (150, 4), generator=generator)
    assert ex.permutation_test(same[0], same[1], 2000) > 0.01
    assert ex.permutation_test(same[0], other, 2000) < 0.002


# Mutants.


@pytest.mark.parametrize("mutant", mu.MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught(mutant):  # pitfalls 3-7, 10-13, 15, 17, 21: each has its mutant
    with mutant.applied():
        caught = [check.name for check in mu.CHECKS if check() > check.limit]
    assert caught, f"{mutant.name} survives"


@pytest.mark.parametrize("mutant", mu.HEAD_MUTANTS, ids=lambda m: m.name)
def test_every_fault_of_a_head_is_caught(mutant):  # pitfalls 14, 25-28
    with mutant.applied():
        caught = [check.name for check in mu.HEAD_CHECKS if check() > check.limit]
    assert caught, f"{mutant.name} survives"


def test_the_healthy_code_passes_every_check():
    checks = mu.CHECKS + mu.HEAD_CHECKS
    assert {c.name: c() <= c.limit for c in checks} == {c.name: True for c in checks}


def test_a_mutant_is_gone_when_its_block_is_left():
    mutant = mu.MUTANTS[0]
    before = mutant.function().__code__
    try:
        with mutant.applied():
            assert mutant.function().__code__ is not before
            raise KeyError  # an error in the block must not leave the mutant behind
    except KeyError:
        pass
    assert mutant.function().__code__ is before
    assert "residual.clone()" in mutant.diff()


def test_an_edit_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="stands 0 times"):
        mu.Mutant("?", "verify:leftover", (("no such line", ""),), "").sources()


def test_the_report_fails_when_something_is_wrong():
    found = mu.Report(
        healthy={"walk": 1e-3},
        caught={"a mutant": {"walk": 1e-16, "greedy": 0.0}},
        lossy={"lenient (lossy)": 0.0},
        worst=1e-3,
    )
    problems = " ".join(found.problems())
    for word in ("fails on healthy code", "survives", "not noticed", "is off by"):
        assert word in problems


# Floating point.


def test_identical_texts_have_no_divergence(llama):
    out = ms.generate(llama, prompts_of(3, 5), max_new_tokens=6)
    assert ex.first_divergence(out, out, llama) == []


def test_a_fault_is_not_a_near_tie(llama):
    right = ms.generate(llama, prompts_of(3, 5), max_new_tokens=6)
    wrong = ms.generate(llama, prompts_of(3, 5), max_new_tokens=6)
    wrong.tokens[1][3] = (wrong.tokens[1][3] + 1) % 61
    (found,) = ex.first_divergence(right, wrong, llama)
    assert (found.row, found.position, found.verdict) == (1, 3, "fault")
    other = ms.generate(llama, prompts_of(4), max_new_tokens=6)
    with pytest.raises(ValueError, match="different prompts"):
        ex.first_divergence(right, other, llama)


def test_a_tie_is_a_near_tie(llama):
    """Two tokens with the same output weights tie exactly; either may win."""
    from conftest import tiny

    target = tiny("llama", torch.float32)
    out = ms.generate(target, prompts_of(3), max_new_tokens=4, eos=())
    winner = int(out.tokens[0][2])
    twin = (winner + 1) % 61
    with torch.no_grad():
        target.model.lm_head.weight[twin] = target.model.lm_head.weight[winner]
    a = ms.generate(target, prompts_of(3), max_new_tokens=4, eos=())
    b = ms.generate(target, prompts_of(3), max_new_tokens=4, eos=())
    at = next(i for i, t in enumerate(a.tokens[0].tolist()) if t in (winner, twin))
    b.tokens[0][at] = twin if int(a.tokens[0][at]) == winner else winner
    (found,) = ex.first_divergence(a, b, target)
    assert found.verdict == "near-tie"
