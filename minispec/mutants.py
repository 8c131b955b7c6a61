"""Deliberate faults, and the checks that must catch them.

A check that has never failed is a hope. Each ``Mutant`` here is a small edit of the package's own
source, of a kind that real implementations have shipped; while it is applied, the checks run, and
at least one must object. ``report`` runs every check on the healthy code (all must pass) and under
every mutant (one must fail), and lists the lossy verifiers beside them: they fail by design.

The registry is open: ``MUTANTS.append(Mutant(...))``.
"""

from __future__ import annotations
import __future__

import difflib
import importlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .drafters import DraftModel, EarlyExit, Oracle, PromptLookup, TreeDraft
from .drafters.base import Drafter, Rows
from .exactness import (
    FALSE_FAILURE,
    Enumerated,
    TableLM,
    detectable,
    emitted_law,
    enumerate_family,
    families,
    g_test,
    padded_law,
    total_variation,
)
from .generate import _Run, generate
from .head_checks import eagle_faults, loss_faults, medusa_faults, tie_faults
from .models import LanguageModel
from .sampling import Sampling
from .shapes import from_paths, kary
from .tree import TokenTree


@dataclass(frozen=True)
class Mutant:
    """One fault: a function of the package, and what to write in place of what.

    where is "module:function" or "module:Class.method"; edits are pairs (old, new), each old
    standing exactly once in the function's source.
    """

    name: str
    where: str
    edits: tuple[tuple[str, str], ...]
    story: str

    def function(self) -> FunctionType:
        module, path = self.where.split(":")
        found = importlib.import_module(f"minispec.{module}")
        for part in path.split("."):
            found = getattr(found, part)
        assert isinstance(found, FunctionType)
        return found

    def sources(self) -> tuple[str, str]:
        """The function's source, healthy and broken."""
        old = textwrap.dedent(inspect.getsource(self.function()))
        new = old
        for before, after in self.edits:
            if new.count(before) != 1:
                raise ValueError(
                    f"mutant {self.name!r}: {before!r} stands {new.count(before)} times"
                )
            new = new.replace(before, after)
        return old, new

    def diff(self) -> str:
        """The lines that the fault takes away and puts in."""
        old, new = (text.splitlines() for text in self.sources())
        lines = difflib.unified_diff(old, new, lineterm="", n=0)
        return "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@"))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Breaks the function, wherever it is referred to, until the block is left."""
        function = self.function()
        _, source = self.sources()
        flags = __future__.annotations.compiler_flag
        scope: dict[str, FunctionType] = {}
        exec(compile(source, f"<mutant: {self.name}>", "exec", flags), function.__globals__, scope)
        healthy = function.__code__
        function.__code__ = scope[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = healthy


MUTANTS: list[Mutant] = [
    Mutant(
        "residual not subtracted",
        "verify:leftover",
        (("(residual - q).clamp(min=0)", "residual.clone()"),),
        "After a rejection the next token comes from p itself: likely drafts get a second chance.",
    ),
    Mutant(
        "residual not renormalised",
        "verify:leftover",
        (("left / mass", "left"),),
        "Harmless on chains; the second sibling is then accepted too seldom.",
    ),
    Mutant(
        "residual at the wrong position",
        "verify:_walk",
        (
            (
                "torch.where(accept.unsqueeze(-1), law.at(current) / lenience, residual)",
                "torch.where(accept.unsqueeze(-1), law.at(current * 0 - 1) / lenience, residual)",
            ),
        ),
        "Every position is judged by the root's law. Invisible where all laws are the same.",
    ),
    Mutant(
        "bonus drawn from q",
        "verify:_walk",
        (
            (
                "rng.draw(residual)",
                "rng.draw(torch.where((accepted == num)[:, None], "
                "drawn_from(tree, num - 1, residual), residual) if num else residual)",
            ),
        ),
        "After a fully accepted chain the draft's law speaks in the place of the target's.",
    ),
    Mutant(
        "bonus left out",
        "generate:_Run.commit",
        (
            (
                "torch.minimum(verdict.accepted, past) + 1",
                "torch.minimum(verdict.accepted, past + 1).clamp(min=1)",
            ),
        ),
        "A round ends with its drafts: after a rejection the correction that was owed is lost.",
    ),
    Mutant(
        "accepted with p",
        "verify:_walk",
        (("here, r_x / q_x,", "here, r_x,"),),
        "The division by q is forgotten: drafts are rejected too often, and the residual overpays.",
    ),
    Mutant(
        "one uniform reused",
        "verify:_walk",
        (
            ("    for i in range(num):", "    u = rng.uniform(batch)\n    for i in range(num):"),
            (
                "rng.coin(torch.where(here, r_x / q_x, torch.zeros_like(r_x)))",
                "u < torch.where(here, r_x / q_x, torch.zeros_like(r_x))",
            ),
        ),
        "One coin for the whole chain: the first token's law stays right, the joint law does not.",
    ),
    Mutant(
        "q one position off",
        "verify:_walk",
        (("tree.q[rows, i, x]", "tree.q[rows, max(i - 1, 0), x]"),),
        "Each token is scored by the law of the position before it.",
    ),
    Mutant(
        "argmax scored as drawn",
        "verify:_walk",
        (("torch.ones_like(r_x) if tree.q is None", "r_x if tree.q is None"),),
        "A chosen token is treated as if it had been drawn from p: it is always accepted.",
    ),
    Mutant(
        "resampled after a mismatch",
        "verify:drawn_from",
        ((".scatter_(1, tree.tokens[:, i, None].clamp(min=0), 1.0)", ""),),
        "A chosen token that was refused can still be drawn.",
    ),
    Mutant(
        "siblings scored by the first law",
        "sampling:sibling_laws",
        (("left / mass,", "q,"),),
        "Drawn without replacement, but scored as if the earlier siblings could come again.",
    ),
    Mutant(
        "siblings tried likeliest first",
        "sampling:Random.draw_siblings",
        (
            (
                "key.topk(num, dim=-1).indices",
                "(lambda t: t.gather(1, q.gather(1, t).argsort(1, descending=True)))"
                "(key.topk(num, dim=-1).indices)",
            ),
        ),
        "Sorted after they were drawn: the laws are those of an order in which nothing was drawn.",
    ),
    Mutant(
        "siblings tried by id",
        "drafters.draft_tree:TreeDraft.draw",
        (
            (
                "drawn, drawn_from = rows.rng.draw_siblings(q, count)",
                "from ..sampling import sibling_laws\n        "
                "drawn = rows.rng.draw_siblings(q, count)[0].sort(1).values\n        "
                "drawn_from = sibling_laws(q, drawn)",
            ),
        ),
        "The same fault in the drafter: a set was drawn, and its order is made up.",
    ),
    Mutant(
        "block: residual of the token rule",
        "verify:block",
        (
            (
                "owed = leftover(weight.unsqueeze(1) * here, drawn_from(tree, i + 1, here))",
                "owed = leftover(here, drawn_from(tree, i + 1, here))",
            ),
        ),
        "Block verification needs p_i P - Q, not P - Q.",
    ),
    Mutant(
        "unlikely draws dropped",
        "drafters.draft_model:DraftModel.draft_chain",
        (
            (
                "valids.append(valid)",
                "q = self.law(logits[:, 0], rows.sampling).gather(1, token[:, None])\n        "
                "valids.append(valid & valids[-1] & (q > 0.3) if valids else valid & (q > 0.3))",
            ),
        ),
        "A token is drawn, looked at, and dropped: what is kept no longer follows q.",
    ),
    Mutant(
        "temperature on the draft alone",
        "sampling:Law.at",
        (("self.sampling.probs(", "type(self.sampling)(1.0, top_p=self.sampling.top_p).probs("),),
        "The target speaks at temperature 1 whatever was asked.",
    ),
    Mutant(
        "nucleus on the draft alone",
        "sampling:Law.at",
        (("self.sampling.probs(", "type(self.sampling)(self.sampling.temperature).probs("),),
        "Tokens outside the nucleus are emitted.",
    ),
    Mutant(
        "draft drawn hotter than it says",
        "drafters.draft_model:DraftModel.draft_chain",
        (("self.settled(laws[-1], valid)", "self.settled(laws[-1].sqrt(), valid)"),),
        "Sampled from one tensor, scored by another.",
    ),
    Mutant(
        "rejected keys left in the cache",
        "generate:_Run.round",
        (
            ("self.cache.lengths_host + count)", "self.cache.lengths_host + tokens.shape[1])"),
            (
                "self.cache.keep(verdict.path, count)",
                "self.cache.keep(verdict.path, count * 0 + tokens.shape[1])",
            ),
        ),
        "Nothing is forgotten after a rejection.",
    ),
    Mutant(
        "accepted path not moved",
        "cache:KVCache.keep",
        (("longest > 0", "longest > 99"),),
        "A tree's accepted nodes stay where they were and others' keys take their place.",
    ),
    Mutant(
        "rows share the longest row's slots",
        "cache:KVCache.begin",
        (("self.lengths.unsqueeze(1) + torch", "self.lengths.max() + torch"),),
        "In a ragged batch short rows write where nobody looks.",
    ),
    Mutant(
        "siblings see each other",
        "tree:TokenTree.ancestors",
        (("self.is_chain or num < 2", "True"),),
        "A causal mask in the place of the tree's.",
    ),
    Mutant(
        "positions by slot",
        "tree:TokenTree.with_root",
        (
            (
                "visible.sum(-1) - 1, visible",
                "torch.arange(num + 1, device=visible.device).expand(batch, -1), visible",
            ),
        ),
        "A node's position is its place in the buffer and not its depth.",
    ),
    Mutant(
        "draft: positions by slot",
        "drafters.draft_tree:reading_plan",
        (("sees.sum(1) - 1, place", "torch.arange(len(inner)), place"),),
        "The text stays right and the drafts get worse: only one that must be right shows it.",
    ),
    Mutant(
        "draft: siblings see each other",
        "drafters.draft_tree:reading_plan",
        (("return sees,", "return torch.ones_like(sees).tril(),"),),
        "A causal mask in the draft model's pass over a level.",
    ),
    Mutant(
        "draft: accepted path not moved",
        "drafters.draft_tree:TreeDraft.observe",
        (("keep(path, count + 1)", "set_lengths(self.cache.lengths_host + count + 1)"),),
        "The draft model goes on from the keys of nodes that were rejected.",
    ),
    Mutant(
        "draft: another node's candidates",
        "drafters.draft_tree:TreeDraft.pick_top",
        (("best[:, level.places,", "best[:, level.places[::-1],"),),
        "A level's rows and its parents are paired the wrong way round.",
    ),
    Mutant(
        "window forgotten",
        "cache:KVCache.mask",
        (("window is not None", "False"),),
        "Sliding-window models look back further than they were made to.",
    ),
    Mutant(
        "end inside a run ignored",
        "generate:_Run.commit",
        (
            (
                "torch.isin(emitted, self.eos)",
                "torch.isin(emitted, self.eos) & (column == verdict.accepted.unsqueeze(1))",
            ),
        ),
        "An end-of-text token counts only where the target said it itself.",
    ),
    Mutant(
        "budget overrun",
        "generate:_Run.propose",
        (("rows.limit - rows.lengths - 1", "rows.limit - rows.lengths"),),
        "One token more than was asked for.",
    ),
]

# Faults in trained heads make no text wrong: drafts get worse, and other checks must notice.
HEAD_MUTANTS: list[Mutant] = [
    Mutant(
        "Medusa reads the row before",
        "drafters.medusa:Medusa.observe",
        (("F.pad(kept.path + 1, (1, 0))", "F.pad(kept.path, (1, 0)).clamp(min=0)"),),
        "The heads are shown the feature of another node than the last accepted one.",
    ),
    Mutant(
        "Medusa begins a token early",
        "drafters.medusa:Medusa.start",
        (("(prompt.emitted - 1)", "(prompt.emitted - 2).clamp(min=0)"),),
        "The first round's feature is that of the token before the prompt's last.",
    ),
    Mutant(
        "Medusa's labels one off",
        "training.medusa:MedusaLearner.forward",
        (
            ("laws.ahead(batch, 1 + k, learn)", "laws.ahead(batch, k, learn)"),
            (
                "self.known[batch.ahead(batch.tokens, 2 + k)]",
                "self.known[batch.tokens.roll(-k - 1)]",
            ),
        ),
        "Each head learns what the head before it should say.",
    ),
    Mutant(
        "EAGLE's tokens and features shifted",
        "drafters.eagle:Eagle.start",
        (("[:, 1 : prompt.hidden.shape[1] + 1]", "[:, : prompt.hidden.shape[1]]"),),
        "A feature stands with its own token and not with the one chosen after it.",
    ),
    Mutant(
        "EAGLE keeps another node's feature",
        "drafters.eagle:Eagle.observe",
        (("F.pad(kept.path + 1, (1, 0))", "F.pad(kept.path, (1, 0))"),),
        "What is put back after a verification belongs to the node before.",
    ),
    Mutant(
        "EAGLE counts padding as read",
        "drafters.eagle:Eagle.read_committed",
        (("begun + self.count.clamp(max=part.stop)", "begun + part.stop"),),
        "In ragged rows keys of no token stay in the draft's cache.",
    ),
    Mutant(
        "EAGLE keeps a stale key",
        "drafters.eagle:Eagle.read_committed",
        (
            (
                "begun + self.count.clamp(max=part.stop)",
                "begun + self.count.clamp(max=part.stop) + self.count.gt(2)",
            ),
        ),
        "A key that was written while drafting stays behind those with true features.",
    ),
    Mutant(
        "EAGLE's embedding second",
        "drafters.eagle:EagleHead.step",
        (("torch.cat([embed, feature], -1)", "torch.cat([feature, embed], -1)"),),
        "The halves of the FC's input changed places.",
    ),
    Mutant(
        "EAGLE-3 norms twice",
        "drafters.eagle:EagleHead.logits",
        (("self.norm(feature)", "self.norm(self.norm(feature))"),),
        "One norm too many before the LM head.",
    ),
    Mutant(
        "EAGLE-3 feeds back what is normed",
        "drafters.eagle:EagleHead.step",
        (
            (
                "return self.layer(embed, feature, position, mask, cache)",
                "out = self.layer(embed, feature, position, mask, cache)\n"
                "    return self.norm(out) if self.config.version == 3 else out",
            ),
        ),
        "The next step reads the LM head's input instead of the layer's output.",
    ),
    Mutant(
        "draft ids taken for the target's",
        "drafters.eagle:Eagle.named",
        (("self.head.token_map[ids]", "ids"),),
        "The reduced vocabulary's ids are proposed as they are.",
    ),
    Mutant(
        "EAGLE's siblings see each other",
        "drafters.grow:grow",
        (("torch.eye(k, dtype", "torch.ones(k, k, dtype"),),
        "In the growing tree a node attends to its level and not to its path.",
    ),
    Mutant(
        "EAGLE's positions by slot",
        "drafters.grow:grow",
        (("torch.arange(depth, device=device).repeat_interleave(k)", "torch.arange(depth * k)"),),
        "Nodes of one depth stand at different positions.",
    ),
    Mutant(
        "EAGLE's children change parents",
        "drafters.grow:grow",
        (("above = place // k", "above = place % k"),),
        "A node goes on from the feature of another one's parent.",
    ),
    Mutant(
        "orphaned node",
        "drafters.grow:rerank",
        (
            (
                "torch.argsort(values, dim=1, descending=True, stable=True)",
                "values.shape[1] - 1 - values.flip(1).argsort(dim=1, descending=True, stable=True)",
            ),
        ),
        "Of equal values the deeper node is kept, and hangs on one that is not.",
    ),
    Mutant(
        "EAGLE learns the token before",
        "training.eagle:EagleLearner.forward",
        (("laws.ahead(batch, 1 + i, learn)", "laws.ahead(batch, i, learn)"),),
        "The head is taught what its input says already.",
    ),
    Mutant(
        "EAGLE unrolls at one position",
        "training.eagle:EagleLearner.unroll",
        (("batch.position + i", "batch.position"),),
        "In training a later step stands where the first one stood, in use one place on.",
    ),
]


# The checks.


@dataclass(frozen=True)
class Check:
    """A question with a number for an answer: above the limit, something is wrong."""

    name: str
    asks: str
    unit: str
    limit: float
    measure: Callable[[], float]

    def __call__(self) -> float:
        """The number; infinity where the fault stops the run with an error."""
        try:
            return self.measure()
        except (ValueError, RuntimeError, IndexError, FloatingPointError, AssertionError):
            return math.inf


class FixedTree(Drafter):
    """A tree of a fixed shape whose siblings are drawn without replacement from a fixed law."""

    def __init__(self, parents: tuple[int, ...], vocab_size: int) -> None:
        self.parents, self.max_nodes = parents, len(parents)
        generator = torch.Generator().manual_seed(7)
        self.q = torch.rand(vocab_size, generator=generator, dtype=torch.float64) + 0.1
        self.q /= self.q.sum()

    def propose(self, rows: Rows) -> TokenTree:
        q = self.q.expand(rows.batch, -1)
        tokens = torch.zeros(rows.batch, self.max_nodes, dtype=torch.long)
        laws = torch.zeros(rows.batch, self.max_nodes, len(self.q), dtype=torch.float64)
        for parent in dict.fromkeys(self.parents):
            children = [i for i, p in enumerate(self.parents) if p == parent]
            tokens[:, children], laws[:, children] = rows.rng.draw_siblings(q, len(children))
        parents = torch.tensor(self.parents).expand(rows.batch, -1)
        return TokenTree(tokens, parents, laws)


def _walk_distance(verifier: str) -> float:
    """The worst total variation over a spread of enumerated families."""
    some = [f for f in families(instances=1) if f.verifier == verifier][::5]
    return max(enumerate_family(f).distance for f in some)


LOOP_SETTINGS = ((Sampling(1.0), None), (Sampling(1.6, top_p=0.95), 1))


def loop_drafters(vocab_size: int) -> dict[str, Drafter | None]:
    """A drafter of each kind, small enough for every outcome to be walked."""
    draft = LanguageModel(TableLM(vocab_size, seed=2))
    shape = from_paths([(0,), (1,), (0, 0)])
    return {
        "plain": None,
        "draft model": DraftModel(draft, 2),
        "draft model, early stop": DraftModel(draft, 2, min_top=0.7),
        "prompt lookup": PromptLookup(2, max_ngram=2),
        "early exit": EarlyExit(1, 2),
        "oracle": Oracle(0.7, 2),
        "tree": FixedTree((-1, -1, 0), vocab_size),
        "draft tree, top": TreeDraft(draft, shape),
        "draft tree, drawn": TreeDraft(draft, shape, "draw"),
    }


def loop_distances(vocab_size: int = 2, num: int = 5) -> dict[tuple[str, str], tuple[float, int]]:
    """Total variation and outcomes of the whole generate(), by drafter and setting.

    The law of ``num`` tokens (the prefill emits the first, and rounds the rest). Two prompts of
    different lengths share every batch; the second setting has an end-of-text token, a
    temperature and a nucleus.
    """
    prompts = [[0, 1, 0], [vocab_size - 1]]
    table = TableLM(vocab_size, seed=1)
    target, found = LanguageModel(table), {}
    for name, drafter in loop_drafters(vocab_size).items():
        for sampling, eos in LOOP_SETTINGS:
            laws, outcomes = emitted_law(target, prompts, drafter, num, sampling, eos=eos)
            worst = max(
                total_variation(law, padded_law(table, prompt, num, sampling, eos))
                for law, prompt in zip(laws, prompts, strict=True)
            )
            setting = f"T {sampling.temperature:g}" + (", top-p, eos" if eos is not None else "")
            found[name, setting] = (worst, outcomes)
    return found


def _loop_distance() -> float:
    return max(distance for distance, _ in loop_distances().values())


@cache
def tiny_model(kind: str = "llama") -> LanguageModel:
    """A tiny random transformer (float64): "llama", "mistral" with a window of 8, or "small".

    "small" is a Llama over a vocabulary of 4, whose law of four tokens can be tabulated.
    """
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": 4 if kind == "small" else 11,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2 if kind == "small" else 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = (
        transformers.MistralConfig(**shared, sliding_window=8)
        if kind == "mistral"
        else transformers.LlamaConfig(**shared)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return LanguageModel(model.double())


def _greedy_by_hand(kind: str, prompt: list[int], num: int) -> list[int]:
    """Greedy text by the bare model, without a cache and without any code of the package."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            logits = tiny_model(kind).model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@cache
