"""What trained heads must do whatever they have learnt: the checks that mutants.py runs on them.

A head cannot make a text wrong, so a fault in it shows in no text: drafts are merely worse. What
can be checked is that heads which *know* the future are always right, and that an EAGLE head
proposes, place by place, what the papers' formulas give for the text alone, without a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .drafters.base import Rows
from .drafters.eagle import Eagle, EagleConfig, EagleHead
from .drafters.grow import Grow, rerank
from .drafters.medusa import Medusa, MedusaHeads
from .generate import generate
from .models import LanguageModel
from .shapes import Shape, chain, from_paths
from .training.corpus import Text
from .training.data import Batch, TextData
from .training.eagle import EagleLearner
from .training.medusa import MedusaLearner
from .tree import TokenTree

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 9, 8, 9, 8, 2]]
TREES: tuple[Shape | Grow, ...] = (
    chain(3),
    from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    Grow(num_nodes=8, top_k=2, depth=3),
)


# Medusa.


class Prophet(nn.Module):
    """Medusa heads that recognise a feature of a known text and say what comes later in it.

    texts: ids; shift: how many places they are off.
    """

    token_map = None

    def __init__(
        self, target: LanguageModel, texts: list[list[int]], num: int, shift: int = 0
    ) -> None:
        super().__init__()
        self.num_heads, self.shift, self.texts = num, shift, texts
        self.width = target.model.get_output_embeddings().weight.shape[1]
        self.vocab_size = target.vocab_size
        with torch.no_grad():
            self.seen = [
                target.forward(target.new_cache(1, len(t)), torch.tensor([t])).hidden[0]
                for t in texts
            ]

    def __len__(self) -> int:
        return self.num_heads

    def shared_rows(self, target: LanguageModel) -> None:
        """Its logits are its own."""

    def forward(self, hidden: Tensor, shared: Tensor | None = None) -> Tensor:
        """[B, H] to [heads, B, V]: one where the head's token is, else 0."""
        logits = torch.zeros(self.num_heads, len(hidden), self.vocab_size)
        for row, feature in enumerate(hidden):
            gaps = [(seen - feature).norm(dim=-1) for seen in self.seen]
            text = min(range(len(gaps)), key=lambda i: float(gaps[i].min()))
            if gaps[text].min() > 1e-6:
                raise ValueError("the heads were shown a feature of no text")
            place = int(gaps[text].argmin())
            for k in range(self.num_heads):
                later = place + 2 + k + self.shift
                if later < len(self.texts[text]):
                    logits[k, row, self.texts[text][later]] = 1.0
        return logits


def medusa_faults(target: LanguageModel) -> float:
    """How many tokens a round fall short with heads that are always right."""
    long = generate(target, PROMPTS, max_new_tokens=20, eos=())
    texts = [p + t.tolist() for p, t in zip(PROMPTS, long.tokens, strict=True)]
    worst = 0.0
    for shape in (chain(3), from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])):
        drafter = Medusa(Prophet(target, texts, 3), shape)  # type: ignore[arg-type]
        # After the prefill's token, three rounds of four.
        out = generate(target, PROMPTS, drafter, max_new_tokens=13, eos=())
        worst = max(worst, abs(out.trace.tau - 4))
    return worst


# EAGLE.


def random_eagle(target: LanguageModel, version: int, seed: int = 0, **changes: Any) -> EagleHead:
    """A head of random float64 weights for a tiny target."""
    width = target.model.get_output_embeddings().weight.shape[1]
    token_map = changes.pop("token_map", None)
    numbers: dict[str, Any] = {
        "version": version,
        "width": width,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 48,
        "vocab": target.vocab_size if token_map is None else len(token_map),
        "target_width": width,
        "taps": tuple(range(min(3, target.num_layers))) if version == 3 else (),
    }
    head = EagleHead(EagleConfig(**{**numbers, **changes}), token_map).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return head


