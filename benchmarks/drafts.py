"""Which loss makes the better draft model: forward KL, reverse KL or TVD, judged by alpha.

    .venv/bin/python benchmarks/drafts.py [--out benchmarks/drafts.json] [--features DIR]

Drafts of the shipped one's form learn for the same steps from the same start, one by each loss; the
shipped draft, which learned longer, stands beside them. alpha is measured on held-out answers of
the target: 1 - TV(p, q) at the temperature that the answer was written at, with the target's whole
vocabulary; at temperature 0 it is how often the two favourites agree.

What --out holds already is kept: a run that was stopped goes on. --features: a folder for the
target's features (2 GB), which makes it some times as fast.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Result, options

import minispec as ms
from minispec.demo import machine
from minispec.heads import shipped
from minispec.training.data import Batch, TextData
from minispec.training.distil import LOSSES, DraftLearner
from minispec.training.fit import Recipe, fit
from minispec.training.run import data_of, draft_learner, load_corpus

TEMPERATURES = (0.0, 0.7, 1.0)
RECIPE = Recipe(steps=250, rows=4, lr=2e-3, precision="auto", validate_every=50)
DRAFT = {"width": 352, "layers": 2}


@torch.no_grad()
def alphas(
    learner: DraftLearner, head: torch.Tensor, data: TextData, rows: int = 60
) -> dict[str, float]:
    """alpha by the temperature at which the answers were written, over the first ``rows`` rows.

    head: the target's LM head [V, H].
    """
    learner.eval()
    found: dict[float, list[float]] = {t: [] for t in TEMPERATURES}
    for begin in range(0, min(rows, len(data)), 4):
        chosen = range(begin, min(begin + 4, len(data)))
        batch = data.batch(chosen)
        written = temperatures(data, chosen, batch)
        learn = batch.has_ahead(1) & batch.ahead(batch.answer, 1)
        q_logits = learner.logits(batch)[learn].float()
        p_logits = F.linear(batch.hidden[learn].float(), head)
        heat = batch.ahead(written, 1)[learn]
        for t in TEMPERATURES:
            law = ms.Sampling(t)
            p = law.probs(p_logits[heat == t])
            q = law.probs(q_logits[heat == t])
            wide = torch.zeros_like(p).index_copy_(1, learner.draft.token_map, q)
            found[t] += torch.minimum(p, wide).sum(1).tolist()
    return {f"{t:g}": sum(some) / len(some) for t, some in found.items()}


def temperatures(data: TextData, rows: range, batch: Batch) -> torch.Tensor:
    """[R, T] the temperature of the answer that each token belongs to; -1 in the padding."""
    out = torch.full(batch.tokens.shape, -1.0)
    for r, row in enumerate(rows):
        for n, i in enumerate(data.rows[row]):
            out[r, batch.text[r] == n] = data.texts[i].temperature
    return out


def main() -> None:
    given = options(str(__doc__))
    target = ms.load_target("smollm2")
    texts, named = load_corpus()
    data = data_of(target, texts, features=given.features)
    head = target.model.get_output_embeddings().weight.detach().float()
    facts = {"machine": machine(), "corpus": named, "draft": DRAFT, "recipe": vars(RECIPE)}
    result = Result(given.out, facts, ("drafts",))
    found = result.parts["drafts"]
    for loss in LOSSES:
        if loss in found:
            continue
        learner = draft_learner(target, texts, loss=loss, **DRAFT)
        with tempfile.TemporaryDirectory() as work:
            log = fit(learner, data[0], RECIPE, Path(work), validation=data[1])
        curve = log[log["tau"].notna()]
        kept = {
            "alpha": alphas(learner, head, data[1]),
            "step": [int(s) + 1 for s in curve["step"]],
            "alpha_1": [round(float(a), 4) for a in curve["alpha_1"]],
        }
        result.keep("drafts", loss, kept)
    if "shipped" not in found and "distilled draft" in shipped():
        learner = DraftLearner(ms.load_target(str(shipped()["distilled draft"])), target)
        result.keep("drafts", "shipped", {"alpha": alphas(learner, head, data[1])})


if __name__ == "__main__":
    main()