def _expected(kind: str) -> list[list[int]]:
    return [_greedy_by_hand(kind, prompt, 14) for prompt in GREEDY_PROMPTS]


GREEDY_PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 9, 8, 9, 8, 2]]


class SomeRight(Drafter):
    """A greedy tree, two chains side by side: one right half of the time, one always wrong."""

    max_nodes = 4

    def __init__(self) -> None:
        self.oracle = Oracle(0.6, 2)

    def start(self, *args: Any) -> None:
        self.oracle.start(*args)

    def propose(self, rows: Rows) -> TokenTree:
        good = self.oracle.propose(rows).tokens  # [B, 2]
        bad = (good + 3) % 11
        parents = torch.tensor([-1, -1, 0, 1]).expand(rows.batch, -1)
        tokens = torch.stack([bad[:, 0], good[:, 0], bad[:, 1], good[:, 1]], 1)
        return TokenTree(tokens, parents)


def _greedy_mismatches() -> float:
    """Rows whose greedy tokens differ from the bare model's, over models and drafters."""
    wrong = 0
    for kind in ("llama", "mistral"):
        drafters = (None, Oracle(0.6, 3), PromptLookup(3), EarlyExit(1, 2), SomeRight())
        for drafter in drafters:
            out = generate(tiny_model(kind), GREEDY_PROMPTS, drafter, max_new_tokens=14)
            rows = zip(out.tokens, _expected(kind), strict=True)
            wrong += sum(row.tolist() != expected for row, expected in rows)
    return float(wrong)


