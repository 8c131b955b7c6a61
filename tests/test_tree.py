"""Trees and their masks, drawn by hand."""

from __future__ import annotations

import pytest
import torch

from minispec import TokenTree

#        root
#       /    \
#      0      1
#     / \      \
#    2   3      4
#        |
#        5
PARENTS = [-1, -1, 0, 0, 1, 3]
MASK = """
1.......
11......
1.1.....
11.1....
11..1...
1.1..1..
11..1.1.
"""


def tree(**changes) -> TokenTree:
    return TokenTree(
        **{"tokens": torch.arange(6)[None], "parents": torch.tensor([PARENTS]), **changes}
    )


def test_the_mask_is_the_one_drawn_by_hand():
    depth, visible = tree().with_root()
    drawn = [[c == "1" for c in line][:7] for line in MASK.split()]
    assert visible[0].tolist() == drawn
    assert depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]


def test_a_chain_and_the_same_chain_by_parents_agree():
    chain = TokenTree.chain(torch.zeros(2, 5, dtype=torch.long))
    plain = TokenTree(chain.tokens, chain.parents)
    for a, b in zip(chain.with_root(), plain.with_root(), strict=True):
        assert torch.equal(a, b)


def test_a_deep_chain_by_parents():
    num = 33  # not a power of two: the squaring must still reach the top
    plain = TokenTree(torch.zeros(1, num, dtype=torch.long), torch.arange(-1, num - 1)[None])
    assert plain.depths().tolist() == [list(range(1, num + 1))]


def test_no_nodes_is_plain_decoding():
    depth, visible = TokenTree.empty(3).with_root()
    assert depth.tolist() == [[0]] * 3
    assert visible.tolist() == [[[True]]] * 3


def test_cutting_keeps_the_tree_connected():
    two = TokenTree(torch.arange(6).expand(2, 6), torch.tensor([PARENTS, PARENTS]))
    cut = two.cut(torch.tensor([1, 2]))
    assert cut.valid.tolist() == [
        [True, True, False, False, False, False],
        [True, True, True, True, True, False],
    ]
    cut.check(vocab_size=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.full((1, 6), 6)}, "token 6 is outside"),
        ({"tokens": torch.full((1, 6), -1)}, "outside the vocabulary"),
        ({"parents": torch.tensor([[0, -1, 0, 0, 1, 3]])}, "must stand before"),
        ({"parents": torch.tensor([[-2, -1, 0, 0, 1, 3]])}, "must stand before"),
        ({"parents": torch.tensor([PARENTS])[:, :4]}, "same shape"),
        ({"valid": torch.tensor([[True, True, True, False, True, True]])}, "not connected"),
        ({"q": torch.ones(1, 6, 5) / 5}, "whole vocabulary"),
        ({"q": torch.eye(6)[None].roll(1, 1)}, "probability 0"),
        ({"tokens": torch.zeros(1, 6)}, "int64"),
    ],
)
def test_what_is_no_tree_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tree(**changes).check(vocab_size=6)


def test_trim_drops_the_last_columns_that_no_row_uses():
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    valid = torch.tensor([[True, False, False, False], [False, True, False, False]])
    q = torch.full((2, 4, 9), 1 / 9)
    tree = TokenTree(tokens, torch.full((2, 4), -1), q, valid).trim()
    assert tree.tokens.tolist() == [[5, 6], [1, 2]]
    assert tree.valid is not None
    assert tree.valid.tolist() == [[True, False], [False, True]], "a gap stays: nodes keep numbers"
    assert tree.q is not None
    assert tree.q.shape == (2, 2, 9)
    assert TokenTree(tokens, torch.full((2, 4), -1), q, torch.zeros(2, 4).bool()).trim().q is None
    whole = TokenTree.chain(tokens)
    assert whole.trim() is whole
