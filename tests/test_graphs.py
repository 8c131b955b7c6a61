"""Fixed shapes give what the usual pass gives, and a capture of them would be right.

There is no GPU here. Three stand-ins for one: the fixed shapes run as they are; a tape records the
kernels of a pass and plays them again on the same tensors, as a CUDA graph does; and the meta
device, which has no numbers, shows that no pass asks for one.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from conftest import RandomTree, prompts_of, tiny, tiny_transformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minispec as ms
from minispec.cache import KVCache, Slots
from minispec.graphs import FixedView, GraphedTarget, StaticPass
from minispec.models import LanguageModel, new_llama
from minispec.synthetic import SHAPES
from minispec.tree import TokenTree

LENGTHS = (4, 11, 7)
CLOSE = dict(atol=1e-10, rtol=1e-7)


def random_tree(seed: int, num: int, chain: bool, vocab: int = 61) -> TokenTree:
    """Three rows of ``num`` nodes."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocab, (3, num), generator=chance)
    if chain:
        return TokenTree.chain(tokens)
    above = [torch.randint(-1, i, (3,), generator=chance) if i else -1 + 0 * tokens[:, 0]
             for i in range(num)]  # fmt: skip
    return TokenTree(tokens, torch.stack(above, 1))


def prefilled(target: LanguageModel) -> KVCache:
    """A cache of ragged rows."""
    prompts = [torch.tensor(p) for p in prompts_of(*LENGTHS)]
    cache = target.new_cache(3, 64)
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    target.forward(cache, padded)
    cache.set_lengths(torch.tensor(LENGTHS))
    return cache


