"""How EAGLE heads learn.

EAGLE-1 (arXiv 2401.15077, section 4.2) is shown true features and told the next one:

    loss = SmoothL1(h_t, f_{t+1}) + 0.1 CE(target's law at t+1, LM head(h_t))

EAGLE-3 (2503.01840, section 3.2, "training-time test") drops the feature's loss and is unrolled on
its own outputs, as it will be used: step 0 reads true features g, step i its own output of step
i - 1 in their place, with the text's true tokens throughout:

    loss = sum_i 0.8^i CE(target's law for token t+2+i, head's step i at t)

Laws are renormalised over the tokens that are drafted. Otherwise than the authors' code: the
prompts are learned from as well, and so are places whose likeliest token is not drafted.

Memory grows with rows x unrolled steps x (T^2 heads + T V_d) numbers of 4 bytes; for a large
target take more parts an update (``Recipe.accumulate``).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints import save_eagle
from ..drafters.eagle import EagleHead
from ..models import LanguageModel
from .data import Batch, places_of
from .fit import Laws, Learner, law_rows, rank_of

DECAY = 0.8
TOKEN_WEIGHT = 0.1  # EAGLE-1's, of the token loss beside the feature loss
NOISE = 0.1  # EAGLE-1's, uniform, on the features that it reads


class EagleLearner(Learner):
    """Trains ``head``.

    steps: how often it is unrolled in training; EAGLE-1's own way is 1. single: so many updates
    at first with one step alone, which cost a fraction. feature_loss: EAGLE-1's SmoothL1. measured:
    how many drafted tokens ``ranks`` follows.
    """

    rows: Tensor
    known: Tensor
    embed: Tensor

    def __init__(
        self,
        head: EagleHead,
        target: LanguageModel,
        steps: int | None = None,
        feature_loss: bool | None = None,
        noise: float | None = None,
        measured: int = 5,
        seed: int = 0,
        single: int = 0,
    ) -> None:
        super().__init__()
        first = head.config.version == 1
        self.head, self.measured, self.seed = head, measured, seed
        self.steps = (1 if first else 5) if steps is None else steps
        self.single = single
        self.feature_loss = first if feature_loss is None else feature_loss
        self.noise = (NOISE if first else 0.0) if noise is None else noise
        if self.steps < 1 or measured < 1:
            raise ValueError("steps and measured must be at least 1")
        if self.feature_loss and head.config.width != head.config.target_width:
            raise ValueError("a feature loss needs a head as wide as the target")
        rows = law_rows(target, head.token_map)
        known = places_of(head.token_map, target.vocab_size)
        embed = head.embed if head.embed is not None else target.model.get_input_embeddings().weight
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("known", known, persistent=False)
        self.register_buffer("embed", embed.detach().clone(), persistent=False)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        total, count = self.rows.new_zeros(()), self.rows.new_zeros(())
        hidden = batch.hidden.to(self.rows.dtype)
        inputs = hidden
        if self.noise:  # a function of the step alone, so that a resumed run sees the same
            chance = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            drawn = torch.rand(hidden.shape, generator=chance).to(hidden.device)
            inputs = hidden + (2 * drawn - 1) * self.noise
        laws = Laws(self.rows, hidden, batch.has_ahead(1))
        steps = 1 if step < self.single else self.steps
        for i, out in enumerate(self.unroll(batch, inputs, steps)):
            learn = batch.has_ahead(2 + i)
            logits = self.head.logits(out[learn], self.rows).float()
            loss = F.cross_entropy(logits, laws.ahead(batch, 1 + i, learn), reduction="sum")
            if self.feature_loss:
                truth = batch.ahead(hidden, 1 + i)[learn]  # the feature that says token t+2+i
                gap = F.smooth_l1_loss(out[learn].float(), truth, reduction="sum")
                loss = gap / truth.shape[-1] + TOKEN_WEIGHT * loss
            total = total + DECAY**i * loss
            count = count + learn.sum()
        return total, count

    def unroll(self, batch: Batch, hidden: Tensor, steps: int) -> list[Tensor]:
        """The head's outputs [R, T, H] at steps 0 .. steps - 1.

        Step i at place t reads token t+1+i, and in the feature's place the output of step i - 1
        at t. It attends to the step-0 keys of the places up to t, which are true, and to what
        itself wrote at t in the steps since: so a draft begun at t sees its cache.
        """
        c, layer = self.head.config, self.head.layer
        taps = {i: t.to(hidden.dtype) for i, t in batch.taps.items()}
        feature = self.head.first(hidden, taps)
        visible = batch.visible().unsqueeze(1)  # [R, 1, T, T]
        keys: list[Tensor] = []  # of each step, [R, heads, T, D]
        values: list[Tensor] = []
        found = []
        groups = c.heads // c.kv_heads
        for i in range(steps):
            embed = F.embedding(batch.ahead(batch.tokens, 1 + i), self.embed).to(hidden.dtype)
            if c.version == 1:
                feature = self.head.fc(torch.cat([embed, feature], -1))
                x = feature
            else:
                x = torch.cat([layer.input_layernorm(embed), layer.hidden_norm(feature)], -1)
            q, k, v = layer.self_attn.project(x, batch.position + i)
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            read = attend(q, keys, values, visible)
            h = feature + layer.self_attn.o_proj(read.transpose(1, 2).flatten(2))
            feature = h + layer.mlp(layer.post_attention_layernorm(h))
            found.append(feature)
        return found

    @torch.no_grad()
    def ranks(self, batch: Batch, most: int = 10) -> tuple[Tensor, Tensor]:
        hidden = batch.hidden.to(self.rows.dtype)
        found = []
        for i, out in enumerate(self.unroll(batch, hidden, self.measured)):
            label = self.known[batch.ahead(batch.tokens, 2 + i)]
            inside = batch.has_ahead(2 + i) & (label >= 0)
            rank = rank_of(self.head.logits(out[inside], self.rows), label[inside], most)
            full = torch.full(label.shape, most, device=label.device)
            found.append(full.masked_scatter(inside, rank))
        return torch.stack(found), batch.has_ahead(2) & batch.ahead(batch.greedy, 2)

    def save(self, folder: Path) -> None:
        save_eagle(self.head, folder, len(self.known))


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """Attention of step i = len(keys) - 1: q and every key [R, heads, T, D] -> [R, heads, T, D].

    To keys[0] by ``visible`` [R, 1, T, T]; to keys[1 .. i] at its own place only. One softmax over
    both: the scores of the own place are columns behind the others.
    """
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys[0].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True).float() * scale for k in keys[1:]]
    p = torch.cat([scores, *own], -1).softmax(-1).to(q.dtype)
    num = keys[0].shape[2]
    out = p[..., :num] @ values[0].to(q.dtype)
    for j, v in enumerate(values[1:]):
        out = out + p[..., num + j : num + j + 1] * v
    return out