def by_hand(head: EagleHead, embed: Tensor, feature: Tensor, start: int = 0) -> Tensor:
    """A step of the head over one sequence, line by line: embed, feature [n, H] to [n, H].

    Shares no code with ``drafters/eagle.py``. Positions are start, start + 1, ...
    """
    w, c = head.state_dict(), head.config
    position = torch.arange(start, start + len(embed), dtype=torch.float64)
    if c.version == 1:
        g = torch.cat([embed, feature], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        a = g
    else:
        g = feature
        normed = (_norm(head, "layer.input_layernorm", embed), _norm(head, HIDDEN_NORM, feature))
        a = torch.cat(normed, -1)
    names = [f"layer.self_attn.{n}_proj" for n in "qkv"]
    q, k, v = (a @ w[f"{n}.weight"].T + w.get(f"{n}.bias", 0) for n in names)
    size, read = c.head_dim, []
    for h in range(c.heads):
        kv = h // (c.heads // c.kv_heads)
        qh = _turn(q[:, h * size : (h + 1) * size], position, c.rope_theta)
        kh = _turn(k[:, kv * size : (kv + 1) * size], position, c.rope_theta)
        scores = qh @ kh.T / size**0.5
        scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
        read.append(scores.softmax(-1) @ v[:, kv * size : (kv + 1) * size])
    h_ = g + torch.cat(read, -1) @ w["layer.self_attn.o_proj.weight"].T
    m = _norm(head, "layer.post_attention_layernorm", h_)
    gate, up = (m @ w[f"layer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return h_ + (gate * torch.sigmoid(gate) * up) @ w["layer.mlp.down_proj.weight"].T


HIDDEN_NORM = "layer.hidden_norm"


def _norm(head: EagleHead, name: str, x: Tensor) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True) + head.config.eps).sqrt()
    return x / scale * head.state_dict()[f"{name}.weight"]


def _turn(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """The pair (i, i + D/2) turned by position * theta^(-2i/D)."""
    out, half = x.clone(), x.shape[-1] // 2
    for i in range(half):
        angle = position * theta ** (-i / half)
        one, two = x[:, i], x[:, i + half]
        out[:, i] = one * angle.cos() - two * angle.sin()
        out[:, i + half] = two * angle.cos() + one * angle.sin()
    return out


def logits_by_hand(head: EagleHead, target: LanguageModel, feature: Tensor) -> Tensor:
    """[H] to [V_d]: EAGLE-3 norms once and has its own LM head, EAGLE-1 reads the target's."""
    if head.config.version == 3:
        return head.state_dict()["lm_head.weight"] @ _norm(head, "norm", feature)
    return target_logits(head, target, feature)


def target_logits(head: EagleHead, target: LanguageModel, feature: Tensor) -> Tensor:
    """[H] to [V_d]: what the target itself says, over the draft's vocabulary."""
    weight = target.model.get_output_embeddings().weight.double()
    return (weight if head.token_map is None else weight[head.token_map]) @ feature


class Watched(Eagle):
    """Holds every proposal against ``by_hand`` over the text so far; counts in ``wrong``.

    truth: texts, of which now and then some tokens are put into the tree, so that every accept
    pattern occurs (then only what the next rounds propose is judged).
    """

    def __init__(self, head: EagleHead, tree: Shape | Grow, truth: list[list[int]]) -> None:
        super().__init__(head, tree)
        self.truth = truth
        self.wrong: list[int] = []  # shared by the copies that generate() makes

    def start(self, target: LanguageModel, *rest: Any) -> None:
        super().start(target, *rest)
        self.target = target

    def propose(self, rows: Rows) -> TokenTree:
        tree = super().propose(rows)
        for row in range(rows.batch):
            if not rows.stopped[row]:
                self.wrong.append(self.judge(rows.tokens[row, : rows.host[row]], tree, row))
        return self.tampered(rows, tree)

    def judge(self, text: Tensor, tree: TokenTree, row: int) -> int:
        """How many nodes of this row are not the next best child of their parent."""
        with torch.no_grad():
            cache = self.target.new_cache(1, len(text))
            out = self.target.forward(cache, text[None], taps=self.taps)
            if self.head.config.version == 3:
                fused = torch.cat([out.taps[i] for i in self.head.config.taps], -1)
                feature = (fused @ self.head.state_dict()["fc.weight"].T)[0, :-1]
            else:
                feature = out.hidden[0, :-1]
            embed = self.target.model.get_input_embeddings().weight
            return sum(
                not self.is_right(embed, embed[text[1:]], feature, tree, row, i)
                for i in range(tree.num_nodes)
            )

    def is_right(
        self, table: Tensor, embed: Tensor, feature: Tensor, tree: TokenTree, row: int, node: int
    ) -> bool:
        """Whether a node holds the candidate that its rank among its siblings says."""
        parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
        path = [node]
        while parents[path[0]] >= 0:
            if parents[path[0]] >= path[0]:
                return False
            path.insert(0, parents[path[0]])
        for above in path[:-1]:  # each node enters with what its parent's step gave
            last = by_hand(self.head, embed, feature)[-1:]
            embed = torch.cat([embed, table[tokens[above]][None]])
            feature = torch.cat([feature, last])
        last = by_hand(self.head, embed, feature)[-1]
        logits = logits_by_hand(self.head, self.target, last)
        order = logits.argsort(descending=True)
        ids = order if self.head.token_map is None else self.head.token_map[order]
        rank = sum(parents[i] == parents[node] for i in range(node))
        return int(ids[rank]) == tokens[node]

    def tampered(self, rows: Rows, tree: TokenTree) -> TokenTree:
        tokens = tree.tokens.clone()
        for row, text in enumerate(self.truth[: rows.batch]):
            place, node = int(rows.host[row]), -1
            for token in text[place : place + (place * 7 + row) % 3]:
                children = [i for i in range(tree.num_nodes) if int(tree.parents[row, i]) == node]
                if not children:
                    break
                node = children[0]
                tokens[row, node] = token
        return TokenTree(tokens, tree.parents, is_chain=tree.is_chain)


def eagle_faults(target: LanguageModel) -> float:
    """Nodes that are not what the formulas say, over both versions, three trees, ragged rows."""
    long = generate(target, PROMPTS, max_new_tokens=24, eos=())
    truth = [p + t.tolist() for p, t in zip(PROMPTS, long.tokens, strict=True)]
    ids = torch.arange(1, target.vocab_size, 2)
    wrong = 0
    for version in (1, 3):
        taps: dict[str, Any] = {} if version == 1 else {"taps": (0, target.num_layers - 1)}
        for tree in TREES:
            head = random_eagle(target, version, token_map=ids, **taps)
            drafter = Watched(head, tree, truth)
            generate(target, PROMPTS, drafter, max_new_tokens=12, eos=())
            wrong += sum(drafter.wrong)
    return float(wrong)


def tie_faults() -> float:
    """Whether a path of draft probability 1, where a child is worth its parent, stays a path."""
    values = torch.tensor([[-0.5, -2.0, -0.5, -0.5]])
    parents = torch.tensor([[-1, -1, 0, 2]])
    wrong = 0
    for num in (1, 2, 3):
        tree, _ = rerank(torch.tensor([[10, 11, 12, 13]]), values, parents, num)
        wrong += tree.tokens[0].tolist() != [10, 12, 13][:num]
    return float(wrong)


# Losses.


def some_batch(target: LanguageModel, taps: tuple[int, ...] = ()) -> Batch:
    """Two of the target's own greedy texts, packed into one row of 40."""
    out = generate(target, PROMPTS[:2], max_new_tokens=12, eos=())
    texts = [
        Text("conversation", 0.0, p, t.tolist()) for p, t in zip(PROMPTS, out.tokens, strict=False)
    ]
    return TextData(texts, target, width=40, taps=taps).batch([0])


def medusa_loss_by_hand(learner: MedusaLearner, target: LanguageModel, batch: Batch) -> float:
    """The sum of losses over one row: head k at t learns what stands at t + 2 + k."""
    weight, total = target.model.get_output_embeddings().weight, 0.0
    text, tokens, hidden = batch.text[0], batch.tokens[0], batch.hidden[0].to(weight.dtype)
    for k, head in enumerate(learner.heads):
        for t in range(len(text) - 2 - k):
            place = t + 2 + k
            if text[t] < 0 or text[t] != text[place] or not batch.answer[0, place]:
                continue
            log_q = (weight @ head(hidden[t])).log_softmax(-1)
            if learner.labels == "hard":
                term = -log_q[tokens[place]]
            else:
                term = -((weight @ hidden[place - 1]).softmax(-1) * log_q).sum()
            total += 0.8**k * float(term)
    return total


def eagle_loss_by_hand(learner: EagleLearner, target: LanguageModel, batch: Batch) -> float:
    """The sum of losses over one row, every draft unrolled by itself from the true features."""
    head, total = learner.head, 0.0
    text, tokens = batch.text[0], batch.tokens[0]
    hidden = batch.hidden[0].double()
    taps = {i: t[0].double() for i, t in batch.taps.items()}
    table = target.model.get_input_embeddings().weight.double()
    for n in range(int(text.max()) + 1):
        here = (text == n).nonzero().flatten()
        begin, end = int(here[0]), int(here[-1]) + 1
        for t in range(begin, end - 2):
            embed = table[tokens[begin + 1 : t + 2]]
            feature = head.first(hidden, taps)[begin : t + 1]
            last = feature[-1:]
            for i in range(learner.steps):
                if t + 2 + i >= end:
                    break
                if i:
                    embed = torch.cat([embed, table[tokens[t + 1 + i]][None]])
                    feature = torch.cat([feature, last])
                last = by_hand(head, embed, feature)[-1:]
                truth = hidden[t + 1 + i]
                law = target_logits(head, target, truth).softmax(-1)
                log_q = logits_by_hand(head, target, last[0]).log_softmax(-1)
                term = -float((law * log_q).sum())
                if learner.feature_loss:
                    gap = (last[0] - truth).abs()
                    smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                    term = float(smooth) + 0.1 * term
                total += 0.8**i * term
    return total


def loss_faults(target: LanguageModel) -> float:
    """The largest relative difference between a learner's loss and the one added up by hand."""
    worst = 0.0
    with torch.no_grad():
        for labels in ("soft", "hard"):
            heads = MedusaHeads(target.model.get_output_embeddings().weight.shape[1], 2).double()
            for p in heads.parameters():
                p.normal_(std=0.2, generator=torch.Generator().manual_seed(len(p)))
            learner = MedusaLearner(heads, target, labels).double()
            batch = some_batch(target)
            truth = medusa_loss_by_hand(learner, target, batch)
            worst = max(worst, abs(float(learner(batch, 0)[0]) / truth - 1))
        for version in (1, 3):
            taps = () if version == 1 else (0, target.num_layers - 1)
            head = random_eagle(target, version, taps=taps)
            eagle = EagleLearner(head, target, noise=0.0, steps=1 if version == 1 else 3).double()
            batch = some_batch(target, taps)
            truth = eagle_loss_by_hand(eagle, target, batch)
            worst = max(worst, abs(float(eagle(batch, 0)[0]) / truth - 1))
    return worst
