"""What a GPU would make of it: a model of a real one's shape, with random weights, timed.

Nothing is downloaded. The weights are made on the device, passes are timed as a user launches them
and as CUDA graphs (see graphs.py), and the Oracle decodes at several α, to set speed-ups beside
what the pass times predict. What a pass costs does not depend on what the weights say.

    minispec bench --synthetic llama-8b --json llama-8b.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text
from scipy.stats import bootstrap
from torch import Tensor

from .cache import KVCache
from .costs import (
    KNOWN_GPUS,
    CostModel,
    Roofline,
    _seconds,
    expected_tokens,
    measure_roofline,
    median_interval,
    pass_cost,
)
from .demo import machine
from .drafters import Oracle
from .generate import generate
from .graphs import GraphedTarget
from .models import LanguageModel, new_llama
from .trace import Round, Trace
from .tree import TokenTree

# LlamaConfig's arguments, as published with Llama-3.1-8B, Llama-3.2-1B and SmolLM2-135M. The Llamas
# also stretch their RoPE, once and for all when they are made: a pass costs the same without.
LLAMA3: dict[str, Any] = dict(
    vocab_size=128256,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA3
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
    "llama-1b": LLAMA3
    | dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    ),
    "toy": dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.15,  # so few and narrow layers would else hardly count
    ),
}
ROOM = 6e9  # bytes beside the weights: caches, logits of 4096 tokens, the graphs' own memory
AGREE = 0.05  # relative difference of two 16-bit logit vectors that still means "the same"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    contexts: tuple[int, int] = (512, 4096)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)  # a pass, at batch 1
    far_tokens: tuple[int, ...] = (1, 8, 64)  # the same in the longer context
    tree: int = 64  # tokens of the tree that is timed beside the chain, root included
    batches: tuple[int, ...] = (8, 32)
    batch_tokens: tuple[int, ...] = (1, 2, 4, 8, 16)  # a row
    repeats: int = 25
    alphas: tuple[float, ...] = (0.6, 0.8, 0.9)
    drafted: tuple[int, ...] = (4, 8)  # K
    new_tokens: int = 256
    seeds: int = 3
    megabytes: int = 2048  # that the bandwidth is measured with
    size: int = 8192  # of the matrices that the peak is measured with


TOY = Plan(
    contexts=(24, 40),
    tokens=(1, 2, 4, 8),
    far_tokens=(1, 4),
    tree=8,
    batches=(2,),
    batch_tokens=(1, 2),
    repeats=2,
    alphas=(0.6, 0.9),
    drafted=(4,),
    new_tokens=24,
    seeds=2,
    megabytes=4,
    size=64,
)


class Inputs(NamedTuple):
    """What a pass takes: see ``LanguageModel.forward``. A chain needs its tokens alone."""

    tokens: Tensor
    depth: Tensor | None = None
    visible: Tensor | None = None


class Clock:
    """Seconds left of a budget."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end


# The model.


