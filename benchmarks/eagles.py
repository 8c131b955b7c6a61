"""From EAGLE-1 to EAGLE-3 one change at a time, and what more data does, on heads trained alike.

    .venv/bin/python benchmarks/eagles.py [--out benchmarks/eagles.json] [--features DIR]

Every head learns for the same updates from the same rows over the same draft vocabulary; it is
judged by the length of a greedy chain (tau) and by n-alpha on held-out answers of the target: the
share of right tokens at each place of the draft among the drafts that were right so far. The
heads that are shipped learned 13 times as long or longer.

What --out holds already is kept: a run that was stopped goes on. --features: a folder for the
target's features (7.5 GB), which makes it some times as fast.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import minispec as ms
from minispec.checkpoints import default_taps
from minispec.demo import machine
from minispec.training.data import TextData
from minispec.training.eagle import EagleLearner
from minispec.training.fit import Recipe, fit
from minispec.training.run import data_of, eagle_learner, load_corpus

RECIPE = Recipe(steps=300, rows=4, lr=2e-3, precision="bf16", validate_every=75)
VOCAB = 4864
STEPS = 3  # of training-time test
# Each rung: version, unrolled steps, the feature's loss, one tap in the place of three.
LADDER: dict[str, tuple[int, int, bool, bool]] = {
    "EAGLE-1": (1, 1, True, False),
    "no feature loss": (1, 1, False, False),
    "+ training-time test": (1, STEPS, False, False),
    "EAGLE-3's layer, one tap": (3, STEPS, False, True),
    "+ fused taps: EAGLE-3": (3, STEPS, False, False),
    "EAGLE-3 without training-time test": (3, 1, False, False),
}
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)  # of the corpus, for EAGLE-3 without training-time test


def measure(learner: EagleLearner, data: tuple[TextData, TextData], rows: int | None) -> Any:
    """Trains and judges one head; rows: the first so many of the packed rows alone."""
    learn = data[0] if rows is None else First(data[0], rows)
    with tempfile.TemporaryDirectory() as work:
        log = fit(learner, learn, RECIPE, Path(work), validation=data[1])  # type: ignore[arg-type]
    curve = log[log["tau"].notna()]
    last = curve.iloc[-1]
    names = [n for n in log.columns if n.startswith("alpha_") and last[n] == last[n]]
    return {
        "tau": round(float(last["tau"]), 4),
        "n-alpha": [round(float(last[n]), 4) for n in names],
        "step": [int(s) + 1 for s in curve["step"]],
        "alpha_1": [round(float(a), 4) for a in curve["alpha_1"]],
    }


class First:
    """The first rows of a ``TextData``."""

    def __init__(self, data: TextData, rows: int) -> None:
        self.data, self.rows = data, rows
        self.batch = data.batch

    def __len__(self) -> int:
        return self.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = ms.load_target("smollm2", dtype="bfloat16")
    texts, named = load_corpus()
    taps = default_taps(target.num_layers)
    data = data_of(target, texts, taps=taps, features=options.features)
    facts = {"machine": machine(), "corpus": named, "recipe": vars(RECIPE), "vocabulary": VOCAB}
    found: dict[str, Any] = {"ladder": {}, "data": {}}
    if options.out is not None and options.out.exists():
        found |= json.loads(options.out.read_text())

    def keep(part: str, name: str, result: dict[str, Any]) -> None:
        found[part][name] = result
        print(part, name, result, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**found, "facts": facts}, indent=1) + "\n")

    for name, (version, steps, feature_loss, one) in LADDER.items():
        if name in found["ladder"]:
            continue
        torch.manual_seed(0)
        head = eagle_learner(
            target, texts, version=version, vocab=VOCAB, taps=taps[-1:] if one else taps
        ).head
        learner = EagleLearner(head, target, steps, feature_loss)
        keep("ladder", name, measure(learner, data, None))
    for share in SHARES:
        if f"{share:g}" in found["data"]:
            continue
        rows = round(share * len(data[0]))
        if share == 1:
            result = found["ladder"]["EAGLE-3 without training-time test"]
        else:
            torch.manual_seed(0)
            learner = eagle_learner(target, texts, version=3, vocab=VOCAB, taps=taps, steps=1)
            result = measure(learner, data, rows)
        keep("data", f"{share:g}", {**result, "tokens": round(share * data[0].tokens)})


if __name__ == "__main__":
    main()
