"""What a pass costs, counted and measured, and the speed-up that follows from it.

    pass_cost         FLOPs and bytes of one pass, by part, from the model's own parameters
    measure_roofline  what this machine can read and multiply in a second
    time_pass         what passes really take, over tokens, batch and context
    CostModel         measured times in, predicted speed-up out; when speculation loses, and why

A pass reads every weight once, whether for one token or for a dozen. While that, and not the
arithmetic, is what takes the time, checking a draft is nearly free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import bootstrap
from torch import Tensor, nn

from .drafters import Drafter, Oracle
from .generate import generate
from .models import LanguageModel, is_whole
from .trace import Trace

PASS_TOKENS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64)


# Counted: FLOPs and bytes of a pass.


@dataclass
class Part:
    """A part's work in one pass: flops (a multiply and an add are two) and bytes moved."""

    flops: float = 0.0
    bytes: float = 0.0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP/byte."""
        return self.flops / self.bytes if self.bytes else float("nan")


@dataclass
class PassCost:
    """One pass over ``tokens`` new tokens in each of ``batch`` rows, behind ``context`` others.

    parts: "attention projections", "attention over the cache" (its bytes are the KV cache's),
    "MLP", "LM head", "other" (norms, the rows of the embedding that are looked up).
    """

    parts: dict[str, Part]
    tokens: int
    context: int
    batch: int

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.parts.values())

    @property
    def bytes(self) -> float:
        return sum(p.bytes for p in self.parts.values())

    @property
    def intensity(self) -> float:
        """FLOP/byte. Weights alone give batch * tokens in 16 bits, half of that in 32."""
        return self.flops / self.bytes

    def to_frame(self) -> pd.DataFrame:
        """A line a part, and the total: flops, bytes, intensity."""
        lines = self.parts | {"total": Part(self.flops, self.bytes)}
        return pd.DataFrame(
            {name: [p.flops, p.bytes, p.intensity] for name, p in lines.items()},
            ["flops", "bytes", "intensity"],
        ).T.rename_axis("part")


def pass_cost(
    target: LanguageModel,
    tokens: int = 1,
    context: int = 0,
    batch: int = 1,
    *,
    read: int | None = None,
) -> PassCost:
    """Counts one pass of ``target``, from its parameters (as stored) and what its cache keeps.

    read: at how many of a row's tokens logits are wanted (None: at all of them; a prefill: 1).
    Every weight is read once a pass, a tied head as the head. Each new token attends to all
    context + tokens slots: masked pairs are computed too, also outside a sliding window.
    Activations are left out: they are small, and stay in the processor's caches.

    The target may lie on the meta device (no memory, no numbers). Raises ValueError for
    quantized weights and mixtures of experts, whose work cannot be read off the shapes.
    """
    _check_counts(
        tokens=tokens, batch=batch, context=context, read=tokens if read is None else read
    )
    rows, slots = batch * tokens, context + tokens
    names = ("attention projections", "attention over the cache", "MLP", "LM head", "other")
    parts = {name: Part() for name in names}
    head = target.model.get_output_embeddings()
    homes = _homes(target)
    counted: set[int] = set()
    for module in [head, *target.model.modules()]:  # the head first: a tied weight is the head's
        for weight in module.parameters(recurse=False):
            if weight.dim() > 2 or not weight.is_floating_point():
                raise ValueError(f"{type(module).__name__} cannot be counted: no plain matrix")
            if isinstance(module, nn.Embedding):  # a look-up: one row a token
                parts["other"].bytes += rows * weight.shape[1] * weight.dtype.itemsize
            elif id(weight) not in counted:
                counted.add(id(weight))
                part = parts[homes.get(module, "other")]
                part.bytes += weight.nbytes
                if weight.dim() == 2:  # y = x W: a multiply and an add for every weight and row
                    seen = batch * read if module is head and read is not None else rows
                    part.flops += 2 * weight.numel() * seen
    cache = parts["attention over the cache"]
    for shape in target.layer_shapes:
        heads = shape.heads * target.groups  # of queries
        # Every query times every key, then every weight times every value.
        cache.flops += 2 * heads * (shape.key_dim + shape.value_dim) * rows * slots
        cache.bytes += shape.bytes_per_token * batch * (slots + tokens)  # all read, the new written
    return PassCost(parts, tokens, context, batch)


def kv_bytes_per_token(target: LanguageModel) -> int:
    """Bytes that the cache keeps for a token, over all layers."""
    return sum(shape.bytes_per_token for shape in target.layer_shapes)


def _homes(target: LanguageModel) -> dict[nn.Module, str]:
    """The part that each module with a matrix belongs to; norms and the like are in none."""
    homes = {target.model.get_output_embeddings(): "LM head"}
    for layer in target.layers:
        for name, module in layer.named_modules():
            if any(weight.dim() == 2 for weight in module.parameters(recurse=False)):
                attends = "attn" in name or "attention" in name
                homes[module] = "attention projections" if attends else "MLP"
    return homes


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        least = 0 if name in ("context", "read") else 1
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")


# Measured: the machine.


@dataclass
class Roofline:
    """The two ceilings of a machine (Williams et al. 2009): bandwidth [byte/s], peak [FLOP/s].

    rates: what else was measured, in the same units.
    """

    bandwidth: float
    peak: float
    dtype: str = "bfloat16"
    name: str = ""
    threads: int = 0
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def ridge(self) -> float:
        """FLOP/byte at which both ceilings meet: below it memory limits, above it arithmetic."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: ArrayLike) -> Any:
        """FLOP/s that work of this intensity [FLOP/byte] can reach at most."""
        return np.minimum(self.peak, np.asarray(intensity) * self.bandwidth)

    def seconds(self, cost: PassCost | Part) -> float:
        """The least time for this work: bytes and arithmetic overlap, the slower one counts."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.peak)


# Dense bf16 peak and memory bandwidth from the makers' public specification sheets.
KNOWN_GPUS = {
    name: Roofline(bandwidth * 1e12, peak * 1e12, "bfloat16", name)
    for name, bandwidth, peak in (
        ("H100 SXM", 3.35, 989),
        ("H200", 4.8, 989),
        ("A100-80 SXM", 2.039, 312),
        ("RTX 4090", 1.008, 165),
        ("RTX 3090", 0.936, 71),
    )
}


def measure_roofline(
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    megabytes: int = 512,
    size: int = 2048,
    repeats: int = 5,
) -> Roofline:
    """Measures the two ceilings: reading ``megabytes`` in a stream, a size x size matrix product
    (a smaller one where that would take long).

    Choose megabytes far over the last-level cache. The ceiling of bandwidth is the best of two
    ways to read without writing: a sum, and a matrix times a vector, which is what decoding does
    and often falls short of it. Best of ``repeats``, since a ceiling is what can be reached.
    """
    _check_counts(megabytes=megabytes, size=size, repeats=repeats)
    device = torch.device(device)
    count = megabytes * 2**20
    stream = torch.ones(count // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(stream)
    matrix = torch.ones(count // dtype.itemsize // 4096, 4096, dtype=dtype, device=device)
    square = _square(dtype, device, size)
    runs: dict[str, tuple[float, Callable[[], Any]]] = {
        "sum": (stream.nbytes, stream.sum),
        "matvec": (matrix.nbytes, lambda: F.linear(matrix[:1], matrix)),
        "copy": (2 * stream.nbytes, lambda: copy.copy_(stream)),
        "matmul": (2.0 * len(square) ** 3, lambda: F.linear(square, square)),
    }
    rates = {}
    for name, (work, run) in runs.items():
        run()
        rates[name] = work / min(_seconds(run, device) for _ in range(repeats))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    bandwidth = max(rates["sum"], rates["matvec"])
    return Roofline(bandwidth, rates["matmul"], _plain(dtype), name, torch.get_num_threads(), rates)


def _square(dtype: torch.dtype, device: torch.device, most: int) -> Tensor:
    """[n, n], n up to ``most``: a processor that only imitates a type takes minutes for more."""
    for n in (256, 512, 1024, 2048, 4096, 8192):
        square = torch.randn(min(n, most), min(n, most), device=device).to(dtype)
        F.linear(square, square)  # the first product of a kind is slow
        if n >= most or _seconds(partial(F.linear, square, square), device) > 0.05:
            break
    return square


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds that ``run`` takes; on CUDA by events, since a call there returns before the work."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    began_, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began_.record()
    run()
    ended.record()
    torch.cuda.synchronize(device)
    return began_.elapsed_time(ended) / 1e3


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Measured: passes.


def time_pass(
    target: LanguageModel,
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    batch: Sequence[int] = (1,),
    context: Sequence[int] = (256,),
    repeats: int = 9,
    seed: int = 0,
) -> pd.DataFrame:
    """Times passes over every combination of new tokens, rows and committed tokens.

    Every repeat visits all points in a new random order, so that drift hits all alike; one visit
    before that warms up. The cache is filled with small random numbers: what stands in it does
    not change the time. Returns a line a point: tokens, batch, context, seconds (the median),
    low and high (its 95 % bootstrap interval), repeats, threads, dtype.
    """
    points = list(product(tokens, batch, context))
    for n, b, s in points:
        _check_counts(tokens=n, batch=b, context=s, repeats=repeats)
        if target.context_limit is not None and s + n > target.context_limit:
            raise ValueError(f"{s} + {n} tokens do not fit the context of {target.context_limit}")
    chance = torch.Generator(target.device).manual_seed(seed)
    caches = {b: target.new_cache(b, max(context) + max(tokens)) for b in batch}
    for cache in caches.values():
        for buffer in (b for pair in cache.buffers for b in pair):
            buffer.copy_(torch.randn(buffer.shape, generator=chance, device=buffer.device))

    def visit(n: int, b: int, s: int) -> float:
        shape = (b, n)
        ids = torch.randint(
            target.vocab_size, shape, generator=chance, device=target.device, dtype=torch.long
        )
        caches[b].set_lengths(torch.full((b,), s))
        return _seconds(lambda: target.forward(caches[b], ids), target.device)

    order = np.random.default_rng(seed)
    found: list[list[float]] = [[] for _ in points]
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for i in order.permutation(len(points)):
                seconds = visit(*points[i])
                if turn:
                    found[i].append(seconds)
    lines = [(*p, *median_interval(f, seed)) for p, f in zip(points, found, strict=True)]
    names = ["tokens", "batch", "context", "seconds", "low", "high"]
    return pd.DataFrame(lines, columns=names).assign(
        repeats=repeats, threads=torch.get_num_threads(), dtype=_plain(target.dtype)
    )


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The median and its 95 % interval (percentile bootstrap)."""
    middle = float(np.median(values))
    if len(values) < 2:
        return middle, middle, middle
    drawn = bootstrap(
        (values,), np.median, n_resamples=999, method="percentile", random_state=seed
    ).confidence_interval
    return middle, float(drawn.low), float(drawn.high)


# Predicted: the formulas of Leviathan et al. (2211.17192).


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Any:
    """Tokens per target pass, τ = 1 + α + ... + α^γ, for independent acceptances (Eq. 1)."""
    a, g = np.asarray(alpha, dtype=float), np.asarray(gamma, dtype=float)
    if (a < 0).any() or (a > 1).any() or (g < 0).any():
        raise ValueError("alpha must be in [0, 1] and the number of drafted tokens at least 0")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a < 1, (1 - a ** (g + 1)) / (1 - a), g + 1)[()]