def num_weights(shape: dict[str, Any]) -> int:
    """The parameters of a Llama of this shape, without building it."""
    wide, inner, vocab = (shape[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = wide * (2 * queries + 2 * keys) + 3 * wide * inner + 2 * wide
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return tables * vocab * wide + shape["num_hidden_layers"] * layer + wide


def random_target(
    name: str, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> LanguageModel:
    """A random Llama of a named shape, whose greedy text no rounding can turn.

    Random logits nearly tie, so in 16 bits a pass over one token and a pass over nine would often
    disagree, and the Oracle's α would not be the one asked for. Here large embeddings make up a
    good part of the last hidden state, and the head's row of token t + 1 (in a tied model, of t) is
    the embedding of t: the greedy text counts, by a wide margin, whatever the layers add.
    """
    target = LanguageModel(new_llama(seed, dtype, device, **SHAPES[name]), trial=False)
    embedding = target.model.get_input_embeddings().weight
    head = target.model.get_output_embeddings().weight
    chance = torch.Generator(target.device).manual_seed(seed)
    with torch.no_grad():
        embedding.normal_(std=4, generator=chance)
        if head is not embedding:
            head.copy_(embedding.roll(1, 0))
    return target


def check(name: str, device: torch.device | str) -> torch.device:
    """Where to run. Raises ValueError, before anything is built, if it cannot be done here."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: there are {', '.join(SHAPES)}")
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() or name != "toy" else "cpu"
    place = torch.device(device)
    if place.type != "cuda":
        if name != "toy":
            raise ValueError(f"{name} is for a CUDA device, not {place}; only toy runs anywhere")
        return place
    if not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here, and {name} is to be timed on one")
    free, needed = torch.cuda.mem_get_info(place)[0], 2 * num_weights(SHAPES[name]) + ROOM
    if free < needed:
        raise ValueError(
            f"{name} needs {needed / 1e9:.0f} GB of the device's memory; {free / 1e9:.0f} are free"
        )
    return place


# The measurement.


def run_synthetic(
    name: str,
    device: torch.device | str = "cuda",
    *,
    seconds: float = 420.0,
    plan: Plan | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> SyntheticResult:
    """Builds the named model in bf16 (toy: fp32) and measures what ``plan`` says.

    seconds: when so many have passed no new part is begun, and the part under way ends after
    fewer repeats; what was left out is in ``skipped``, what broke in ``failed``. Raises ValueError
    for an unknown name, a machine without CUDA (toy runs without), or too little memory.
    """
    began, clock, place = time.monotonic(), Clock(seconds), check(name, device)
    plan = plan or (TOY if name == "toy" else Plan())
    dtype = torch.float32 if name == "toy" else torch.bfloat16
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        progress(f"{name}: random weights on {place}")
        target = random_target(name, dtype, place, seed)
        progress("bandwidth and peak")
        roofline = measure_roofline(dtype, place, megabytes=plan.megabytes, size=plan.size)
        run = _Run(target, plan, clock, seed, SyntheticResult(name, roofline))
        for title, part in run.parts():
            if clock.over:
                run.result.skipped.append(title)
                continue
            progress(title)
            try:
                part()
            except (RuntimeError, FloatingPointError) as error:  # out of memory, a failed capture
                run.result.failed.append(f"{title}: {_first_line(error)}")
        run.result.facts = _facts(target, place, plan, time.monotonic() - began)
    return run.result


class _Run:
    """The parts of one measurement, in order of importance."""

    def __init__(
        self, target: LanguageModel, plan: Plan, clock: Clock, seed: int, result: SyntheticResult
    ) -> None:
        self.plan, self.clock, self.seed, self.result = plan, clock, seed, result
        widest = max(*plan.tokens, plan.tree)
        self.target = target
        self.engines = {"graph": GraphedTarget(target, widest), "eager": target}
        self.chance = torch.Generator(target.device).manual_seed(seed)

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        near, far = self.plan.contexts
        many, rounds = self.plan.tokens, [k + 1 for k in self.plan.drafted]
        yield self._passes(1, near, sorted({*many, *rounds}), self.plan.tree)
        yield "the oracle", self.race
        yield self._passes(1, far, self.plan.far_tokens)
        for batch in self.plan.batches:
            yield self._passes(batch, near, self.plan.batch_tokens)

    def _passes(
        self, batch: int, context: int, tokens: Sequence[int], tree: int = 0
    ) -> tuple[str, Callable[[], None]]:
        title = f"passes at batch {batch}, context {context}"
        return title, lambda: self.time_passes(batch, context, tokens, tree)

    def ids(self, batch: int, num: int) -> Tensor:
        """[batch, num] random tokens."""
        size, device = (batch, num), self.chance.device
        return torch.randint(self.target.vocab_size, size, generator=self.chance, device=device)

    @torch.inference_mode()
    def time_passes(self, batch: int, context: int, tokens: Sequence[int], tree: int) -> None:
        """Times passes over ``tokens`` a row behind ``context`` others, both ways, interleaved."""
        shapes = [(n, "chain") for n in tokens] + ([(tree, "tree")] if tree else [])
        fast = self.engines[self.fast]
        cache = fast.new_cache(batch, context + max(n for n, _ in shapes))
        for buffer in (b for pair in cache.buffers for b in pair):
            buffer.normal_(generator=self.chance)  # what it holds does not change the time
        cache.set_lengths(torch.full((batch,), context))
        inputs = {s: self._inputs(batch, *s) for s in shapes}
        errors = {s: self._difference(cache, inputs[s]) for s in shapes}  # and the captures
        points = [(engine, s) for engine in self.engines for s in shapes]
        found: dict[Any, list[float]] = {point: [] for point in points}
        order = np.random.default_rng(self.seed)
        for turn in range(self.plan.repeats + 1):
            if self.clock.over and turn > 3:
                break
            for i in order.permutation(len(points)):
                engine, s = points[i]
                run = partial(self.engines[engine].forward, cache, *inputs[s])
                took = _seconds(run, self.chance.device)
                if turn:  # the first warms up
                    found[points[i]].append(took)
        for engine, (n, kind) in points:
            cost = pass_cost(self.target, n, context, batch)
            middle, low, high = median_interval(found[engine, (n, kind)], self.seed)
            line = dict(engine=engine, batch=batch, context=context, tokens=n, kind=kind)
            line |= dict(seconds=middle, low=low, high=high, bytes=cost.bytes, flops=cost.flops)
            line |= dict(error=errors[n, kind], repeats=len(found[engine, (n, kind)]))
            self.result.passes.append(line)

    def _inputs(self, batch: int, num: int, kind: str) -> Inputs:
        """On the device: a chain, or the tree in which every token has two children."""
        ids = self.ids(batch, num)
        if kind == "chain":
            return Inputs(ids)
        parents = (torch.arange(num - 1, device=ids.device) - 2).div(2, rounding_mode="floor")
        tree = TokenTree(ids[:, 1:], parents.clamp(min=-1).expand(batch, -1))
        return Inputs(ids, *tree.with_root())

    def _difference(self, cache: KVCache, given: Inputs) -> float:
        """Relative difference of the logits: the fixed shapes against the usual pass.

        Where the capture fails, all that follows is measured without graphs.
        """
        eager = self.target.forward(cache, *given).logits.float()
        if self.fast == "eager":
            return 0.0
        try:
            graph = self.engines["graph"].forward(cache, *given).logits.float()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            del self.engines["graph"]
            self.result.failed.append(f"capture: {_first_line(error)}")
            return 0.0
        return float((graph - eager).norm() / eager.norm())

    @property
    def fast(self) -> str:
        """The best engine that works."""
        return next(iter(self.engines))

    # Decoding.

    def race(self) -> None:
        """Plain decoding and the Oracle at every α and K, in turn; a seed is a turn."""
        prompt = self.ids(1, self.plan.contexts[0]).cpu()
        grid = [(a, k) for k in self.plan.drafted for a in self.plan.alphas]
        ways = [(engine, 0.0, 0) for engine in self.engines]
        ways += [(self.fast, a, k) for a, k in grid]
        rounds: dict[tuple[str, float, int], list[Round]] = {way: [] for way in ways}
        for seed in range(self.plan.seeds):
            turn = {}
            for way in ways:
                engine, alpha, k = way
                if self.clock.over and seed:
                    break  # and what this turn has so far is left out: turns are whole
                trace = generate(
                    self.engines[engine],
                    prompt,
                    Oracle(alpha, k, seed) if k else None,
                    max_new_tokens=self.plan.new_tokens,
                    eos=(),
                ).trace
                # The first round captures its graph, the last is cut short.
                turn[way] = trace.rounds[1:-1]
            if len(turn) == len(ways):
                for way, more in turn.items():
                    rounds[way] += more
        plain = Trace(rounds[self.fast, 0.0, 0])
        self.result.race = [self._line(*way, Trace(rounds[way]), plain) for way in ways]

    def _line(self, engine: str, alpha: float, k: int, trace: Trace, plain: Trace) -> dict:
        """One way to decode: what it did, what it gained over plain, what was predicted."""
        speedup, low, high = ratio(trace, plain)
        plain_round = float(np.median([r.total_s for r in plain.rounds]))
        line = dict(engine=engine, alpha=alpha, k=k, alpha_measured=trace.alpha, tau=trace.tau)
        line |= dict(tau_predicted=float(expected_tokens(alpha, k)), rounds=len(trace.rounds))
        line |= dict(round_s=float(np.median([r.total_s for r in trace.rounds])))
        line |= dict(speedup=speedup, low=low, high=high)
        times = self.result.pass_times(1, self.plan.contexts[0], engine)
        if engine == self.fast and times:
            bare = CostModel(list(times), list(times.values()))
            # The loop's own time in a plain round, as if a round with drafts took no more.
            rest = max(0.0, plain_round - bare.plain_s)
            whole = CostModel(bare.tokens, bare.seconds, rest_s=rest)
            line |= dict(pass_s=float(bare.t(k + 1)))
            line |= dict(predicted=float(bare.chain_speedup(alpha, k)))
            line |= dict(predicted_with_loop=float(whole.chain_speedup(alpha, k)))
        return line


def ratio(trace: Trace, plain: Trace, seed: int = 0) -> tuple[float, float, float]:
    """Tokens per second of one row's rounds against plain's, with a 95 % bootstrap interval."""

    def rate(tokens: Any, seconds: Any, axis: int = -1) -> Any:
        return tokens.sum(axis) / seconds.sum(axis)

    def facts(t: Trace) -> tuple[np.ndarray, np.ndarray]:
        emitted = np.array([float(r.emitted.sum()) for r in t.rounds])
        return emitted, np.array([r.total_s for r in t.rounds])

    mine, base = facts(trace), rate(*facts(plain))
    if len(trace.rounds) < 2:
        return (float(rate(*mine) / base),) * 3
    # Rounds are drawn with their tokens and seconds together: chance in τ is most of the spread.
    drawn = bootstrap(
        mine, rate, n_resamples=999, paired=True, method="percentile", random_state=seed
    ).confidence_interval
    return float(rate(*mine) / base), float(drawn.low / base), float(drawn.high / base)


def known_bandwidth(name: str) -> float | None:
    """Bytes per second on the maker's sheet, by the name that CUDA gives a device."""
    endings = {"H100 SXM": "H100 80GB HBM3", "A100-80 SXM": "A100-SXM4-80GB"}
    for known, roofline in KNOWN_GPUS.items():
        if name.endswith(endings.get(known, known)):
            return roofline.bandwidth
    return None


def _facts(target: LanguageModel, place: torch.device, plan: Plan, took: float) -> dict[str, Any]:
    """What a kept result must say about where it comes from."""
    on_cuda = place.type == "cuda"
    name = torch.cuda.get_device_name(place) if on_cuda else "cpu"
    return {
        "machine": machine(),
        "device": name,
        "versions": {n: version(n) for n in ("minispec", "torch", "transformers")},
        "cuda": torch.version.cuda,
        "captured": on_cuda,  # else the fixed shapes ran without a graph
        "known_bandwidth": known_bandwidth(name),
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": sum(p.numel() for p in target.model.parameters()),
        "weight_bytes": sum(p.nbytes for p in target.model.parameters()),
        "peak_memory": torch.cuda.max_memory_allocated(place) if on_cuda else None,
        "took_s": took,
        "plan": asdict(plan),
    }


# The result.


@dataclass
class SyntheticResult:
    """passes and race: a dict a line; skipped and failed: the parts that are missing, and why."""

    name: str
    roofline: Roofline
    passes: list[dict[str, Any]] = field(default_factory=list)
    race: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def pass_times(self, batch: int, context: int, engine: str = "graph") -> dict[int, float]:
        """Seconds of a pass over a chain, by its number of tokens."""
        where = (batch, context, engine, "chain")
        return {
            line["tokens"]: line["seconds"]
            for line in self.passes
            if tuple(line[k] for k in ("batch", "context", "engine", "kind")) == where
        }

    def bandwidth_share(self, line: dict[str, Any]) -> float:
        """Of a pass: bytes that it must read / (its time x the bandwidth measured here)."""
        return line["bytes"] / line["seconds"] / self.roofline.bandwidth

    def to_json(self, path: str | Path) -> Path:
        """Writes everything measured."""
        path = Path(path)
        passes = [line | {"bandwidth_share": self.bandwidth_share(line)} for line in self.passes]
        tables = {"passes": pd.DataFrame(passes), "race": pd.DataFrame(self.race)}
        out: dict[str, Any] = {"synthetic": self.name, **self.facts}
        out |= {"roofline": asdict(self.roofline), "skipped": self.skipped, "failed": self.failed}
        out |= {k: json.loads(t.to_json(orient="records")) for k, t in tables.items()}  # no NaN
        path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        return path

    def __rich__(self) -> Group:
        tables = [self._pass_table(*where) for where in self._places()]
        if self.race:
            tables.insert(1, self._race_table())
        return Group(*tables, Text(self.notes(), "dim"))

    def _places(self) -> list[tuple[int, int]]:
        """The (batch, context) that were timed, in order."""
        return list(dict.fromkeys((line["batch"], line["context"]) for line in self.passes))

    def _pass_table(self, batch: int, context: int) -> Table:
        here = [p for p in self.passes if (p["batch"], p["context"]) == (batch, context)]
        ways = {e: {(p["tokens"], p["kind"]): p for p in here if p["engine"] == e} for e in ENGINES}
        title = f"{self.name}: a pass, batch {batch}, context {context}"
        graph = "graph" if self.facts["captured"] else "fixed"
        heads = ["tokens", f"{graph} ms", "x", "of bandwidth", "eager ms", "x", "of bandwidth"]
        out = _table(title, heads)
        for shape in dict.fromkeys((p["tokens"], p["kind"]) for p in here):
            cells = [f"{shape[0]}{' tree' if shape[1] == 'tree' else ''}"]
            for lines in ways.values():
                if shape not in lines:
                    cells += ["-"] * 3
                    continue
                line, one = lines[shape], next(iter(lines.values()))
                cells.append(f"{line['seconds'] * 1e3:.2f}")
                cells.append(f"{line['seconds'] / one['seconds']:.2f}")
                cells.append(f"{self.bandwidth_share(line):.0%}")
            out.add_row(*cells)
        return out

    def _race_table(self) -> Table:
        heads = ["", "α", "τ", "round ms", "speed-up", "95 %", "predicted", "with loop", "τ"]
        out = _table(f"{self.name}: decoding, batch 1, against plain decoding", heads)
        for line in self.race:
            name = (
                f"α {line['alpha']:g}, K {line['k']}" if line["k"] else f"plain, {line['engine']}"
            )
            out.add_row(
                name,
                _number(line["alpha_measured"]),
                _number(line["tau"]),
                _number(line["round_s"] * 1e3),
                f"{line['speedup']:.2f}x",
                f"{line['low']:.2f}-{line['high']:.2f}",
                _number(line.get("predicted")),
                _number(line.get("predicted_with_loop")),
                _number(line["tau_predicted"]),
            )
        return out

    def notes(self) -> str:
        """What a reader of the tables must know."""
        f, r = self.facts, self.roofline
        known = f["known_bandwidth"]
        sheet = f" (its sheet says {known / 1e9:.0f})" if known else ""
        lines = [
            f"{f['device']}, {f['dtype']}, {f['weight_bytes'] / 1e9:.2f} GB of random weights; "
            f"measured: {r.bandwidth / 1e9:.0f} GB/s{sheet}, {r.peak / 1e12:.3g} TFLOP/s. "
            f"{f['took_s']:.0f} s.",
            "x: times the pass over one token. Of bandwidth: weights and cache that the pass must "
            "read, by its time, of the bandwidth measured. Predicted, and the last τ: from the α "
            "asked for and the pass times alone; with loop: and a plain round's time outside its "
            "pass.",
        ]
        worst = max((p["error"] for p in self.passes), default=0.0)
        if not worst < AGREE:
            lines.append(f"WRONG: graph and eager logits differ by {worst:.2g} of their size.")
        if not f["captured"]:
            lines.append("No CUDA here: fixed shapes ran without a graph.")
        lines += [f"Left out for lack of time: {part}." for part in self.skipped]
        lines += [f"Failed: {part}" for part in self.failed]
        return "\n".join(lines)


ENGINES = ("graph", "eager")


def _table(title: str, heads: Sequence[str]) -> Table:
    out = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left", padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        out.add_column(head, justify="right" if place else "left", no_wrap=True)
    return out


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.2f}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
