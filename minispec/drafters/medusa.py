"""Extra heads on the frozen target guess the tokens after next (Medusa, arXiv 2401.10774).

The target's feature at position t says, through its LM head, token t+1. Head k = 0, 1, ... reads
the same feature and guesses token t+2+k (section 2.1.1):

    p^(k) = softmax( W2 (SiLU(W1 h + b1) + h) )

All heads look at once, so a whole tree of candidates costs one small pass. The price: head k does
not know what the heads before it have chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVCache
from ..models import LanguageModel
from ..shapes import Shape
from ..tree import TokenTree
from .base import Drafter, Kept, Rows, check_head, head_rows


class ResBlock(nn.Module):
    """x + SiLU(W x + b); W and b start at zero, so that the block starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """``num_heads`` heads of ``num_layers`` residual blocks over features [..., H].

    With ``vocab_size`` each head ends in a projection of its own, as published (version 1: keys
    ``{head}.{layer}.linear.weight`` and ``{head}.{num_layers}.weight``). Without it they share the
    target's LM head (version 2), which ``token_map`` [V_d], if given, cuts to the rows of these
    target ids: on a small model the LM head is the cost, and few ids make up most of a text.
    """

    token_map: Tensor | None

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_layers: int = 1,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
    ) -> None:
        blocks = [[ResBlock(width) for _ in range(num_layers)] for _ in range(num_heads)]
        own = [[nn.Linear(width, vocab_size, bias=False)] if vocab_size else [] for _ in blocks]
        heads = zip(blocks, own, strict=True)
        super().__init__(nn.Sequential(*layers, *last) for layers, last in heads)
        if vocab_size and token_map is not None and len(token_map) != vocab_size:
            raise ValueError(f"token_map has {len(token_map)} ids for a vocabulary of {vocab_size}")
        self.width, self.num_layers, self.vocab_size = width, num_layers, vocab_size
        self.register_buffer("token_map", token_map, persistent=False)

    @property
    def num_heads(self) -> int:
        return len(self)

    def forward(self, hidden: Tensor, shared: Tensor | None = None) -> Tensor:
        """Features [..., H] to logits [heads, ..., V_d].

        shared: the rows of the target's LM head [V_d, H] (``shared_rows``), for heads without a
        projection of their own.
        """
        out = torch.stack([head(hidden) for head in self])
        return out if self.vocab_size else F.linear(out, shared)  # type: ignore[arg-type]

    def shared_rows(self, target: LanguageModel) -> Tensor | None:
        """What ``forward`` needs of the target's LM head: [V_d, H], or None."""
        return None if self.vocab_size else head_rows(target, self.token_map)

    def start_from(self, target: LanguageModel) -> None:
        """Own projections start as the target's LM head, so that each head says t+1 at first."""
        rows = head_rows(target, self.token_map)
        for i in range(self.num_heads if self.vocab_size else 0):
            with torch.no_grad():
                self.get_parameter(f"{i}.{self.num_layers}.weight").copy_(rows)


class Medusa(Drafter):
    """Drafts a tree of the heads' best guesses: node (depth d, rank r) holds the r-th best token
    of head d.

    The candidates are chosen and not drawn, so they are point masses and the walk is exact at
    every temperature; ``verifier="typical (lossy)"`` is the paper's own, lossy choice.
    """

    wants_features = True

    def __init__(self, heads: MedusaHeads, tree: Shape) -> None:
        if not isinstance(tree, Shape):
            raise ValueError(f"tree must be a Shape, not {tree!r}")
        if tree.depth > heads.num_heads:
            raise ValueError(f"a tree of depth {tree.depth} needs as many heads, not {len(heads)}")
        self.heads, self.tree, self.max_nodes = heads, tree, tree.size

    def check(self, target: LanguageModel, longest: int) -> None:
        held = self.heads.token_map
        vocab = len(held) if held is not None else self.heads.vocab_size or target.vocab_size
        check_head(target, self.heads.width, held, vocab, self.tree.branching)

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        assert prompt is not None
        self.rows_of_head = self.heads.shared_rows(target)
        last = (prompt.emitted - 1).view(-1, 1, 1).expand(-1, 1, prompt.hidden.shape[-1])
        self.feature = prompt.hidden.gather(1, last).squeeze(1)  # [B, H] at the token before root

    def propose(self, rows: Rows) -> TokenTree:
        logits = self.heads(self.feature, self.rows_of_head)[: self.tree.depth]  # [D, B, V_d]
        best = logits.topk(self.tree.branching, dim=-1).indices.transpose(0, 1)  # [B, D, K]
        return self.tree.tree(best if self.heads.token_map is None else self.heads.token_map[best])

    def observe(self, rows: Rows, kept: Kept) -> None:
        """Keeps the feature of the last accepted token: the new root hangs on it."""
        accepted = (kept.emitted - 1).clamp(min=0).unsqueeze(1)  # [B, 1]
        place = F.pad(kept.path + 1, (1, 0)).gather(1, accepted)  # [B, 1] among root and nodes
        index = place.unsqueeze(2).expand(-1, 1, kept.hidden.shape[-1])
        self.feature = kept.hidden.gather(1, index).squeeze(1)
