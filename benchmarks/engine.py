"""What the engine costs: against transformers, outside the forwards, and as the text grows.

    .venv/bin/python benchmarks/engine.py [--out benchmarks/engine.json]

Everything is interleaved in one process, so that drift hits all alike; ratios are medians over
pairs with their 10th and 90th percentiles. Absolute times are those of the machine named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import minispec as ms
from minispec.demo import load_prompts, machine


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    cuts = statistics.quantiles(values, n=10)
    return {
        "median": round(statistics.median(values), 3),
        "p10": round(cuts[0], 3),
        "p90": round(cuts[-1], 3),
    }


def against_transformers(target: ms.LanguageModel, repeats: int, num: int) -> dict[str, object]:
    """Greedy text of ``num`` tokens, whole call, by us and by transformers.generate, in turn."""
    ids = target.encode([{"role": "user", "content": "Tell me a story about the sea."}])
    prompt = torch.tensor([ids])
    ratios, same = [], True
    for turn in range(repeats + 1):
        began = time.perf_counter()
        ours = ms.generate(target, [ids], max_new_tokens=num, eos=())
        middle = time.perf_counter()
        theirs = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num,
            min_new_tokens=num,
            do_sample=False,
        )
        ended = time.perf_counter()
        same &= ours.tokens[0].tolist() == theirs[0, len(ids) :].tolist()
        if turn:  # the first turn warms up
            ratios.append((ended - middle) / (middle - began))
    return {"transformers time / ours": spread(ratios), "same tokens": same}


def outside_forwards(target: ms.LanguageModel, num: int) -> dict[str, float]:
    """Share of a round's time that is neither the target's pass nor the drafter's forwards."""
    prompts = [p.chat() for p in load_prompts("dev", "summarisation")[:2]]
    drafters = {
        "plain": None,
        "prompt lookup": ms.PromptLookup(8),
        "oracle, 8 tokens": ms.Oracle(0.8, 8),
    }
    settings = {
        "T 0": ms.Sampling(),
        "T 1": ms.Sampling(1.0),
        "T .7, top-p .9": ms.Sampling(0.7, top_p=0.9),
    }
    found = {}
    for name, drafter in drafters.items():
        for setting, sampling in settings.items():
            if name.startswith("oracle") and setting != "T 0":
                continue  # above 0 the oracle drafts with the target itself
            traces = [
                ms.generate(target, p, drafter, max_new_tokens=num, sampling=sampling).trace
                for p in prompts
            ]
            total = sum(t.rounds_s for t in traces)
            target_s = sum(r.target_s for t in traces for r in t.rounds)
            # Lookup and the oracle have no forwards of their own: all of their time is outside.
            found[f"{name}, {setting}"] = round(1 - target_s / total, 4)
    return found


def growth(target: ms.LanguageModel, until: int, chunk: int = 256) -> dict[str, object]:
    """Time a token as the context grows to ``until``: a line, if a step costs what it must."""
    out = ms.generate(target, [[5, 6, 7, 8]], max_new_tokens=until - 4, eos=())
    steps = [r.total_s for r in out.trace.rounds]
    starts = range(0, len(steps), chunk)
    means = [(i + chunk // 2, statistics.median(steps[i : i + chunk])) for i in starts]
    x, y = [m[0] for m in means], [m[1] for m in means]
    fit = statistics.linear_regression(x, y)
    explained = statistics.correlation(x, y) ** 2
    return {
        "ms a token by context": {str(a): round(1e3 * b, 2) for a, b in means},
        "ms a token at 0, and more per 1000 tokens": [
            round(1e3 * fit.intercept, 2),
            round(1e6 * fit.slope, 2),
        ],
        "r squared of a line": round(explained, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--until", type=int, default=4096)
    options = parser.parse_args()
    facts: dict[str, object] = {"machine": machine()}
    for dtype in ("bfloat16", "float32"):
        target = ms.load_target("smollm2", dtype=dtype, device="cpu")
        facts[dtype] = {
            "plain against transformers.generate": against_transformers(
                target, options.repeats, options.tokens
            ),
            "outside the target's pass": outside_forwards(target, options.tokens),
        }
        if dtype == "bfloat16":
            facts["growth, bfloat16"] = growth(target, options.until)
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
