"""From EAGLE-1 to EAGLE-3 one change at a time, and what more data does, on heads trained alike.

    .venv/bin/python benchmarks/eagles.py [--out benchmarks/eagles.json] [--features DIR]

Every head learns for the same small updates over the same draft vocabulary, from a part of the
corpus. It is judged on held-out answers of the target, by the length of a greedy chain (tau) and by
n-alpha: the share of right tokens at each place of the draft among the drafts that were right so
far. The heads that are shipped learned from many times as much.

What --out holds already is kept: a run that was stopped goes on. --features: a folder for the
target's features (.8 GB), which are otherwise worked out again for every update.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Result, options

import minispec as ms
from minispec.checkpoints import default_taps
from minispec.demo import machine
from minispec.training.corpus import Text
from minispec.training.data import Batch, TextData
from minispec.training.eagle import EagleLearner
from minispec.training.fit import Recipe, fit
from minispec.training.run import data_of, eagle_learner, load_corpus, split

RECIPE = Recipe(steps=400, rows=1, lr=2e-3, precision="auto")
TEXTS = 768  # of the corpus's 8,034
VOCAB = 2048
SINGLE = 200  # updates with one step, and then, on rungs with training-time test,
STEPS = 3  # steps in each
# Each rung: version, unrolled steps, the feature's loss, one tap in the place of three.
LADDER: dict[str, tuple[int, int, bool, bool]] = {
    "EAGLE-1": (1, 1, True, False),
    "no feature loss": (1, 1, False, False),
    "EAGLE-3 without training-time test": (3, 1, False, False),
    "+ fused taps: EAGLE-3": (3, STEPS, False, False),
    "+ training-time test": (1, STEPS, False, False),
    "EAGLE-3's layer, one tap": (3, STEPS, False, True),
}
WATCHED = "+ fused taps: EAGLE-3"  # n-alpha is noted on the way
SHARES = (1 / 16, 1 / 4, 1.0)  # of these texts
# Neither with training-time test: it is the first place that is compared.
SCALED = {"EAGLE-1": "EAGLE-1", "EAGLE-3": "EAGLE-3 without training-time test"}


class Part:
    """Some rows of a ``TextData``, drawn by chance: they are packed by length."""

    def __init__(self, data: TextData, share: float) -> None:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        self.data, self.rows = data, order[: round(share * len(data))]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.data.batch([self.rows[i] for i in rows])

    @property
    def tokens(self) -> int:
        return sum(self.data.lengths[i] for row in self.rows for i in self.data.rows[row])


def chosen(texts: list[Text]) -> list[Text]:
    """``TEXTS`` of those to learn from, and every greedy one that is held out."""
    learn, held = split(texts)
    order = torch.randperm(len(learn), generator=torch.Generator().manual_seed(0)).tolist()
    return [learn[i] for i in order[:TEXTS]] + [t for t in held if t.temperature == 0]


def measure(learner: EagleLearner, data: Any, held: TextData, every: int = 0) -> dict[str, Any]:
    """Trains on ``data`` and judges, every so many updates or at the end alone."""
    with tempfile.TemporaryDirectory() as work:
        recipe = replace(RECIPE, validate_every=every)
        log = fit(learner, data, recipe, Path(work), validation=held, cpu=True)
    judged = log[log["tau"].notna()]
    alphas = judged[[f"alpha_{n}" for n in range(1, learner.measured + 1)]]
    rows = [[_number(a) for a in row] for row in alphas.to_numpy().tolist()]
    found = {"tau": _number(float(judged["tau"].iloc[-1])), "n-alpha": rows[-1]}
    if every:
        found["by updates"] = {int(s) + 1: row for s, row in zip(judged["step"], rows, strict=True)}
    return found


def _number(value: float) -> float | None:
    """Rounded; None for a place that no draft has reached."""
    return None if math.isnan(value) else round(value, 4)


def main() -> None:
    given = options(str(__doc__))
    target = ms.load_target("smollm2", device="cpu")
    texts, named = load_corpus()
    taps = default_taps(target.num_layers)
    data, held = data_of(target, chosen(texts), taps=taps, features=given.features)
    facts = {
        "machine": machine(),
        "corpus": named,
        "recipe": vars(RECIPE) | {"unrolled": STEPS, "single": SINGLE, "vocabulary": VOCAB},
        "texts": TEXTS,
        "tokens": data.tokens,
    }
    result = Result(given.out, facts, ("ladder", *SCALED))

    def rung(name: str) -> EagleLearner:
        version, steps, feature_loss, one = LADDER[name]
        torch.manual_seed(0)
        some = taps[-1:] if one else taps
        head = eagle_learner(target, texts, version=version, vocab=VOCAB, taps=some).head
        return EagleLearner(head, target, steps, feature_loss, single=SINGLE)

    for name in LADDER:
        if name not in result.parts["ladder"]:
            every = 40 if name == WATCHED else 0
            result.keep("ladder", name, measure(rung(name), data, held, every))
    for part, name in SCALED.items():
        for share in SHARES:
            if f"{share:g}" in result.parts[part]:
                continue
            some = Part(data, share)
            whole = share == 1
            found = result.parts["ladder"][name] if whole else measure(rung(name), some, held)
            result.keep(part, f"{share:g}", {**found, "tokens": some.tokens})


if __name__ == "__main__":
    main()