def _missing_tokens() -> float:
    """A drafter that is always right must bring depth + 1 tokens a pass: how many lack?"""
    target, missing = tiny_model(), 0.0
    for drafter in (Oracle(1.0, 4), TreeDraft(target, kary(2, 3))):
        full = drafter.num_tokens + 1  # two rounds of that, after the prefill's token
        out = generate(target, GREEDY_PROMPTS, drafter, max_new_tokens=2 * full + 1)
        missing = max(missing, abs(out.trace.tau - full))
    return missing


def _cache_difference() -> float:
    """The largest difference between the cache after a run and one computed from the text."""
    target = tiny_model()
    run = _Run(target, GREEDY_PROMPTS, SomeRight(), 12)
    for _ in run.rounds():
        pass
    worst = float((run.cache.lengths_host - (run.rows.host - 1)).abs().max())
    for row in range(len(GREEDY_PROMPTS)):
        num = int(run.rows.host[row]) - 1
        fresh = target.new_cache(1, num)
        with torch.no_grad():
            target.forward(fresh, run.rows.tokens[row : row + 1, :num])
        for ours, theirs in zip(run.cache.layers, fresh.layers, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                worst = max(worst, float((a[row, :, :num] - b[0]).abs().max()))
    return worst


G_ROWS, G_TESTS, G_DEPTH = 6000, 3, 4
G_PROMPT, G_SAMPLING = [1, 2, 3], Sampling(1.5, top_p=0.95)


def joint_counts(drafter: Drafter | None, sampling: Sampling, seed: int = 3) -> np.ndarray:
    """[V, V, V, V] how often each text of four tokens came, over G_ROWS rows of one batch."""
    target = tiny_model("small")
    rows = [G_PROMPT] * G_ROWS
    out = generate(
        target, rows, drafter, max_new_tokens=G_DEPTH, sampling=sampling, seed=seed, eos=()
    )
    counts = np.zeros((target.vocab_size,) * G_DEPTH)
    np.add.at(counts, tuple(torch.stack(out.tokens).numpy().T), 1)
    return counts


@cache
def joint_law(sampling: Sampling) -> np.ndarray:
    """[V, V, V, V] the law of the next four tokens, by the bare model, every prefix in turn."""
    model, size = tiny_model("small").model, tiny_model("small").vocab_size
    texts = torch.tensor([G_PROMPT])
    law = torch.ones(1, dtype=torch.float64)
    for _ in range(G_DEPTH):
        with torch.no_grad():
            logits = model(texts, use_cache=False).logits[:, -1]
        law = (law.unsqueeze(1) * Sampling.probs(sampling, logits)).flatten()
        texts = torch.cat(
            [texts.repeat_interleave(size, 0), torch.arange(size).repeat(len(texts))[:, None]], 1
        )
    return law.view((size,) * G_DEPTH).numpy()


def _surprise() -> float:
    """-log10 of the smallest p-value over three drafters; infinite outside the support."""
    sampling, worst = G_SAMPLING, 0.0
    draft = tiny_model("small").first_layers(1)
    for drafter in (DraftModel(draft, 3), EarlyExit(1, 2), FixedTree((-1, -1, 0, 1), 4)):
        test = g_test(joint_counts(drafter, sampling), joint_law(sampling))
        worst = max(worst, math.inf if test.outside else -math.log10(max(test.p_value, 1e-300)))
    return worst


CHECKS: list[Check] = [
    Check(
        "walk",
        "the rule on tables, every outcome",
        "TV",
        1e-12,
        lambda: _walk_distance("speculative"),
    ),
    Check(
        "block", "block verification, every outcome", "TV", 1e-12, lambda: _walk_distance("block")
    ),
    Check("loop", "generate() on a table model, every outcome", "TV", 1e-12, _loop_distance),
    Check("greedy", "greedy tokens against the bare model", "rows", 0, _greedy_mismatches),
    Check("full", "tokens a pass of a drafter that is right", "tokens", 1e-9, _missing_tokens),
    Check("cache", "the cache against one computed afresh", "|Δ|", 1e-9, _cache_difference),
    Check(
        "G-test",
        "four tokens of a real forward, 6000 rows (-log10 of the p-value)",
        "log p",
        -math.log10(FALSE_FAILURE / G_TESTS),
        _surprise,
    ),
]

HEAD_CHECKS: list[Check] = [
    Check(
        "Medusa",
        "tokens a pass of Medusa heads that know the future",
        "tokens",
        1e-9,
        lambda: medusa_faults(tiny_model()),
    ),
    Check(
        "EAGLE",
        "what EAGLE proposes against the formulas",
        "nodes",
        0,
        lambda: eagle_faults(tiny_model()) + tie_faults(),
    ),
    Check(
        "losses",
        "the heads' losses against sums by hand",
        "relative",
        1e-5,
        lambda: loss_faults(tiny_model()),
    ),
]


# The report.


@dataclass
class Report:
    """healthy: each check on the code as it is; caught: mutant -> check -> number."""

    healthy: dict[str, float] = field(default_factory=dict)
    caught: dict[str, dict[str, float]] = field(default_factory=dict)
    lossy: dict[str, float] = field(default_factory=dict)
    instances: int = 0
    outcomes: int = 0
    worst: float = 0.0
    loop: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)

    def alive(self) -> list[str]:
        """Mutants that no check caught."""
        limits = {c.name: c.limit for c in CHECKS + HEAD_CHECKS}
        return [
            m for m, row in self.caught.items() if not any(v > limits[c] for c, v in row.items())
        ]

    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        limits = {c.name: c.limit for c in CHECKS + HEAD_CHECKS}
        found = [
            f"check {c!r} fails on healthy code: {v:g}"
            for c, v in self.healthy.items()
            if not v <= limits[c]
        ]
        found += [f"mutant {m!r} survives" for m in self.alive()]
        found += [
            f"{v!r} is lossy but was not noticed" for v, d in self.lossy.items() if not d > 1e-3
        ]
        if not self.worst < 1e-12:
            found.append(f"an enumerated law is off by {self.worst:g}")
        return found


