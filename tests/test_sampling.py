"""Laws and draws, against transformers' own processors and known values."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as hf

import minispec as ms
from minispec.sampling import Certain, Law, Random, _nucleus

LOGITS = torch.randn(64, 101, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (ms.Sampling(0.7), [hf.TemperatureLogitsWarper(0.7)]),
        (ms.Sampling(1.0, top_k=7), [hf.TopKLogitsWarper(7)]),
        (ms.Sampling(1.0, top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
        (ms.Sampling(1.0, min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
        (
            ms.Sampling(0.3, top_k=20, top_p=0.9),
            [hf.TemperatureLogitsWarper(0.3), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9)],
        ),
    ],
)
def test_laws_are_those_of_transformers(sampling, processors):
    scores = LOGITS.clone()
    for processor in processors:
        scores = processor(None, scores)
    torch.testing.assert_close(sampling.probs(LOGITS), scores.softmax(-1), atol=1e-6, rtol=1e-5)


def test_the_quick_nucleus_equals_the_full_sort():
    p = LOGITS.softmax(-1)
    torch.testing.assert_close(_nucleus(p, 0.95, first_try=4), _nucleus(p, 0.95))


def test_temperature_zero_is_the_argmax_and_ties_go_to_the_smaller_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert ms.Sampling().probs(logits).tolist() == [[0, 1, 0, 0]]


def test_tiny_temperature_does_not_overflow_and_is_greedy():  # pitfall 8
    law = ms.Sampling(1e-6).probs(LOGITS * 1e3)
    assert torch.isfinite(law).all()
    assert torch.equal(law.argmax(-1), LOGITS.argmax(-1))
    torch.testing.assert_close(law.amax(-1), torch.ones(64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_never_become_a_law(bad, temperature):  # pitfall 23
    logits = torch.zeros(2, 1, 4)
    logits[1, 0, 2] = bad
    law = Law(logits, ms.Sampling(temperature))
    law.at(torch.tensor([-1, -1]))
    assert law.faulty.tolist() == [False, True]


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ms.Sampling(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"temperature": None}, {"top_k": [1]}, {"top_p": ".5"}, {"min_p": True}]
)
def test_settings_that_are_no_numbers_are_refused(arguments):
    with pytest.raises(TypeError, match="must be a number"):
        ms.Sampling(**arguments)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    law = ms.Sampling(1e-50).probs(LOGITS)
    assert torch.equal(law, ms.Sampling().probs(LOGITS))


def test_draws_follow_the_law_and_never_leave_its_support():
    law = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0]).expand(200_000, 6)
    counts = Random(0).draw(law).bincount(minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    # 5 standard deviations of a binomial of 200,000 draws
    torch.testing.assert_close(counts / 200_000, law[0], atol=0.0056, rtol=0)


def test_the_last_uniform_does_not_fall_off_the_end():
    class Highest(Random):
        def uniform(self, num):
            return torch.full((num,), 1 - 2.0**-53, dtype=torch.float64)

    law = torch.tensor([[0.3, 0.7 * (1 + 1e-7), 0.0]])
    assert Highest(0).draw(law).tolist() == [1]


def test_coins():
    rng = Random(3)
    assert rng.coin(torch.ones(1000)).all()
    assert not rng.coin(torch.zeros(1000)).any()
    assert abs(rng.coin(torch.full((100_000,), 0.3)).double().mean() - 0.3) < 0.008
    assert Certain().coin(torch.tensor([0.0, 1.0, 5.0])).tolist() == [False, True, True]


def test_seeds_leave_the_global_generator_alone():  # pitfall 9
    before = torch.get_rng_state()
    assert Random(5).uniform(9).tolist() == Random(5).uniform(9).tolist()
    assert Random(5).uniform(9).tolist() != Random(6).uniform(9).tolist()
    assert torch.equal(before, torch.get_rng_state())