def rounds(target: LanguageModel, usual: KVCache, graphed: GraphedTarget, fixed: KVCache):
    """Passes of both kinds over the same chains and trees, of which each row keeps another part."""
    for turn in range(5):
        tree = random_tree(turn, (5, 3)[turn // 3], chain=turn in (0, 2))
        depth, visible = tree.with_root()
        tokens = torch.cat([torch.full((3, 1), 5 + turn), tree.tokens], 1)
        taps = (1,) if turn >= 3 else ()
        read = torch.tensor([[0, 3], [1, 0], [2, 2]]) if turn == 4 else None
        a = target.forward(usual, tokens, depth, visible, read, taps)
        b = graphed.forward(fixed, tokens, depth, visible, read, taps)
        yield a, b
        # Row 0 keeps the root alone, row 1 the first node too, row 2 has stopped.
        path = torch.tensor([[-1], [0], [-1]])
        for cache in (usual, fixed):
            cache.keep(path, torch.tensor([1, 2, 0]))


def assert_same(a: ms.models.Pass, b: ms.models.Pass) -> None:
    torch.testing.assert_close(b.logits, a.logits, **CLOSE)
    torch.testing.assert_close(b.hidden, a.hidden, **CLOSE)
    assert a.taps.keys() == b.taps.keys()
    for layer in a.taps:
        torch.testing.assert_close(b.taps[layer], a.taps[layer], **CLOSE)


# The fixed shapes.


@torch.no_grad()
def test_fixed_shapes_give_what_the_usual_pass_gives(any_target):
    graphed = GraphedTarget(any_target, widest=8)
    usual, fixed = prefilled(any_target), prefilled(graphed)
    assert not fixed.passes, "the prompts are longer than widest"
    for a, b in rounds(any_target, usual, graphed, fixed):
        assert_same(a, b)
    assert sorted(fixed.passes) == [(4, 4, (1,)), (6, 6, ())]
    # A pass that says nothing of its shape is a chain, though the last one was a tree.
    tokens = torch.full((3, 4), 9)
    a, b = (t.forward(c, tokens, taps=(1,)) for t, c in ((any_target, usual), (graphed, fixed)))
    assert_same(a, b)
    assert len(fixed.passes) == 2


@torch.no_grad()
def test_a_tree_read_in_two_passes(llama):
    graphed = GraphedTarget(llama)
    tree = random_tree(0, 5, chain=False)
    depth, visible = tree.with_root()
    tokens = torch.cat([torch.full((3, 1), 5), tree.tokens], 1)
    fixed = prefilled(graphed)
    whole = llama.forward(prefilled(llama), tokens, depth, visible).logits
    first = graphed.forward(fixed, tokens[:, :2], depth[:, :2], visible[:, :2, :2]).logits
    rest = graphed.forward(fixed, tokens[:, 2:], depth, visible[:, 2:]).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, **CLOSE)


@pytest.mark.parametrize("name", ["plain", "oracle", "tree", "draft model", "early exit"])
def test_generate_gives_the_same_tokens(llama, name):
    draft = tiny("llama", torch.float64, 1)
    drafters = {
        "plain": lambda: None,
        "oracle": lambda: ms.Oracle(0.6, 4),
        "tree": lambda: RandomTree(7),
        "draft model": lambda: ms.DraftModel(GraphedTarget(draft), 3),  # a draft may be graphed too
        "early exit": lambda: ms.EarlyExit(1, 3),
    }
    prompts = prompts_of(4, 9, 6)
    for sampling in (ms.Sampling(), ms.Sampling(1.0)) if name != "tree" else (ms.Sampling(),):
        options = dict(max_new_tokens=14, eos=(), sampling=sampling)
        usual = ms.generate(llama, prompts, drafters[name](), **options)
        graphed = ms.generate(GraphedTarget(llama), prompts, drafters[name](), **options)
        for a, b in zip(usual.tokens, graphed.tokens, strict=True):
            assert torch.equal(a, b)
        assert usual.trace.tau == graphed.trace.tau


def test_a_pass_that_does_not_fit_is_refused_before_it_writes(llama):
    graphed = GraphedTarget(llama)
    cache = graphed.new_cache(1, 60)
    assert cache.capacity == 64
    cache.set_lengths(torch.tensor([62]))
    with pytest.raises(ValueError, match="holds 64 tokens; this pass needs 65"):
        graphed.forward(cache, torch.zeros(1, 3, dtype=torch.long))
    assert not any(b.any() for pair in cache.buffers for b in pair)


def test_graphs_go_with_their_cache(llama):
    graphed = GraphedTarget(llama)
    cache = graphed.new_cache(1, 8)
    graphed.forward(cache, torch.zeros(1, 2, dtype=torch.long))
    gone = weakref.ref(next(iter(cache.passes.values())))
    gc.disable()  # no circle to be found: their memory is free at once
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_what_cannot_be_captured_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="dynamic RoPE"):
        GraphedTarget(tiny("llama", rope_parameters=rope))
    spread = tiny()
    spread.layer_shapes[0] = ms.cache.LayerShape(2, 8, 8, spread.dtype, torch.device("meta"))
    with pytest.raises(ValueError, match="lies on several"):
        GraphedTarget(spread)


# Capture and replay, on a tape.


class Tape(TorchDispatchMode):
    """Records the kernels of a pass; ``replay`` runs them again on the very same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.kernels:
            given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage()._cdata not in given:  # else a view, or written in place
                    old.copy_(new)


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Stream:
    """Work on it is done at once; what was waited for is noted."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


@pytest.fixture
def taped(monkeypatch):
    """torch.cuda's part in a capture, played by tapes."""
    default = Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: default)

    def capturing(target: LanguageModel, **options) -> GraphedTarget:
        graphed = GraphedTarget(target, **options)
        graphed.stream = Stream()
        return graphed

    capturing.default = default
    return capturing


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_replayed_kernels_give_what_the_usual_pass_gives(taped, name):
    target = tiny(name)
    graphed = taped(target, widest=8)
    usual, fixed = prefilled(target), prefilled(graphed)
    passes = []
    with torch.no_grad():
        for a, b in rounds(target, usual, graphed, fixed):
            assert_same(a, b)
            passes.append((a, b))
    # No later replay has written over what was handed out.
    for a, b in passes:
        assert_same(a, b)
    steps = list(fixed.passes.values())
    assert [s.graph.replays for s in steps] == [3, 2]
    # Every warm-up waits for the copies into its inputs, and is waited for.
    assert len(graphed.stream.waited) == len(taped.default.waited) == 2


