"""The rule on small tables whose answers are known."""

from __future__ import annotations

import pytest
import torch

from minispec import Sampling, TokenTree
from minispec.sampling import Certain, Law, Random
from minispec.verify import leftover, speculative


def law_of(*rows: list[float]) -> Law:
    """One row of a batch: the target's law at the root and the nodes."""
    return Law(torch.tensor([rows], dtype=torch.float64).log(), Sampling(1.0))


class Coins(Random):
    """Coins that fall as told; draws take the likeliest token."""

    def __init__(self, *falls: bool) -> None:
        self.falls, self.asked = list(falls), []

    def coin(self, prob):
        self.asked.append(round(float(prob), 6))
        return torch.tensor([self.falls.pop(0) and float(prob) > 0])

    def draw(self, probs):
        self.drawn = probs[0].tolist()
        return probs.argmax(-1)


def test_a_drawn_token_is_accepted_with_p_over_q():
    p, q = [0.2, 0.5, 0.3], torch.tensor([[[0.5, 0.25, 0.25]]], dtype=torch.float64)
    coins = Coins(False)
    tree = TokenTree.chain(torch.tensor([[0]]), q)
    verdict = speculative(tree, law_of(p, p), coins)
    assert coins.asked == [0.4]
    # the residual is max(p - q, 0) = (0, .25, .05), normalised
    assert coins.drawn == pytest.approx([0, 5 / 6, 1 / 6])
    assert (verdict.accepted.item(), verdict.tried.item(), verdict.next_token.item()) == (0, 1, 1)


def test_a_chosen_token_is_a_point_mass():  # pitfall 3: accepted with p, not with p / softmax
    p = [0.2, 0.5, 0.3]
    coins = Coins(False)
    speculative(TokenTree.chain(torch.tensor([[0]])), law_of(p, p), coins)
    assert coins.asked == [0.2]
    assert coins.drawn == pytest.approx([0, 0.625, 0.375])  # p without token 0


def test_siblings_see_the_residual_of_the_one_before():
    p = [0.2, 0.5, 0.3]
    siblings = TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, -1, -1]]))
    coins = Coins(False, False, True)
    verdict = speculative(siblings, law_of(p, p, p, p), coins)
    assert coins.asked == pytest.approx([0.2, 0.625, 1.0])
    assert verdict.path.tolist() == [[2, -1, -1]]
    assert (verdict.accepted.item(), verdict.tried.item()) == (1, 1)


def test_a_repeated_sibling_is_never_accepted():
    p = [0.2, 0.5, 0.3]
    siblings = TokenTree(torch.tensor([[1, 1]]), torch.tensor([[-1, -1]]))
    coins = Coins(False, True)
    assert speculative(siblings, law_of(p, p, p), coins).accepted.item() == 0
    assert coins.asked == [0.5, 0.0]


def test_all_accepted_brings_the_bonus_from_the_last_node():
    laws = law_of([0.9, 0.1], [0.1, 0.9], [0.8, 0.2])
    coins = Coins(True, True)
    verdict = speculative(TokenTree.chain(torch.tensor([[0, 1]])), laws, coins)
    assert (verdict.accepted.item(), verdict.tried.item()) == (2, 2)
    assert coins.drawn == pytest.approx([0.8, 0.2])
    assert verdict.next_token.item() == 0


def test_after_a_rejection_nothing_below_counts():  # pitfall 31
    laws = law_of([0.5, 0.5], [1e-9, 1], [1e-9, 1])
    verdict = speculative(TokenTree.chain(torch.tensor([[0, 1]])), laws, Coins(False, True))
    assert (verdict.accepted.item(), verdict.tried.item()) == (0, 1)
    assert verdict.path.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("r", "q", "expected"),
    [
        ([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]),  # equal laws: nothing is owed, the target's stands
        ([0.5, 0.5], [0.5 + 1e-9, 0.5 + 1e-9], [0.5, 0.5]),  # p <= q by rounding
        ([1.0, 0.0], [0.0, 1.0], [1.0, 0.0]),  # disjoint supports
        ([0.5, 0.5], [float("nan"), 0.5], [0.5, 0.5]),  # a comparison with NaN is False
    ],
)
def test_the_residual_has_an_answer_everywhere(r, q, expected):  # pitfall 5
    r, q = torch.tensor([r], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    assert leftover(r, q)[0].tolist() == pytest.approx(expected)


def test_temperature_zero_is_the_same_rule():
    logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    law = Law(logits, Sampling())
    right = speculative(TokenTree.chain(torch.tensor([[1, 0]])), law, Certain())
    assert (right.accepted.item(), right.next_token.item()) == (2, 2)
    wrong = speculative(TokenTree.chain(torch.tensor([[2, 0]])), law, Certain())
    assert (wrong.accepted.item(), wrong.next_token.item()) == (0, 1)


def test_rows_do_not_touch_each_other():
    tokens = torch.tensor([[0, 1], [1, 1], [0, 0]])
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]).expand(3, 3, 2)
    verdict = speculative(TokenTree.chain(tokens), Law(logits, Sampling()), Certain())
    assert verdict.accepted.tolist() == [2, 0, 1]
    assert verdict.next_token.tolist() == [0, 0, 1]
    assert verdict.path.tolist() == [[0, 1], [-1, -1], [0, -1]]
