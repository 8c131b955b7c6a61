"""CUDA graphs: the target's small passes, captured once and then replayed by a single launch.

A pass over a few tokens is hundreds of small kernels, and on a fast GPU the host needs longer to
launch them than the device to run them. A graph keeps the launches; what it cannot keep is
anything that the host decides. So what changes from round to round (tokens, depths, who sees whom,
lengths) lies in tensors at fixed addresses, and what the host would cut to size has its full size:
attention reads the cache to its capacity, and the mask hides the rest.

    graphed = GraphedTarget(load_target(...))
    generate(graphed, prompts, drafter)  # as ever, with fewer launches

On a CPU the same fixed shapes run without capture, and so the tests can hold them against the
usual pass. The rules of capture: the CUDA notes of PyTorch, "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache, LayerShape, Slots
from .models import LanguageModel, Pass

ROUND_UP = 64  # of capacities: attention kernels take a mask as it is if its rows are aligned
WARM_UP = 3  # passes before a capture

Key = tuple[int, int, tuple[int, ...]]  # new tokens a row, tokens that the tree spans, taps


class GraphedCache(KVCache):
    """A KVCache with the passes captured over its memory: they know its addresses, and go with it.

    Their memory pool is the cache's own. A pool for the graphs of all caches would be found dead
    by the next capture once the last of them is gone.
    """

    def __init__(self, shapes: Sequence[LayerShape], batch: int, capacity: int) -> None:
        super().__init__(shapes, batch, capacity)
        self.passes: dict[Key, StaticPass] = {}
        self.pool: Any = None


class FixedView(KVCache):
    """A cache's own memory, seen at its full capacity and at lengths [B] with a fixed address.

    What ``begin`` else asks of the host, where to write and how far to read, it takes from the
    device (an index of slots: keys are scattered) and from the capacity.
    """

    def __init__(self, cache: KVCache) -> None:
        # Not the graphs: they refer to this view, and a circle would keep their memory alive.
        self.__dict__.update({k: v for k, v in vars(cache).items() if k not in ("passes", "pool")})
        self.lengths = torch.zeros_like(cache.lengths)
        self.lengths_host = torch.zeros_like(cache.lengths_host)  # no pass asks: it has positions

    def begin(self, num: int, behind: int = 0) -> None:
        step = torch.arange(behind, behind + num, device=self.device)
        self.slots = Slots(self.lengths.unsqueeze(1) + step, None, self.capacity)


class StaticPass:
    """A pass over n tokens a row of one cache, whose every input lies at a fixed address.

    num: n, the new tokens; span: m >= n, the tokens that depth [B, m] and visible [B, n, m] of
    ``LanguageModel.forward`` speak of.
    """

    def __init__(
        self, target: LanguageModel, cache: KVCache, num: int, span: int, taps: Sequence[int] = ()
    ) -> None:
        self.target, self.taps = target, tuple(taps)
        self.view = FixedView(cache)
        batch, device = cache.batch, cache.device
        self.tokens = torch.zeros(batch, num, dtype=torch.long, device=device)
        self.depth = torch.arange(span, device=device).repeat(batch, 1)
        before = torch.ones(num, span, dtype=torch.bool, device=device).tril(span - num)
        self.visible = before.repeat(batch, 1, 1)
        self.chain = self.depth.clone(), self.visible.clone()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: Pass | None = None  # in the pool: a replay writes over it

    def load(
        self, tokens: Tensor, depth: Tensor | None, visible: Tensor | None, lengths: Tensor
    ) -> None:
        """Copies a round's inputs to their places. Copies on the device, in the stream's order."""
        self.tokens.copy_(tokens)
        self.depth.copy_(self.chain[0] if depth is None else depth)
        self.visible.copy_(self.chain[1] if visible is None else visible)
        self.view.lengths.copy_(lengths)

    def compute(self) -> Pass:
        """The pass as a graph holds it; positions and masks too are worked out on the device.

        What Python does in here (hooks, transformers' own checks) it does at the capture and
        never again, so none of it may depend on what a tensor holds.
        """
        return LanguageModel.forward(
            self.target, self.view, self.tokens, self.depth, self.visible, taps=self.taps
        )

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Captures ``compute``; the inputs must be loaded.

        The warm-up reads them and writes keys and values where the first replay does, so it
        leaves nothing behind.
        """
        with torch.cuda.device(self.tokens.device):
            # A first pass loads kernels and makes cuBLAS's workspace, neither of which may be
            # captured. It runs on the stream of the capture (never the default one), after the
            # copies into the inputs; torch.cuda.graph waits for all of it.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self.compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):  # one stream a pool, as asked
                out = self.compute()
        self.graph, self.out = graph, out

    def run(self, read: Tensor | None = None) -> Pass:
        """The pass over what was loaded; read [B, r] as in ``LanguageModel.forward``.

        The graphs of a pool lay their intermediate results over each other's outputs: an output
        is good until *any* of them is replayed. So it is copied, and the caller may keep it.
        """
        if self.graph is None:
            out = self.compute()
        else:
            assert self.out is not None
            self.graph.replay()
            taps = {layer: tap.clone() for layer, tap in self.out.taps.items()}
            logits = self.out.logits if read is not None else self.out.logits.clone()
            out = Pass(logits, self.out.hidden.clone(), taps)
        if read is not None:  # after the graph, which reads every position: gathering copies
            index = read[:, :, None].expand(-1, -1, out.logits.shape[-1])
            out.logits = out.logits.gather(1, index)
        return out


class GraphedTarget(LanguageModel):
    """A target (or draft model) whose passes over up to ``widest`` tokens a row are graphs.

    A pass is captured when a cache meets its shape for the first time, which takes a few passes'
    time; longer passes (prompts) and other caches are served as ever. The results of a graph have
    no gradients: they are inference tensors.

    Raises ValueError for a model that lies on several devices, or whose RoPE looks at the
    positions on the host ("dynamic").
    """

    def __init__(self, target: LanguageModel, widest: int = 64) -> None:
        self.__dict__.update(vars(target))  # the same modules, lock and shapes
        self.widest = widest
        if any(shape.device != self.device for shape in self.layer_shapes):
            raise ValueError("a CUDA graph is captured on one device; this model lies on several")
        if "dynamic" in _rope_types(self.config):
            raise ValueError("dynamic RoPE reads positions on the host: it cannot be captured")
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def new_cache(self, batch: int, capacity: int) -> GraphedCache:
        """A cache of at least this capacity."""
        return GraphedCache(self.layer_shapes, batch, -(-capacity // ROUND_UP) * ROUND_UP)

    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        depth: Tensor | None = None,
        visible: Tensor | None = None,
        read: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Pass:
        num = tokens.shape[1]
        if not isinstance(cache, GraphedCache) or num > self.widest:
            return super().forward(cache, tokens, depth, visible, read, taps)
        span = num if visible is None else visible.shape[2]
        cache.begin(num, span - num)  # is there room? The host knows, and asks before any writing
        # Inference mode from the making of the buffers to the last replay, wherever the caller
        # is: buffers made inside may not be written outside; a cache made outside may be, inside.
        with self._lock, torch.inference_mode():
            key = num, span, tuple(taps)
            if key not in cache.passes:
                cache.passes[key] = StaticPass(self, cache, *key)
            step = cache.passes[key]
            step.load(tokens, depth, visible, cache.lengths)
            if self.stream is not None and step.graph is None:
                if cache.pool is None:
                    cache.pool = torch.cuda.graph_pool_handle()
                step.capture(cache.pool, self.stream)
            return step.run(read)


def _rope_types(config: Any) -> set[str]:
    """The kinds of RoPE that a config names, for all layers or by layer kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    return {str(part["rope_type"]) for part in parts if "rope_type" in part}
