"""Is the emitted text the target's own? Answers that can say no.

Two ways of asking. **Enumeration** drives the production code through every outcome that chance
could bring, each with its exact probability: what comes out is the emitted law itself, to rounding,
and no sampling error hides a fault. **Statistics** compare emitted tokens with the law they should
follow; a test that never fails proves nothing, so each comes with two numbers stated beforehand:
how seldom it may fail a correct implementation, and how surely it must fail one whose law is off
by a stated distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn

from .drafters.base import Drafter
from .generate import Generation, _Run
from .models import LanguageModel
from .sampling import Law, Random, Sampling, sibling_laws
from .tree import TokenTree
from .verify import VERIFIERS, Verifier

# Enumeration: chance replaced by all of its outcomes.


class Branching(Random):
    """A source of chance that walks every outcome and keeps the exact probability of each.

    Each row follows a *script*: the outcomes of its first, second, ... choice, where a choice is
    what could fall more than one way. Beyond its script a row takes the first possible outcome,
    and each other possible one becomes a new script, to be run in a later wave. So every leaf of
    the tree of outcomes is run exactly once, thousands of leaves a wave, as rows of one batch.
    """

    def __init__(self, scripts: Tensor) -> None:
        """scripts [R, C] outcomes so far, -1 behind a script's end."""
        self.device = torch.device("cpu")
        self.weight = torch.ones(len(scripts), dtype=torch.float64)  # [R] probability so far
        self.script = scripts  # [R, C] grows to the right as choices are made
        self.turn = torch.zeros(len(scripts), dtype=torch.long)  # [R] choices made
        self.new: list[tuple[Tensor, Tensor]] = []  # (rows, the new scripts that left them)
        self.alive: Callable[[], Tensor] | None = None  # [R] rows whose choices still matter

    def choose(self, probs: Tensor) -> Tensor:
        """[R] one outcome a row of the laws probs [R, K], float64, rows summing to 1."""
        rows = torch.arange(len(probs))
        possible = probs > 0
        first = possible.to(torch.int8).argmax(1)
        branches = possible.sum(1) > 1
        if self.alive is not None:
            branches &= self.alive()
        if bool((self.turn[branches] >= self.script.shape[1]).any()):
            self.script = nn.functional.pad(self.script, (0, 1), value=-1)
        turn = self.turn.clamp(max=self.script.shape[1] - 1)
        told = self.script[rows, turn].masked_fill(~branches, -1)
        outcome = torch.where(told >= 0, told, first)
        self.weight = torch.where(branches, self.weight * probs[rows, outcome], self.weight)
        # Every other outcome of a choice that no script foresaw leads to leaves of its own.
        others = possible & (branches & (told < 0)).unsqueeze(1)
        others[rows, first] = False
        parent, value = others.nonzero(as_tuple=True)
        if len(parent):
            script = self.script[parent]
            script[torch.arange(len(parent)), self.turn[parent]] = value
            self.new.append((parent, script))
        self.script[rows[branches], self.turn[branches]] = outcome[branches]
        self.turn = self.turn + branches
        return outcome

    def uniform(self, num: int) -> Tensor:
        """Uniforms that are settled only as far as they are compared: see ``Uniform``."""
        return Uniform(self, num)  # type: ignore[return-value]

    def draw(self, probs: Tensor) -> Tensor:
        probs = probs.double()
        return self.choose(probs / probs.sum(1, keepdim=True))

    def draw_siblings(self, q: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """One after the other, each from the law that is left: what Gumbel-top-k does at once."""
        tokens = torch.empty(len(q), 0, dtype=torch.long)
        free = torch.ones_like(q)
        left = q
        for _ in range(num):
            law = torch.where(left.sum(1, keepdim=True) > 0, left, free)
            token = self.draw(law).unsqueeze(1)
            left, free = left.scatter(1, token, 0.0), free.scatter(1, token, 0.0)
            tokens = torch.cat([tokens, token], 1)
        return tokens, sibling_laws(q, tokens)


class Uniform:
    """R uniforms of which only an interval is known; each comparison may split it in two."""

    def __init__(self, chance: Branching, num: int) -> None:
        self.chance = chance
        self.low = torch.zeros(num, dtype=torch.float64)
        self.high = torch.ones(num, dtype=torch.float64)

    def __lt__(self, prob: Tensor) -> Tensor:
        """[R] bool: u < prob, heads with exactly the probability that is still open."""
        prob = prob.double().clamp(0, 1)
        heads = ((prob - self.low) / (self.high - self.low)).clamp(0, 1)
        fell = self.chance.choose(torch.stack([heads, 1 - heads], 1)) == 0
        self.high = torch.where(fell, torch.minimum(self.high, prob), self.high)
        self.low = torch.where(fell, self.low, torch.maximum(self.low, prob))
        return fell


def enumerate_outcomes(
    run: Callable[[Branching, Tensor], Sequence[Tensor]], instances: int, chunk: int = 50_000
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs ``run(chance, instance)`` through every outcome of its chance.

    instance [R] says which of ``instances`` problems each row is; run returns tensors [R, ...].
    Returns the leaves' probabilities [L] (float64, summing to 1 for each instance), the instance
    [L] of each, and the results [L, ...].
    """
    waves = [(torch.full((instances, 1), -1), torch.arange(instances))]
    weights, owners, results = [], [], []
    while waves:
        scripts, instance = waves.pop()
        if len(scripts) > chunk:  # halves bound the memory
            waves += [(scripts[chunk:], instance[chunk:])]
            scripts, instance = scripts[:chunk], instance[:chunk]
        chance = Branching(scripts)
        result = run(chance, instance)
        weights.append(chance.weight)
        owners.append(instance)
        results.append(result)
        if chance.new:
            longest = max(s.shape[1] for _, s in chance.new)
            pad = [nn.functional.pad(s, (0, longest - s.shape[1]), value=-1) for _, s in chance.new]
            waves.append((torch.cat(pad), instance[torch.cat([rows for rows, _ in chance.new])]))
    columns = [torch.cat(column) for column in zip(*results, strict=True)]
    weight, owner = torch.cat(weights), torch.cat(owners)
    total = torch.zeros(instances, dtype=torch.float64).index_add_(0, owner, weight)
    if float((total - 1).abs().max()) > 1e-9:
        raise RuntimeError(
            "the outcomes' probabilities do not sum to 1: the choices that a row makes depend on "
            "the other rows of its batch"
        )
    return weight, owner, columns


# The rule alone, on tables.

SHAPES = {  # name: parents of a tree of at most three levels
    "chain of 1": (-1,),
    "chain of 2": (-1, 0),
    "chain of 3": (-1, 0, 1),
    "2 siblings": (-1, -1),
    "3 siblings": (-1, -1, -1),
    "siblings, one with children": (-1, -1, 0, 0),
    "chain beside a node": (-1, 0, 1, -1),
    "three levels": (-1, 0, 0, 1),
}
DRAFTS = ("drawn", "drawn without replacement", "chosen", "chosen with repeats")
SETTINGS = (
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.0, top_k=2),
    Sampling(0.8, top_p=0.7),
    Sampling(0.0),
)
SUPPORTS = ("full", "disjoint", "equal laws")


@dataclass(frozen=True)
class Family:
    """Problems of one kind, enumerated together; their tables are random and differ."""

    shape: str
    draft: str
    vocab_size: int
    sampling: Sampling
    support: str
    verifier: str = "speculative"
    instances: int = 2
    seed: int = 0

    @property
    def parents(self) -> tuple[int, ...]:
        return SHAPES[self.shape]

    @property
    def depth(self) -> int:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def tables(self) -> tuple[Tensor, Tensor]:
        """Logits of target and draft after every prefix: [instances, prefixes, V] each.

        The prefix of a node is a number: 0 for the root, prefix(parent) V + token + 1 below it.
        """
        generator = torch.Generator().manual_seed(self.seed)
        prefixes = sum(self.vocab_size**level for level in range(self.depth + 1))
        size = (self.instances, prefixes, self.vocab_size)
        target = 1.5 * torch.randn(size, generator=generator, dtype=torch.float64)
        draft = 1.5 * torch.randn(size, generator=generator, dtype=torch.float64)
        if self.support == "disjoint":  # the draft can only say what the target cannot
            half = self.vocab_size // 2
            target[..., :half], draft[..., half:] = -torch.inf, -torch.inf
        return target, (target.clone() if self.support == "equal laws" else draft)


def families(instances: int = 2, seed: int = 0) -> list[Family]:
    """Every shape with every way of drafting, setting and support; block verification on chains."""
    chains = [shape for shape in SHAPES if shape.startswith("chain of")]
    kinds = [("speculative", *k) for k in product(SHAPES, DRAFTS, SETTINGS, SUPPORTS)]
    kinds += [("block", *k) for k in product(chains, DRAFTS, SETTINGS, SUPPORTS)]
    found = []
    for n, (verifier, shape, draft, setting, support) in enumerate(kinds):
        vocab = 2 + n % (4 if len(SHAPES[shape]) < 4 else 2)  # up to 5; large trees up to 3
        found.append(Family(shape, draft, vocab, setting, support, verifier, instances, seed + n))
    return found


@dataclass(frozen=True)
class Enumerated:
    """What an enumeration of one family found.

    distance: the worst total variation, over the instances, between the emitted law (padded to
    depth + 1 tokens by the target's own) and the target's; tokens [instances] expected a round;
    outcomes: leaves walked.
    """

    distance: float
    tokens: Tensor
    outcomes: int


def enumerate_family(family: Family) -> Enumerated:
    """Drives the production verifier through every draft and every coin of a family."""
    target, draft = family.tables()
    vocab, parents, verify = family.vocab_size, family.parents, VERIFIERS[family.verifier]
    sampling = family.sampling
    q_law = sampling.probs(draft)

    def run(chance: Branching, instance: Tensor) -> Sequence[Tensor]:
        tokens, prefix, q = _draft(family, chance, instance, q_law)
        drawn = q if family.draft.startswith("drawn") else None
        fixed = torch.tensor(parents).expand(len(instance), -1)
        tree = TokenTree(tokens, fixed, drawn, is_chain=family.is_chain)
        verdict = verify(tree, Law(target[instance[:, None], prefix], sampling), chance)
        kept = tokens.gather(1, verdict.path.clamp(min=0)).masked_fill(verdict.path < 0, -1)
        text = torch.cat([kept, kept.new_full((len(kept), 1), -1)], 1)
        text.scatter_(1, verdict.accepted.unsqueeze(1), verdict.next_token.unsqueeze(1))
        return [text[:, : family.depth + 1], verdict.accepted]

    weights, owner, (texts, accepted) = enumerate_outcomes(run, family.instances)
    law = sampling.probs(target)  # [I, prefixes, V]
    padded = torch.zeros(family.instances, 1, dtype=torch.float64)  # over texts of each length
    wanted = torch.ones(family.instances, 1, dtype=torch.float64)
    first, lengths = 0, (texts >= 0).sum(1)
    number = torch.zeros(len(texts), dtype=torch.long)
    for length in range(1, family.depth + 2):
        after = law[:, first : first + vocab ** (length - 1)]  # [I, V^(length-1), V]
        padded = (padded.unsqueeze(2) * after).flatten(1)
        wanted = (wanted.unsqueeze(2) * after).flatten(1)
        number = number * vocab + texts[:, length - 1].clamp(min=0)
        here = lengths == length
        padded.index_put_((owner[here], number[here]), weights[here], accumulate=True)
        first += vocab ** (length - 1)
    tokens = torch.zeros(family.instances, dtype=torch.float64)
    tokens.index_put_((owner,), weights * (accepted + 1), accumulate=True)
    distance = float((padded - wanted).abs().sum(1).max()) / 2
    return Enumerated(distance, tokens, len(weights))


def _draft(
    family: Family, chance: Branching, instance: Tensor, q_law: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [R, N], prefix numbers [R, N+1] (root first), laws drawn from [R, N, V]."""
    parents, vocab = family.parents, family.vocab_size
    rows = torch.arange(len(instance))
    prefix = torch.zeros(len(instance), len(parents) + 1, dtype=torch.long)
    tokens = torch.zeros(len(instance), len(parents), dtype=torch.long)
    laws = torch.zeros(len(instance), len(parents), vocab, dtype=torch.float64)
    for parent in dict.fromkeys(parents):  # in order: a parent's own token is known by then
        children = [i for i, p in enumerate(parents) if p == parent]
        q = q_law[instance, prefix[rows, parent + 1]]  # [R, V]
        if family.draft == "drawn":
            drawn = torch.stack([chance.draw(q) for _ in children], 1)
            q_each = q.unsqueeze(1).expand(-1, len(children), -1)
        elif family.draft == "drawn without replacement":
            some = children[:vocab]
            drawn, q_each = chance.draw_siblings(q, len(some))
            again = [i % len(some) for i in range(len(children))]  # more children than tokens
            drawn, q_each = drawn[:, again], q_each[:, again]
        else:  # chosen by rank, or the likeliest over and over
            ranked = q.argsort(1, descending=True)
            repeats = family.draft == "chosen with repeats"
            drawn = ranked[:, [0 if repeats else i % vocab for i in range(len(children))]]
            q_each = q.unsqueeze(1).expand(-1, len(children), -1)
        tokens[:, children], laws[:, children] = drawn, q_each
        for i in children:
            prefix[:, i + 1] = prefix[rows, parent + 1] * vocab + tokens[:, i] + 1
    return tokens, prefix, laws


# A toy language model whose law depends on every token it sees.


class TableLM(nn.Module):
    """A causal LM that looks its logits up in a random table, by the whole visible prefix.

    What it caches for a token is the number (token + 1) (V + 1)^position; a query adds up what
    its mask lets it see (itself included), and that sum, the prefix written in base V + 1, is
    the row of the table. A sibling seen through a wrong mask, a rejected key left behind, a
    position that is off: each changes the sum, and with it the law. Everything is float64.
    """

    ROWS = 4096

    def __init__(
        self, vocab_size: int, seed: int = 0, num_layers: int = 2, scale: float = 1.5
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            num_hidden_layers=num_layers,
            max_position_embeddings=None,
            model_type="table",
            eos_token_id=None,
        )
        self.embed = nn.Embedding(vocab_size, 1, dtype=torch.float64)
        self.layers = nn.ModuleList(_Table(vocab_size, generator, scale) for _ in range(num_layers))
        self.head = nn.Identity()

    def tables(self) -> list[_Table]:
        return [layer for layer in self.layers if isinstance(layer, _Table)]

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        cache: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        base = self.config.vocab_size + 1
        if position_ids is None:
            position_ids = torch.zeros_like(input_ids)
        digit = (input_ids + 1).double() * torch.pow(float(base), position_ids.double())
        hidden = torch.zeros(*input_ids.shape, self.config.vocab_size, dtype=torch.float64)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, digit, i, cache, attention_mask)
        return SimpleNamespace(logits=self.head(hidden))

    def logits_after(self, prefix: Sequence[int]) -> Tensor:
        """[V] the logits after a prefix, straight from the tables: no cache, mask or batch."""
        base = self.config.vocab_size + 1
        number = sum((t + 1) * base**i for i, t in enumerate(prefix))
        return torch.stack([t.logits[number % self.ROWS] for t in self.tables()]).sum(0)


class _Table(nn.Module):
    def __init__(self, vocab_size: int, generator: torch.Generator, scale: float) -> None:
        super().__init__()
        size = (TableLM.ROWS, vocab_size)
        self.logits = scale * torch.randn(size, generator=generator, dtype=torch.float64)

    def forward(
        self, hidden_states: Tensor, digit: Tensor, layer: int, cache: Any, mask: Tensor | None
    ) -> Tensor:
        keys, _ = cache.update(digit[:, None, :, None], digit[:, None, :, None], layer)
        seen = keys[:, :, :, 0]  # [B, 1, S]
        visible = torch.ones_like(seen) if mask is None else (mask[:, 0] == 0).double()
        number = (visible * seen).sum(-1)  # [B, n], exact: far below 2^53
        return hidden_states + self.logits[number.long() % TableLM.ROWS]


# The law of a whole generation.


def padded_law(
    model: TableLM, prompt: Sequence[int], num: int, sampling: Sampling, eos: int | None = None
) -> dict[tuple[int, ...], float]:
    """The law of the next ``num`` tokens by the tables alone; a text ends at ``eos``."""
    law: dict[tuple[int, ...], float] = {}

    def extend(text: tuple[int, ...], weight: float) -> None:
        if len(text) == num or (text and text[-1] == eos):
            law[text] = law.get(text, 0.0) + weight
            return
        probs = sampling.probs(model.logits_after([*prompt, *text]))
        for token, p in enumerate(probs.tolist()):
            if p > 0:
                extend((*text, token), weight * p)

    extend((), 1.0)
    return law


def emitted_law(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None,
    num: int,
    sampling: Sampling,
    *,
    eos: int | None = None,
    verifier: str | Verifier = "speculative",
) -> tuple[list[dict[tuple[int, ...], float]], int]:
    """The law that ``generate`` emits, by running it through every outcome of its chance.

    All prompts, of whatever lengths, are rows of the same batches. Returns a law for each prompt,
    and the number of outcomes.
    """

    def run(chance: Branching, instance: Tensor) -> Sequence[Tensor]:
        rows = [prompts[i] for i in instance.tolist()]
        ends = () if eos is None else eos
        call = _Run(target, rows, drafter, num, sampling, chance, verifier, ends)
        chance.alive = lambda: ~call.rows.stopped
        for _ in call.rounds():
            pass
        new = torch.full((len(rows), num), -1)
        for row, (begin, end) in enumerate(
            zip(call.prompt_lengths.tolist(), call.rows.host.tolist(), strict=True)
        ):
            new[row, : end - begin] = call.rows.tokens[row, begin:end]
        return [new]

    weights, owners, (tokens,) = enumerate_outcomes(run, len(prompts))
    laws: list[dict[tuple[int, ...], float]] = [{} for _ in prompts]
    for weight, owner, row in zip(weights.tolist(), owners.tolist(), tokens.tolist(), strict=True):
        text = tuple(t for t in row if t >= 0)
        laws[owner][text] = laws[owner].get(text, 0.0) + weight
    return laws, len(weights)


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    """Half the summed absolute difference of two laws: the most by which any event differs."""
    return 0.5 * math.fsum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


# Statistics with power.

FALSE_FAILURE = 1e-6  # how often a whole suite may fail although nothing is wrong
MIN_EXPECTED = 5.0  # cells expected to hold less are pooled, as the chi-square law asks


@dataclass(frozen=True)
class GTest:
    """A likelihood-ratio test of counts against a law (Sokal & Rohlf's G-test).

    statistic G = 2 sum O ln(O/E), about chi-square with ``df`` degrees of freedom if the law is
    right; p_value; outside: how many draws fell where the law has probability 0.
    """

    statistic: float
    df: int
    p_value: float
    outside: int

    def passes(self, tests: int = 1) -> bool:
        """Whether the law stands, the false-failure rate being shared out over ``tests``."""
        return self.outside == 0 and self.p_value > FALSE_FAILURE / tests


def g_test(counts: np.ndarray, law: np.ndarray) -> GTest:
    """Tests observed counts [cells] against probabilities [cells]; rare cells are pooled."""
    counts, law = np.asarray(counts, float).ravel(), np.asarray(law, float).ravel()
    outside = int(counts[law <= 0].sum())
    counts, law = counts[law > 0], law[law > 0]
    observed, expected = pool(counts, law * counts.sum() / law.sum())
    df = len(observed) - 1
    if df == 0:
        return GTest(0.0, 0, 1.0, outside)
    statistic, p = stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return GTest(float(statistic), df, float(p), outside)


def pool(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges the rarest cells until every cell is expected to hold MIN_EXPECTED draws."""
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    rare = int((expected < MIN_EXPECTED).sum())
    if rare == 0:
        return observed, expected
    while rare < len(expected) and expected[:rare].sum() < MIN_EXPECTED:
        rare += 1
    return (
        np.append(observed[:rare].sum(), observed[rare:]),
        np.append(expected[:rare].sum(), expected[rare:]),
    )


def power(draws: int, df: int, distance: float, tests: int = 1) -> float:
    """How surely ``g_test`` fails a law at this total-variation distance, at least.

    A law at distance t has a chi-square divergence of at least 4 t^2, so that the statistic's
    noncentrality is at least 4 draws t^2, whatever the way in which the law is off. The distance
    is that of the laws as tested: what differs only inside the pooled cell is not seen, so draw
    enough for few cells to be pooled.
    """
    critical = stats.chi2.isf(FALSE_FAILURE / tests, df)
    return float(stats.ncx2.sf(critical, df, 4 * draws * distance**2))


def detectable(draws: int, df: int, tests: int = 1, surely: float = 0.999) -> float:
    """The smallest total-variation distance that ``g_test`` fails with probability ``surely``."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(draws, df, middle, tests) >= surely else (middle, high)
    return high


def tv_bound(draws: int, cells: int, distance: float) -> float:
    """P(TV(empirical, law) >= distance) <= 2^cells exp(-2 draws distance^2): readable, and loose.

    Hoeffding's inequality for each of the 2^cells events, and the union of them.
    """
    return min(1.0, math.exp(cells * math.log(2) - 2 * draws * distance**2))


def permutation_test(a: Tensor, b: Tensor, permutations: int = 20_000, seed: int = 0) -> float:
    """The p-value of two samples of texts, [n, K] and [m, K] token ids, having come from one law.

    The statistic is the energy distance under the Hamming distance (how many of K tokens differ);
    the p-value is its rank among random relabelings, so that no law need be known. Its resolution
    is 1 / permutations.
    """
    both = torch.cat([a, b])
    away = (both.unsqueeze(1) != both.unsqueeze(0)).double().mean(2)  # [n+m, n+m]
    weight = torch.cat([torch.full((len(a),), 1 / len(a)), torch.full((len(b),), -1 / len(b))])
    weight = weight.double()
    generator = torch.Generator().manual_seed(seed)
    seen = -(weight @ away @ weight)
    beyond, done = 0, 0
    while done < permutations:
        count = min(2000, permutations - done)
        order = torch.rand(count, len(both), generator=generator).argsort(1)
        shuffled = weight[order]  # [count, n+m]
        drawn = -((shuffled @ away) * shuffled).sum(1)
        beyond += int((drawn >= seen - 1e-12).sum())
        done += count
    return (beyond + 1) / (permutations + 1)


# Floating point: what "identical" can mean.


def logits_in_blocks(target: LanguageModel, ids: Sequence[int], block: int) -> Tensor:
    """[T, V] the logits after each token of a text that is read ``block`` tokens a pass."""
    cache = target.new_cache(1, len(ids))
    tokens = torch.tensor([list(ids)], device=target.device)
    found = []
    with torch.inference_mode():
        for start in range(0, len(ids), block):
            part = tokens[:, start : start + block]
            found.append(target.forward(cache, part).logits[0].float())
            cache.advance(part.shape[1])
    return torch.cat(found)


def block_drift(target: LanguageModel, ids: Sequence[int], block: int = 8) -> pd.DataFrame:
    """How far a text's logits move when it is read in blocks and not token by token.

    One line a position: drift, the largest change of a logit among the two likeliest tokens;
    margin, the gap between those two; flipped, whether the argmax changed.
    """
    single, blocks = logits_in_blocks(target, ids, 1), logits_in_blocks(target, ids, block)
    top = single.topk(2, dim=-1)
    moved = (single - blocks).gather(1, top.indices).abs().amax(1)
    return pd.DataFrame(
        {
            "position": range(len(ids)),
            "drift": moved.cpu().numpy(),
            "margin": (top.values[:, 0] - top.values[:, 1]).cpu().numpy(),
            "flipped": (single.argmax(1) != blocks.argmax(1)).cpu().numpy(),
        }
    )


@dataclass(frozen=True)
class Divergence:
    """Where two greedy texts of one prompt part, and whether rounding can explain it.

    position counts new tokens from 0; margin is the smallest gap between the two tokens' logits,
    drift the most by which that gap moves with the shape of the pass (at least the spacing of the
    dtype's numbers there). verdict "near-tie": margin <= 2 drift; "fault": rounding cannot do this.
    """

    row: int
    position: int
    token_a: int
    token_b: int
    margin: float
    drift: float

    @property
    def verdict(self) -> str:
        return "near-tie" if self.margin <= 2 * self.drift else "fault"


def first_divergence(a: Generation, b: Generation, target: LanguageModel) -> list[Divergence]:
    """The first difference of each row of two greedy outputs; rows that agree are left out.

    The text up to the difference is read in passes of several shapes; a gap between the two tokens
    that is small against its own movement is a near-tie, which either may win. Anything else is a
    fault of the code that made one of the texts.
    """
    if a.prompts != b.prompts:
        raise ValueError("the two outputs answer different prompts")
    found = []
    for row, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        shared = min(len(one), len(other))
        differs = (one[:shared] != other[:shared]).nonzero()
        if not len(differs):
            continue
        at = int(differs[0])
        x, y = int(one[at]), int(other[at])
        text = [*a.prompts[row], *one[:at].tolist()]
        gaps, tops = [], []
        for block in (len(text), 8, 5, 2):
            last = logits_in_blocks(target, text, block)[-1]
            gaps.append(float(last[x] - last[y]))
            tops.append(float(last.max() - torch.maximum(last[x], last[y])))
        spacing = torch.finfo(target.dtype).eps * float(last[[x, y]].abs().max())
        drift = max(max(gaps) - min(gaps), spacing)
        # The better of the two must itself be the argmax, or nearly: else neither belongs here.
        margin = max(min(abs(g) for g in gaps), min(tops))
        found.append(Divergence(row, at, x, y, margin, drift))
    return found