def test_generate_by_replayed_kernels(taped, llama):
    prompts = prompts_of(4, 9, 6)
    for drafter in (None, ms.Oracle(0.6, 4), RandomTree(7)):
        usual = ms.generate(llama, prompts, drafter, max_new_tokens=14, eos=())
        again = ms.generate(taped(llama), prompts, drafter, max_new_tokens=14, eos=())
        for a, b in zip(usual.tokens, again.tokens, strict=True):
            assert torch.equal(a, b)


@torch.no_grad()
def test_the_tape_shows_what_the_host_decided(taped, llama, monkeypatch):
    """A pass that takes its slots from the host is right when captured, and wrong ever after."""

    def begin(self, num: int, behind: int = 0) -> None:
        low = int(self.lengths[0])
        index = self.lengths.unsqueeze(1) + torch.arange(num)
        self.slots = Slots(index, low, self.capacity)

    monkeypatch.setattr(FixedView, "begin", begin)
    graphed = taped(llama)
    usual, fixed = (t.new_cache(1, 64) for t in (llama, graphed))
    gaps = []
    for token in (5, 6):
        tokens = torch.full((1, 1), token)
        a, b = llama.forward(usual, tokens), graphed.forward(fixed, tokens)
        gaps.append(float((a.logits - b.logits).abs().max()))
        usual.advance()
        fixed.advance()
    assert gaps[0] < 1e-9 < 1e-3 < gaps[1]


# Nothing asks the device for a number, and nothing comes from the host.


class OnlyOn(TorchDispatchMode):
    """Fails where a kernel reads or makes a tensor that is elsewhere."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tensors((args, kwargs, out)):
            assert tensor.device.type == self.device, f"{func} on {tensor.device}"
        return out


def on_meta(seed: int = 0, **numbers) -> LanguageModel:
    return LanguageModel(new_llama(seed, torch.bfloat16, "meta", **numbers), trial=False)


def static_pass(target: LanguageModel, batch: int, num: int) -> StaticPass:
    cache = target.new_cache(batch, 640)
    return StaticPass(target, cache, num, num, taps=(1,))


def test_a_pass_asks_the_device_for_nothing():
    """The whole pass in its true shape; a question (item, nonzero) has no answer on this device."""
    target = on_meta(**SHAPES["llama-8b"])
    graphed = GraphedTarget(target, widest=128)
    for batch, num in ((1, 1), (32, 16)):
        step = static_pass(graphed, batch, num)
        with torch.inference_mode(), OnlyOn("meta"):
            out = step.compute()
        assert out.logits.shape == (batch, num, target.vocab_size)


def test_a_pass_that_asks_is_found_out(monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = on_meta(**SHAPES["toy"] | {"rope_parameters": rope})
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
        static_pass(target, 1, 4).compute()
    step = static_pass(on_meta(**SHAPES["toy"]), 1, 4)
    usual = KVCache.mask

    def from_host(self, depth, visible, dtype, window=None):
        return usual(self, depth, visible, dtype, window) + torch.zeros(1, 1).to(self.device)

    monkeypatch.setattr(FixedView, "mask", from_host)
    with pytest.raises(AssertionError, match="on cpu"), OnlyOn("meta"):
        step.compute()


def test_a_draft_model_made_of_a_transformers_model_stays_as_it_was():
    """GraphedTarget borrows a model's parts and changes none of them."""
    target = ms.load_target(tiny_transformer("llama", torch.float64, 0))
    before = dict(vars(target))
    GraphedTarget(target)
    assert all(vars(target)[k] is v for k, v in before.items())
