"""One definition of every metric, on rounds written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from minispec.trace import Round, Trace, pooled


def trace() -> Trace:
    # drafted, tried, accepted, emitted of two rows; row 1 stops after the second round
    table = [
        ([4, 4], [3, 1], [2, 0], [3, 1]),
        ([4, 2], [4, 1], [4, 1], [5, 1]),
        ([4, 0], [1, 0], [0, 0], [1, 0]),
    ]
    rounds = [Round(*map(torch.tensor, line)) for line in table]
    return Trace(rounds, prefill_emitted=torch.tensor([1, 1]))


def test_tau_counts_the_targets_own_token_and_only_live_rows():  # pitfall 31
    assert trace().tau == pytest.approx((3 + 5 + 1 + 1 + 1) / 5)


def test_alpha_counts_nothing_after_the_first_rejection():  # pitfall 31
    assert trace().alpha == pytest.approx((2 + 4 + 0 + 0 + 1) / (3 + 4 + 1 + 1 + 1))


def test_n_alpha_is_conditional_on_the_position_before():
    assert trace().n_alpha == pytest.approx([3 / 5, 2 / 2, 1 / 2, 1 / 1])


def test_tokens_and_passes():
    assert trace().tokens == 2 + 11
    assert trace().passes == 4


def test_the_frame_has_a_line_for_each_live_row_and_round():
    frame = trace().to_frame()
    assert frame[["row", "round"]].values.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2]]
    assert frame["emitted"].sum() == 11


def test_pooling_adds():
    twice = pooled([trace(), trace()])
    assert (twice.tau, twice.alpha) == (trace().tau, trace().alpha)
    assert twice.tokens == 26


def test_no_rounds_no_numbers():
    assert math.isnan(Trace().tau)
    assert math.isnan(Trace().alpha)
    assert Trace().n_alpha == []