def leviathan(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike = 0.0) -> Any:
    """Speed-up if a pass over γ + 1 tokens costs what one over one token does (Thm 3.8).

    c: time of a draft step / time of a plain step.
    """
    return expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + 1)


def operations(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike = 0.0) -> Any:
    """Arithmetic a token, as a multiple of plain decoding's (Thm 3.11); c_hat: c in FLOPs."""
    return (np.asarray(gamma) * (np.asarray(c_hat) + 1) + 1) / expected_tokens(alpha, gamma)


@dataclass
class CostModel:
    """Predicts speed-up from measured times; Leviathan's theorem with its assumptions taken out.

    tokens, seconds  a pass over so many tokens takes so long: t(n), in whatever unit of time
    draft_s          a draft step, in the same unit: c = draft_s / (a plain step)
    rest_s           the engine's own time in a round (verification, bookkeeping): a number, or
                     one for each of ``tokens``
    batch, context   what it was measured at: for the words of ``advice``

    A round with n nodes drafted in d steps takes t(n + 1) + rest + d draft_s; a plain step is
    the round without nodes. Thm 3.8 is the case of a constant t and no rest.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]
    draft_s: float = 0.0
    rest_s: float | Sequence[float] = 0.0
    batch: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        n, t = np.asarray(self.tokens, dtype=float), np.asarray(self.seconds, dtype=float)
        if n.ndim != 1 or n.shape != t.shape or not len(n) or n[0] != 1 or (np.diff(n) <= 0).any():
            raise ValueError("tokens must rise from 1, with as many seconds")
        rest = np.broadcast_to(np.asarray(self.rest_s, dtype=float), n.shape)
        if not (t > 0).all() or not (rest >= 0).all() or not self.draft_s >= 0:
            raise ValueError(
                "times must be numbers, those of passes above 0, the others at least 0"
            )
        self._n, self._t, self._rest = n, t, rest

    def t(self, n: ArrayLike) -> Any:
        """Time of a pass over n tokens (a number or an array).

        Straight lines through the measured points, so monotone wherever they are; beyond the
        last one the line of the last two goes on, for lack of better knowledge.
        """
        return _through(self._n, self._t, n)

    def round_s(self, nodes: ArrayLike, depth: ArrayLike | None = None) -> Any:
        """Time of a round with so many nodes, drafted in ``depth`` steps (None: a chain)."""
        nodes = np.asarray(nodes)
        rest = np.interp(nodes + 1, self._n, self._rest)
        steps = nodes if depth is None else np.asarray(depth)
        return self.t(nodes + 1) + rest + steps * self.draft_s

    @property
    def plain_s(self) -> float:
        """Time of a step of plain decoding: the round without nodes."""
        return float(self.round_s(0))

    @property
    def c(self) -> float:
        """Time of a draft step / time of a plain step."""
        return self.draft_s / self.plain_s

    def overhead(self, nodes: ArrayLike, depth: ArrayLike | None = None) -> Any:
        """Time of a round / time of a plain step."""
        return self.round_s(nodes, depth) / self.plain_s

    def chain_speedup(self, alpha: ArrayLike, k: ArrayLike) -> Any:
        """Speed-up of chains of k tokens, each accepted with probability alpha: τ / overhead."""
        return expected_tokens(alpha, k) / self.overhead(k)

    def tree_speedup(self, values: Sequence[float], depth: int) -> float:
        """Speed-up of a tree drafted in ``depth`` steps (Sequoia 2402.12374, Prop. 3.4).

        values: for each node the probability that it is reached and accepted (the product of the
        acceptance probabilities on its path); τ is 1 + their sum.
        """
        reached = np.asarray(values, dtype=float)
        if (reached < 0).any() or (reached > 1).any():
            raise ValueError("values are probabilities, of each node to be reached and accepted")
        return float((1 + reached.sum()) / self.overhead(len(reached), depth))

    def best_chain(self, alpha: float, k_max: int = 64) -> tuple[int, float]:
        """The best number of tokens to draft, 0 included, and its speed-up."""
        speedups = self.chain_speedup(alpha, np.arange(k_max + 1))
        k = int(np.argmax(speedups))
        return k, float(speedups[k])

    def break_even(self, k_max: int = 64) -> float:
        """The α above which some chain wins; nan if none does even at α = 1."""
        k = np.arange(1, k_max + 1)

        def gain(alpha: float) -> float:
            return float(self.chain_speedup(alpha, k).max()) - 1

        if gain(0.0) >= 0:
            return 0.0
        return float(brentq(gain, 0, 1)) if gain(1.0) > 0 else float("nan")

    def advice(self, alpha: float, k_max: int = 64) -> str:
        """Whether speculation wins or loses here with this α, and why, in a sentence."""
        k, best = self.best_chain(alpha, k_max)
        at = f"at α {alpha:.2f}" + (f" and batch {self.batch}" if self.batch > 1 else "")
        border = self.break_even(k_max)
        if k:
            return (
                f"Speculation wins {at}: {k} drafted tokens a round make {best:.2f}x "
                f"({expected_tokens(alpha, k):.2f} tokens in the time of {self.overhead(k):.2f} "
                f"plain steps)"
                + (f"; below α {border:.2f} it would lose." if border > 0.005 else ".")
            )
        lost = self.chain_speedup(alpha, np.arange(1, k_max + 1))
        k = int(np.argmax(lost)) + 1
        drafting, passing = k * self.c, self.overhead(k) - 1 - k * self.c
        if border <= 0.25:  # a fair drafter would win
            why = "the drafter is too poor: most of its guesses are thrown away"
        elif drafting > passing:
            why = f"drafting is too costly: a draft step takes {self.c:.2f} of a plain step"
        else:
            why = (
                f"the pass is bound by arithmetic: over {k + 1} tokens a row, verified, it costs "
                f"{1 + passing:.2f} plain steps"
            )
        hope = "no α would help" if border != border else f"it begins to pay at α {border:.2f}"
        return (
            f"Speculation loses {at}: the least bad draft ({k} a round) makes {lost[k - 1]:.2f}x, "
            f"since {why}; {hope}."
        )

    @classmethod
    def measure(
        cls,
        target: LanguageModel,
        drafter: Drafter | None = None,
        batch: int = 1,
        context: int = 256,
        tokens: Sequence[int] = PASS_TOKENS,
        repeats: int = 9,
        rounds: int = 24,
        seed: int = 0,
    ) -> CostModel:
        """Times what a prediction needs: passes by ``time_pass``, and rounds of ``generate``.

        drafter: one that drafts chains, whose step is timed on random text; None: drafting is
        free. rest_s comes from rounds of plain decoding and of an Oracle.
        """
        times = time_pass(target, tokens, (batch,), (context,), repeats, seed)
        free = cls(tokens, times["seconds"].tolist(), 0.0, 0.0, batch, context)
        chance = torch.Generator().manual_seed(seed)
        prompt = torch.randint(
            target.vocab_size, (batch, max(1, context - rounds // 2)), generator=chance
        )

        def run(by: Drafter | None) -> Trace:
            num = rounds if by is None else rounds * 2
            return generate(target, prompt, by, max_new_tokens=num, eos=()).trace

        k = min(8, max(tokens) - 1)
        ends = {1: run(None)} | ({k + 1: run(Oracle(0.5, k, seed))} if k else {})
        outside = [_outside(trace, free) for trace in ends.values()]
        model = replace(free, rest_s=np.interp(tokens, list(ends), outside).tolist())
        if drafter is not None:
            model.draft_s = _draft_step(run(drafter), model)
        return model


def _through(x: np.ndarray, y: np.ndarray, at: ArrayLike) -> Any:
    """Straight lines through (x, y), the last of which goes on."""
    at = np.asarray(at, dtype=float)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0
    return (np.interp(at, x, y) + slope * np.maximum(at - x[-1], 0))[()]


def _outside(trace: Trace, passes: CostModel) -> float:
    """Seconds of a round outside the target's pass (median), a free drafter's look-up included."""
    nodes = max(int(r.drafted.max()) for r in trace.rounds)
    whole = [r for r in trace.rounds if int(r.drafted.max()) == nodes]  # none cut by the end
    t = float(passes.t(nodes + 1))  # on a GPU a pass has no time of its own in a round
    return max(0.0, float(np.median([r.total_s - (r.target_s or t) for r in whole])))


def _draft_step(trace: Trace, model: CostModel) -> float:
    """Seconds of a draft step (median over rounds, by the chain's length)."""
    drafts = [(r, n) for r in trace.rounds if (n := int(r.drafted.max()))]
    if not drafts:
        raise ValueError("the drafter proposed nothing in the rounds that were timed")
    steps = [(r.draft_s or r.total_s - float(model.round_s(n))) / n for r, n in drafts]
    return max(0.0, float(np.median(steps)))
