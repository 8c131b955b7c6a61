"""What passes cost on this machine, and whether the cost model predicts measured speed-ups.

    .venv/bin/python benchmarks/costs.py [--out benchmarks/costs.json]

The Oracle makes any acceptance probability α on demand. Plain decoding and the Oracle at every α
and K take turns in one process; a point's speed-up is plain seconds a token / its seconds a token,
over rounds with room for a whole draft, the prompt's pass left out. The predictions know t(n), the
time outside the passes, and α; none of the runs that they are compared with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from torch import Tensor

import minispec as ms
from minispec.costs import (
    CostModel,
    expected_tokens,
    kv_bytes_per_token,
    leviathan,
    measure_roofline,
    pass_cost,
    time_pass,
)
from minispec.demo import load_prompts, machine
from minispec.drafters import Rows

ALPHAS, LENGTHS = (0.3, 0.5, 0.7, 0.9), (1, 2, 4, 8, 16)
PROMPT = "conversation-01"


class Told(ms.Oracle):
    """An Oracle that remembers the target's answers, so that it asks once and not in every run."""

    known: list[Tensor] = []  # noqa: RUF012  shared on purpose

    def _continuation(self, rows: Rows) -> Tensor:
        length, end = int(rows.host[0]), int(rows.limit[0])
        for text in self.known:
            if len(text) >= end and torch.equal(text[:length], rows.tokens[0, :length]):
                answer = text.new_zeros(1, max(len(text), rows.tokens.shape[1] + self.num_tokens))
                answer[0, : len(text)] = text
                return answer
        answer = super()._continuation(rows)
        self.known.append(answer[0, :end].clone())
        return answer


def ask_beforehand(target: ms.LanguageModel, prompt: list[int], num: int) -> None:
    """The target's own text, far enough for the longest run."""
    out = ms.generate(target, [prompt], max_new_tokens=num, eos=())
    Told.known.append(torch.cat([torch.tensor(prompt), out.tokens[0]]))


def run_grid(
    target: ms.LanguageModel, prompt: list[int], repeats: int, rounds: int
) -> pd.DataFrame:
    """A line a round: alpha, k, repeat, emitted, tried, accepted, and its time in plain steps."""
    lines = []
    points = [(a, k) for a in ALPHAS for k in LENGTHS]
    order = np.random.default_rng(0)
    for drafter in (None, Told(0.9, 16)):  # the first passes of a process are slow
        ms.generate(target, [prompt], drafter, max_new_tokens=16, eos=())
    for repeat in range(repeats):
        plain = ms.generate(target, [prompt], max_new_tokens=2 * rounds, eos=()).trace
        step = plain.rounds_s / len(plain.rounds)  # of this repeat: the pair of what follows
        for i in order.permutation(len(points)):
            alpha, k = points[i]
            num = int(rounds * expected_tokens(alpha, k)) + k + 1
            drafter = Told(alpha, k, seed=1000 * repeat + int(i))
            frame = ms.generate(
                target, [prompt], drafter, max_new_tokens=num, eos=()
            ).trace.to_frame()
            whole = frame[frame["drafted"] == k]  # the last rounds have no room for a whole draft
            lines += [
                (alpha, k, repeat, r.emitted, r.tried, r.accepted, r.total_s / step)
                for r in whole.itertuples()
            ]
    columns = ["alpha", "k", "repeat", "emitted", "tried", "accepted", "steps"]
    return pd.DataFrame(lines, columns=columns)


