"""EAGLE-1's static tree against EAGLE-2's, which grows, with the same number of nodes.

    .venv/bin/python benchmarks/trees.py [--out benchmarks/trees.json] [--threads N]

The shipped EAGLE heads, all `dev` prompts, greedy in float32, 20 drafted nodes a round for both
trees and as many levels. Static: the paths that were most often right on held-out answers (the
card's counts). Growing: the most confident nodes. Both write plain decoding's text, so that tau
alone tells them apart: the share of rounds that is saved, with a 95 % interval over the prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from common import Result, options

import minispec as ms
from minispec import heads, shapes
from minispec.bench_report import ratio
from minispec.demo import machine
from minispec.prompts import load_prompts

NODES, TOP_K, LEVELS = 20, 6, 5
NEW = 32  # tokens a prompt
NAMES = ("eagle", "eagle-3")


def trees(name: str) -> dict[str, ms.Shape | ms.Grow]:
    """The two rivals for a shipped head."""
    paths = [p for p in heads.path_values(heads.card(name)) if len(p) <= LEVELS]
    return {"static": shapes.from_paths(paths[:NODES]), "growing": ms.Grow(NODES, TOP_K, LEVELS)}


def main() -> None:
    given = options(str(__doc__), features=False)
    target = ms.load_target("smollm2", dtype="float32", device="cpu")
    prompts = [p.ids(target) for p in load_prompts("dev")]
    plain = [ms.generate(target, [p], max_new_tokens=NEW).tokens[0] for p in prompts]
    facts = {
        "machine": machine(),
        "setting": {"nodes": NODES, "top_k": TOP_K, "levels": LEVELS, "new tokens": NEW},
        "prompts": len(prompts),
    }
    result = Result(given.out, facts, NAMES)
    for name in NAMES:
        found: dict[str, Any] = result.parts[name]
        for arm, tree in trees(name).items():
            if arm in found:
                continue
            drafter = heads.load_head(name, target, tree)
            emitted, rounds = [], []
            for prompt, text in zip(prompts, plain, strict=True):
                out = ms.generate(target, [prompt], drafter, max_new_tokens=NEW)
                assert torch.equal(out.tokens[0], text), "not plain decoding's text"
                emitted.append(sum(int(r.emitted) for r in out.trace.rounds))
                rounds.append(len(out.trace.rounds))
            tau = round(sum(emitted) / sum(rounds), 4)
            result.keep(name, arm, {"tau": tau, "emitted": emitted, "rounds": rounds})
        static, growing = found["static"], found["growing"]
        gain = ratio(growing["rounds"], growing["emitted"], static["rounds"], static["emitted"])
        result.keep(name, "growing / static", [round(g, 4) for g in gain])


if __name__ == "__main__":
    main()