def survey(instances: int = 2) -> tuple[int, int, float, list[Enumerated]]:
    """Enumerates all families: instances, outcomes, worst total variation, and each result."""
    kinds = families(instances)
    results = [enumerate_family(f) for f in kinds]
    worst = max(r.distance for r in results)
    return sum(f.instances for f in kinds), sum(r.outcomes for r in results), worst, results


def lossy_distances() -> dict[str, float]:
    """How far the lossy verifiers' laws are from the target's, at worst, on the same tables."""
    chosen = [
        f for f in families(instances=1) if f.shape == "chain of 2" and f.sampling == Sampling(1.0)
    ]
    names = ("lenient (lossy)", "typical (lossy)")
    return {
        name: max(enumerate_family(replace(f, verifier=name)).distance for f in chosen)
        for name in names
    }


def report(progress: Callable[[str], None] = lambda _: None) -> Report:
    """Runs everything: the survey, the loop, the checks, and the checks under every mutant."""
    out = Report()
    progress("enumerating the rule")
    out.instances, out.outcomes, out.worst, _ = survey()
    progress("enumerating generate()")
    out.loop = loop_distances()
    out.lossy = lossy_distances()
    for mutants, checks in ((MUTANTS, CHECKS), (HEAD_MUTANTS, HEAD_CHECKS)):
        for check in checks:
            progress(f"healthy: {check.name}")
            out.healthy[check.name] = check()
        for mutant in mutants:
            progress(f"mutant: {mutant.name}")
            with mutant.applied():
                out.caught[mutant.name] = {check.name: check() for check in checks}
    return out