def compare(grid: pd.DataFrame, model: CostModel) -> pd.DataFrame:
    """Point by point: measured with its interval, and three predictions."""
    lines = []
    for (alpha, k), rounds in grid.groupby(["alpha", "k"]):
        emitted, steps = rounds["emitted"].to_numpy(), rounds["steps"].to_numpy()
        drawn = bootstrap(
            (emitted, steps),
            lambda e, s, axis=-1: e.sum(axis) / s.sum(axis),
            paired=True,
            n_resamples=999,
            method="percentile",
            random_state=0,
        ).confidence_interval
        measured_alpha = rounds["accepted"].sum() / rounds["tried"].sum()
        lines.append(
            {
                "alpha": alpha,
                "k": k,
                "rounds": len(rounds),
                "measured": emitted.sum() / steps.sum(),
                "low": drawn.low,
                "high": drawn.high,
                "predicted": model.chain_speedup(alpha, k),
                "measured alpha": measured_alpha,
                "predicted by measured alpha": model.chain_speedup(measured_alpha, k),
                "predicted by measured tau": emitted.mean() / model.overhead(k),
                "Thm 3.8, c = 0": leviathan(alpha, k),
                "round / plain step, measured": steps.mean(),
                "round / plain step, predicted": model.overhead(k),
                "slowest round": steps.max(),
            }
        )
    return pd.DataFrame(lines)


def errors(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Relative errors |predicted / measured - 1| over the grid: median and largest."""
    names = [
        "predicted",
        "predicted by measured alpha",
        "predicted by measured tau",
        "Thm 3.8, c = 0",
    ]
    off = {name: (table[name] / table["measured"] - 1).abs() for name in names}
    inside = table["predicted"].between(table["low"], table["high"]).mean()
    found = {
        k: {"median": round(v.median(), 4), "largest": round(v.max(), 4)} for k, v in off.items()
    }
    return found | {"predicted lies in the interval of the measured": {"share": round(inside, 3)}}


def rounded(table: pd.DataFrame, digits: int = 4) -> list[dict[str, object]]:
    return json.loads(table.round(digits).to_json(orient="records"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    target = ms.load_target("smollm2", dtype="bfloat16", device="cpu")
    prompt = target.encode(next(p for p in load_prompts() if p.id == PROMPT).chat())
    facts: dict[str, object] = {"machine": machine(), "model": "SmolLM2-135M-Instruct, bfloat16"}

    facts["roofline"] = {}
    for dtype in (torch.bfloat16, torch.float32):
        roof = measure_roofline(dtype)
        facts["roofline"][roof.dtype] = {  # type: ignore[index]
            "bandwidth, GB/s": round(roof.bandwidth / 1e9, 1),
            "peak, GFLOP/s": round(roof.peak / 1e9, 1),
            "ridge, FLOP/byte": round(roof.ridge, 1),
            "all rates, G/s": {k: round(v / 1e9, 1) for k, v in roof.rates.items()},
        }
    one = pass_cost(target, 1, 256)
    facts["a pass over one token, context 256"] = {
        "bytes": one.bytes,
        "flops": one.flops,
        "KV cache, bytes a token": kv_bytes_per_token(target),
    }
    context = len(prompt) + 2 * options.rounds
    model = CostModel.measure(target, context=context, repeats=9)
    frame = time_pass(target, (1, 2, 4, 8, 16, 32, 64, 128), (1,), (256,), options.repeats + 2)
    rows = time_pass(target, (1, 2, 4, 8), (4, 16), (256,), options.repeats)
    long = time_pass(target, (1, 8), (1,), (1024, 4096), options.repeats)
    facts["passes"] = rounded(pd.concat([frame, rows, long]), 6)

    ask_beforehand(target, prompt, int(options.rounds * expected_tokens(0.9, 16)) + 40)
    table = compare(run_grid(target, prompt, options.repeats, options.rounds), model)
    facts["cost model"] = {
        "context": context,
        "tokens": list(model.tokens),
        "t(n), ms": [round(1e3 * float(t), 2) for t in model.seconds],
        "rest, ms": [round(1e3 * float(r), 2) for r in np.atleast_1d(model.rest_s)],
    }
    facts["oracle"] = rounded(table)
    facts["relative errors"] = errors(table)
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    print(table.round(3).to_string())
    print(json.dumps({k: v for k, v in facts.items() if k not in ("oracle", "passes")}, indent=1))
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
