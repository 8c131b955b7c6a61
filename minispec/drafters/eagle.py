"""One layer on the target's features drafts the next feature, and so on (EAGLE, EAGLE-2, EAGLE-3).

At position t the target has a feature f_t, and then a token t+1 was chosen: the feature alone does
not say which (arXiv 2401.15077, section 3.1). One decoder layer reads the pair,

    EAGLE-1 (2401.15077)   h = FC [e(t+1) ; f_t],               h += attn(h)
    EAGLE-3 (2503.01840)   g = FC [low ; mid ; high]_t,     h = g + attn([norm e(t+1) ; norm g])
    both                   h += MLP(norm h)

and its output stands for f_{t+1}: an LM head says token t+2 from it, and in the next step it takes
the feature's place (f, or g without the FC). EAGLE-2 (2406.16858) is EAGLE-1's head with a tree
that grows where the draft is confident. After a verification the accepted tokens enter once more
with the target's true features, and what was drafted is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVCache, LayerShape
from ..models import CHUNK, LanguageModel, grouped_attention
from ..shapes import Level, Shape
from ..tree import TokenTree
from .base import Drafter, Kept, Rows, check_head, head_rows
from .draft_tree import Pick, expand, reading_plan
from .grow import Grow, grow


@dataclass(frozen=True)
class EagleConfig:
    """What a head is made of.

    version 1: EAGLE and EAGLE-2; 3: EAGLE-3. taps: the target's layers whose inputs EAGLE-3 fuses,
    low to high. rope_theta is the draft's own, never the target's. vocab: of what it drafts.
    """

    version: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    target_width: int
    taps: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    eps: float = 1e-6
    fc_bias: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ValueError(f"version must be 1 (EAGLE-1, -2) or 3 (EAGLE-3), not {self.version}")
        if (self.version == 3) != bool(self.taps):
            raise ValueError("EAGLE-3 fuses the inputs of taps; EAGLE-1 has no taps")
        if self.version == 1 and self.width != self.target_width:
            raise ValueError(f"EAGLE-1 is as wide as its target: {self.width}, {self.target_width}")
        if len(set(self.taps)) != len(self.taps):
            raise ValueError(f"taps {self.taps} name a layer twice")


class Attention(nn.Module):
    """Self-attention with rotary positions over a KVCache, or over the sequence itself."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.c = c
        wide = 2 * c.width if c.version == 3 else c.width  # EAGLE-3: embedding and feature abreast
        self.q_proj = nn.Linear(wide, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(wide, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(wide, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, n, wide], position [B, n] to q [B, heads, n, D] and k, v [B, kv_heads, n, D]."""
        q, k, v = (
            y.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        cos, sin = angles(position, self.c)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(
        self, x: Tensor, position: Tensor, mask: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """mask [B, 1, n, S], additive."""
        q, k, v = self.project(x, position)
        if cache is not None:
            k, v = cache.update(0, k, v)
        groups = self.c.heads // self.c.kv_heads
        out, _ = grouped_attention(self, q, k, v, mask.repeat(1, 1, groups, 1))
        return self.o_proj(out.flatten(2))


def angles(position: Tensor, c: EagleConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, n, D] of the rotary embedding (Su et al. 2104.09864), in fp32."""
    even = torch.arange(0, c.head_dim, 2, device=position.device, dtype=torch.float32)
    angle = position[:, None, :, None] * c.rope_theta ** (-even / c.head_dim)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of x [B, heads, n, D], as Llama does."""
    one, two = x.chunk(2, -1)
    return (x * cos + torch.cat([-two, one], -1) * sin).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.width, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.width, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer. What EAGLE-1 and EAGLE-3 do differently stands in ``forward``."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.version = c.version
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.post_attention_layernorm = nn.RMSNorm(c.width, c.eps)
        if c.version == 3:
            self.input_layernorm = nn.RMSNorm(c.width, c.eps)
            self.hidden_norm = nn.RMSNorm(c.width, c.eps)

    def forward(
        self,
        embed: Tensor,
        feature: Tensor,
        position: Tensor,
        mask: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """embed, feature [B, n, H] to [B, n, H]; EAGLE-1's ``feature`` is FC [e ; f] already."""
        if self.version == 1:
            x = feature  # no norm before the attention
        else:
            x = torch.cat([self.input_layernorm(embed), self.hidden_norm(feature)], -1)
        h = feature + self.self_attn(x, position, mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class EagleHead(nn.Module):
    """The trained part of EAGLE, EAGLE-2 and EAGLE-3.

    token_map [V_d]: the target's ids that it drafts over; None: all. EAGLE-3 has an LM head of
    its own over them; EAGLE-1 reads the target's, cut to these rows (``shared_rows``). ``embed``
    [V, H]: token embeddings of its own, where the checkpoint has them; else the target's.
    """

    token_map: Tensor | None
    embed: Tensor | None

    def __init__(
        self, config: EagleConfig, token_map: Tensor | None = None, embed: Tensor | None = None
    ) -> None:
        super().__init__()
        c = self.config = config
        if token_map is not None and len(token_map) != c.vocab:
            raise ValueError(f"token_map has {len(token_map)} ids for a vocabulary of {c.vocab}")
        fused = len(c.taps) * c.target_width if c.version == 3 else c.width + c.target_width
        self.fc = nn.Linear(fused, c.width, bias=c.fc_bias)
        self.layer = Layer(c)
        if c.version == 3:
            self.norm = nn.RMSNorm(c.width, c.eps)
            self.lm_head = nn.Linear(c.width, c.vocab, bias=False)
        self.register_buffer("token_map", token_map, persistent=False)
        self.register_buffer("embed", embed, persistent=False)

    def first(self, hidden: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The target's feature as the head takes it up: f, or g = FC [low ; mid ; high]."""
        if self.config.version == 1:
            return hidden
        return self.fc(torch.cat([taps[i] for i in self.config.taps], -1))

    def step(
        self,
        embed: Tensor,
        feature: Tensor,
        position: Tensor,
        mask: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """One step over pairs (token t+1, feature at t), both [B, n, H], at position t [B, n].

        feature: ``first`` of the target's, or an earlier step's output. Returns what stands for
        the feature at t+1, [B, n, H].
        """
        if self.config.version == 1:
            feature = self.fc(torch.cat([embed, feature], -1))  # the embedding first
        return self.layer(embed, feature, position, mask, cache)

    def logits(self, feature: Tensor, shared: Tensor | None = None) -> Tensor:
        """[..., H] to [..., V_d]. EAGLE-3 norms what it reads here, not what it feeds back."""
        if self.config.version == 3:
            return self.lm_head(self.norm(feature))
        return F.linear(feature, shared)  # type: ignore[arg-type]

    def shared_rows(self, target: LanguageModel) -> Tensor | None:
        """The rows [V_d, H] of the target's LM head that EAGLE-1 reads; None for EAGLE-3."""
        return None if self.config.version == 3 else head_rows(target, self.token_map)

    @torch.no_grad()
    def start_from(self, target: LanguageModel) -> None:
        """Starts near the target, where the shapes allow it and where that was measured to help.

        The FC as "the feature as it is". EAGLE-3: the layer as the target's last (its attention
        reads it off the feature's half, and nothing off the embedding's), the norms as those
        through which the target reads the same, the LM head as its rows. EAGLE-1's layer has no
        input norm, so the target's weights would meet features of another size: they stay random.
        """
        c, layer = self.config, self.layer
        if c.target_width == c.width:  # EAGLE-1: [e ; f] -> f; EAGLE-3: [low ; mid ; high] -> high
            self.fc.weight.mul_(0 if c.version == 3 else 0.3)
            self.fc.weight[:, -c.width :] += torch.eye(c.width).to(self.fc.weight)
        if c.version == 1:
            return
        last = target.layers[-1]
        for name, mine in layer.named_parameters():
            theirs = dict(last.named_parameters()).get(name)
            if theirs is None or "norm" in name:
                continue
            if theirs.shape == mine.shape:
                mine.copy_(theirs)
            elif name.startswith("self_attn.") and theirs.shape[1] * 2 == mine.shape[1]:
                mine.zero_()
                mine[:, theirs.shape[1] :].copy_(theirs)
        copy_gain(layer.input_layernorm, target.layers[0], "input_layernorm")
        copy_gain(layer.hidden_norm, last, "input_layernorm")
        copy_gain(layer.post_attention_layernorm, last, "post_attention_layernorm")
        rows = head_rows(target, self.token_map)
        if rows.shape == self.lm_head.weight.shape:
            self.lm_head.weight.copy_(rows)
            copy_gain(self.norm, target, "final_norm")

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """The draft's own cache: one layer."""
        c, weight = self.config, self.fc.weight
        shape = LayerShape(c.kv_heads, c.head_dim, c.head_dim, weight.dtype, weight.device)
        return KVCache([shape], batch, capacity)


def copy_gain(norm: nn.RMSNorm, owner: object, name: str) -> None:
    """Starts ``norm`` as the RMS norm ``owner.name``, if there is one as wide.

    Its gain is read off as what it makes of ones: some models store it less 1. A LayerNorm makes
    zeros of them and is left aside.
    """
    theirs = getattr(owner, name, None)
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != norm.weight.shape:
        return
    gain = theirs(torch.ones_like(weight).view(1, 1, -1)).flatten()  # type: ignore[misc]
    if gain.abs().max() > 0.01:
        norm.weight.copy_(gain)


class Eagle(Drafter):
    """Drafts with an EAGLE head: a static ``Shape`` (EAGLE-1) or a tree that ``Grow``s (EAGLE-2).

    choose: "top", the likeliest candidates, which are point masses; "draw", without replacement
    from the draft's law (static shapes only). Both are exact at every temperature.

    What it keeps during a call:
    cache     keys and values of the pairs read so far, true ones first
    tokens    [B, n] committed tokens that it has not read yet, ``count`` [B] of them valid
    features  [B, n, H] the target's true features one place before each, as ``first`` gives them
    feature   [B, w, H] what the last step gave: the places that the next level hangs on
    level     of a static tree: what ``pick_top`` or ``pick_drawn`` chose last, and read_level reads
    """

    wants_features = True

    def __init__(self, head: EagleHead, tree: Shape | Grow, choose: str = "top") -> None:
        if choose not in ("top", "draw"):
            raise ValueError(f"choose must be 'top' or 'draw', not {choose!r}")
        if choose == "draw" and not (isinstance(tree, Shape) and tree.dense):
            raise ValueError("only the siblings of a dense static shape can be drawn")
        if not isinstance(tree, Shape | Grow) or (isinstance(tree, Shape) and tree.size == 0):
            raise ValueError(f"tree must be a Shape of one node or more, or Grow, not {tree!r}")
        self.head, self.tree, self.choose = head.eval(), tree, choose
        self.taps = head.config.taps
        self.max_nodes = tree.size if isinstance(tree, Shape) else min(tree.num_nodes, tree.most)

    def check(self, target: LanguageModel, longest: int) -> None:
        c = self.head.config
        wide = self.tree.branching if isinstance(self.tree, Shape) else self.tree.top_k
        check_head(target, c.target_width, self.head.token_map, c.vocab, wide)
        weight, table = self.head.fc.weight, self.table(target)
        if (weight.dtype, weight.device) != (target.dtype, target.device):
            raise ValueError(
                f"the head is {weight.dtype} on {weight.device}, the target {target.dtype} on "
                f"{target.device}: say head.to(target.device, target.dtype)"
            )
        if c.version == 3 and self.head.token_map is None and c.vocab != target.vocab_size:
            raise ValueError(
                f"the head drafts {c.vocab} tokens without saying which of {target.vocab_size}"
            )
        if table.shape[1] != c.width or table.shape[0] < target.vocab_size:
            raise ValueError(
                f"embeddings {tuple(table.shape)} for a head of width {c.width} and "
                f"{target.vocab_size} tokens: it needs its own embed_tokens"
            )

    def table(self, target: LanguageModel) -> Tensor:
        """[V, H] the token embeddings that the head reads."""
        own = self.head.embed
        return own if own is not None else target.model.get_input_embeddings().weight

    def start(self, target: LanguageModel, rows: Rows, cache: KVCache, prompt: Kept | None) -> None:
        assert prompt is not None
        self.vocab_size = target.vocab_size
        device = rows.tokens.device  # of a target that is spread over several, the first
        rows_of_head = self.head.shared_rows(target)
        self.embed = self.table(target)
        self.rows_of_head = None if rows_of_head is None else rows_of_head.to(device)
        most = self.max_nodes if isinstance(self.tree, Shape) else self.tree.read
        self.cache = self.head.new_cache(rows.batch, rows.tokens.shape[1] + most + 1)
        if isinstance(self.tree, Shape):
            plan = reading_plan(self.tree)
            self.sees, self.steps = (part.to(device) for part in plan[:2])
        # The pairs not read yet: tokens 1 .. P (the root is token P) with the features before them.
        self.tokens = rows.tokens[:, 1 : prompt.hidden.shape[1] + 1]
        taps = {i: t.to(device) for i, t in prompt.taps.items()}
        self.features = self.head.first(prompt.hidden.to(device), taps)
        self.count = rows.host - 1
        self.told = rows.host.clone()

    def propose(self, rows: Rows) -> TokenTree:
        logits = self.read_committed()  # [B, 1, V_d]
        if isinstance(self.tree, Grow):
            return grow(logits, self.tree, self.read_grown, self.named, ~rows.stopped)[0]
        self.num_read = 0
        top = self.choose == "top" or rows.sampling.greedy
        pick: Pick = self.pick_top if top else partial(self.pick_drawn, rows)
        return expand(self.tree, logits, pick, self.read_level)

    def read_committed(self) -> Tensor:
        """Reads the pairs of committed tokens that are new: the logits [B, 1, V_d] at the root."""
        total = self.tokens.shape[1]
        last = (self.count - 1).to(self.tokens.device).view(-1, 1, 1)
        begun = self.cache.lengths_host
        found: Tensor | None = None
        for start in range(0, total, CHUNK):
            part = slice(start, min(start + CHUNK, total))
            num = part.stop - start
            causal = torch.ones(num, num, dtype=torch.bool, device=last.device).tril()
            steps = torch.arange(num, device=last.device).expand(len(self.tokens), num)
            visible = causal.expand(len(self.tokens), num, num)
            out = self.step(self.tokens[:, part], self.features[:, part], steps, visible)
            here = out.gather(1, (last - start).clamp(0, num - 1).expand(-1, 1, out.shape[-1]))
            found = here if found is None else torch.where(last >= start, here, found)
            self.cache.set_lengths(begun + self.count.clamp(max=part.stop))
        assert found is not None
        self.feature = found  # [B, 1, H] stands for the feature at the root
        return self.head.logits(found, self.rows_of_head)

    def step(self, tokens: Tensor, features: Tensor, steps: Tensor, visible: Tensor) -> Tensor:
        """One pass of the head: tokens [B, n] behind features [B, n, H] -> [B, n, H].

        steps [B, m] and visible [B, n, m] as in ``LanguageModel.forward``.
        """
        num = tokens.shape[1]
        self.cache.begin(num, visible.shape[2] - num)
        position = self.cache.lengths.unsqueeze(1) + steps[:, -num:]
        mask = self.cache.mask(steps, visible, features.dtype)
        embed = F.embedding(tokens, self.embed).to(features.dtype)
        return self.head.step(embed, features, position, mask, self.cache)

    # A static shape.

    def pick_top(self, logits: Tensor, level: Level) -> tuple[Tensor, None]:
        """The likeliest candidates of each parent: logits [B, w, V_d] to tokens [B, n]."""
        best = logits.topk(max(level.ranks) + 1, dim=-1).indices
        self.level = level
        return self.named(best[:, level.places, level.ranks]), None

    def pick_drawn(self, rows: Rows, logits: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        """Candidates without replacement: tokens [B, n] and each one's own law [B, n, V]."""
        q = rows.sampling.probs(logits)
        if self.head.token_map is not None:
            wide = q.new_zeros(*q.shape[:-1], self.vocab_size)
            q = wide.index_copy_(-1, self.head.token_map, q)
        pairs = zip(q.unbind(1), level.counts, strict=True)
        drawn = [rows.rng.draw_siblings(law, count) for law, count in pairs]
        self.level = level
        return torch.cat([d[0] for d in drawn], 1), torch.cat([d[1] for d in drawn], 1)

    def read_level(self, tokens: Tensor) -> Tensor:
        """Reads the next w of the nodes that have children: tokens [B, w] to logits [B, w, V_d]."""
        assert isinstance(self.tree, Shape)
        begin, end = self.num_read, self.num_read + tokens.shape[1]
        self.num_read = end
        # Each node's feature is what its parent's step gave; level.inner picked the tokens alike.
        above = [self.level.places[i] for i in self.level.inner]
        steps = self.steps[:end].expand(len(tokens), -1)
        visible = self.sees[begin:end, :end].expand(len(tokens), -1, -1)
        self.feature = self.step(tokens, self.feature[:, above], steps, visible)
        return self.head.logits(self.feature, self.rows_of_head)

    def named(self, ids: Tensor) -> Tensor:
        """Draft ids as the target's."""
        return ids if self.head.token_map is None else self.head.token_map[ids]

    # A tree that grows.

    def read_grown(self, tokens: Tensor, above: Tensor, steps: Tensor, sees: Tensor) -> Tensor:
        """Reads k nodes of a growing tree, on the features of those that they hang on."""
        below = above.unsqueeze(-1).expand(-1, -1, self.feature.shape[-1])
        self.feature = self.step(tokens, self.feature.gather(1, below), steps, sees)
        return self.head.logits(self.feature, self.rows_of_head)

    def observe(self, rows: Rows, kept: Kept) -> None:
        """Takes up the true features at the old root and the accepted nodes, and what followed."""
        self.count = rows.host - self.told  # kept.emitted, without a wait for the device
        self.told = rows.host.clone()
        most = max(int(self.count.max()), 1)
        place = F.pad(kept.path + 1, (1, 0))[:, :most].clamp(min=0)  # [B, most]: root first

        def at(x: Tensor) -> Tensor:
            x = x.to(place.device)
            return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

        self.features = self.head.first(at(kept.hidden), {i: at(t) for i, t in kept.taps.items()})
        step = torch.arange(most, device=rows.tokens.device)
        begin = (rows.lengths - kept.emitted).unsqueeze(1)
        self.tokens = rows.tokens.gather(1, (begin + step).clamp(max=rows.tokens.shape[1] - 1))