def tables(found: Report) -> Group:
    """The report for a terminal."""
    seen = Table(title="Enumerated laws", title_justify="left")
    for column in ("what", "instances", "outcomes", "worst TV"):
        seen.add_column(column, justify="left" if column == "what" else "right")
    seen.add_row(
        "the rule, block verification",
        str(found.instances),
        str(found.outcomes),
        f"{found.worst:.1e}",
    )
    for (name, setting), (distance, outcomes) in found.loop.items():
        seen.add_row(f"loop: {name}, {setting}", "2", str(outcomes), f"{distance:.1e}")
    for name, distance in found.lossy.items():
        seen.add_row(name, "", "", f"{distance:.2f}", style="yellow")
    grids = (
        _grid(found, "What each check says of each mutant (·: nothing amiss)", MUTANTS, CHECKS),
        _grid(found, "The same for trained heads", HEAD_MUTANTS, HEAD_CHECKS),
    )
    problems = found.problems()
    end = (
        "\n".join(f"[red]{escape(p)}[/]" for p in problems)
        if problems
        else f"All {len(CHECKS + HEAD_CHECKS)} checks pass on the code as it is, all "
        f"{len(found.caught)} mutants are caught, and the lossy verifiers are seen to be lossy."
    )
    asks = "\n".join(
        f"[dim]{c.name}: {c.asks}; objects above {c.limit:.3g} ({c.unit})[/]"
        for c in CHECKS + HEAD_CHECKS
    )
    df = len(joint_law(G_SAMPLING).ravel()) - 1
    noticed = detectable(G_ROWS, df, G_TESTS)
    asks += (
        f"\n[dim]The G-test fails healthy code once in {1 / FALSE_FAILURE:,.0f} runs, and a law at "
        f"total variation {noticed:.2f} with probability .999.[/]"
    )
    return Group(seen, *grids, asks, end)


def _grid(found: Report, title: str, mutants: Sequence[Mutant], checks: Sequence[Check]) -> Table:
    """Mutants by checks; the healthy code in the first line."""
    grid = Table(title=title, box=None, title_justify="left")
    grid.add_column("mutant", no_wrap=True)
    for check in checks:
        grid.add_column(check.name, justify="right", no_wrap=True)
    lines = {"none (healthy code)": found.healthy} | {m.name: found.caught[m.name] for m in mutants}
    for name, row in lines.items():
        healthy = row is found.healthy
        grid.add_row(name, *(_cell(row[c.name], c.limit, healthy) for c in checks))
    return grid


def _cell(value: float, limit: float, always: bool) -> str:
    if value <= limit:
        return "ok" if always else "[dim]·[/]"
    short = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return "[bold]error[/]" if math.isinf(value) else f"[bold]{short}[/]"
