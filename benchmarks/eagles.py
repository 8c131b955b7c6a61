"""From EAGLE-1 to EAGLE-3 one change at a time, and what more data does, on heads trained alike.

    .venv/bin/python benchmarks/eagles.py [--out benchmarks/eagles.json] [--features DIR]

Every head learns for the same updates over the same draft vocabulary. It is judged on held-out
answers of the target, by the length of a greedy chain (tau) and by n-alpha: the share of right
tokens at each place of the draft among the drafts that were right so far. The heads that are
shipped learned 13 times as long or longer.

What --out holds already is kept: a run that was stopped goes on. --features: a folder for the
target's features (7.5 GB), which makes it some times as fast. Meant for a machine that computes in
bfloat16: an hour on one core there, most of a day elsewhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Result, options

import minispec as ms
from minispec.checkpoints import default_taps
from minispec.demo import machine
from minispec.training.data import TextData
from minispec.training.eagle import EagleLearner
from minispec.training.fit import Recipe, fit
from minispec.training.run import data_of, eagle_learner, load_corpus

RECIPE = Recipe(steps=300, rows=4, lr=2e-3, precision="auto")
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
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)  # of the corpus
# Neither with training-time test: it is the first place that is compared.
SCALED = {"EAGLE-1": "EAGLE-1", "EAGLE-3": "EAGLE-3 without training-time test"}


class First:
    """The first rows of a ``TextData``."""

    def __init__(self, data: TextData, rows: int) -> None:
        self.data, self.rows = data, rows
        self.batch = data.batch

    def __len__(self) -> int:
        return self.rows


def measure(learner: EagleLearner, data: tuple[TextData, TextData], rows: int) -> dict[str, Any]:
    """Trains on the first ``rows`` packed rows and judges."""
    with tempfile.TemporaryDirectory() as work:
        learn: Any = First(data[0], rows)
        log = fit(learner, learn, RECIPE, Path(work), validation=data[1])
    last = log.iloc[-1]
    names = [n for n in log.columns if n.startswith("alpha_") and last[n] == last[n]]  # no nan
    return {
        "tau": round(float(last["tau"]), 4),
        "n-alpha": [round(float(last[name]), 4) for name in names],
    }


def main() -> None:
    given = options(str(__doc__))
    target = ms.load_target("smollm2")
    texts, named = load_corpus()
    taps = default_taps(target.num_layers)
    data = data_of(target, texts, taps=taps, features=given.features)
    facts = {
        "machine": machine(),
        "corpus": named,
        "recipe": vars(RECIPE) | {"unrolled": STEPS, "vocabulary": VOCAB},
        "tokens": data[0].tokens,
    }
    result = Result(given.out, facts, ("ladder", *SCALED))

    def rung(name: str) -> EagleLearner:
        version, steps, feature_loss, one = LADDER[name]
        torch.manual_seed(0)
        chosen = taps[-1:] if one else taps
        head = eagle_learner(target, texts, version=version, vocab=VOCAB, taps=chosen).head
        return EagleLearner(head, target, steps, feature_loss)

    for name in LADDER:
        if name not in result.parts["ladder"]:
            result.keep("ladder", name, measure(rung(name), data, len(data[0])))
    for part, name in SCALED.items():
        for share in SHARES:
            if f"{share:g}" in result.parts[part]:
                continue
            rows = round(share * len(data[0]))
            whole = share == 1
            found = result.parts["ladder"][name] if whole else measure(rung(name), data, rows)
            result.keep(part, f"{share:g}", {**found, "tokens": round(share * data[0].tokens)})


if __name__ == "__main__":
    main()
