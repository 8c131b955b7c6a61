"""One training loop for every head and draft, on accelerate: a laptop, one GPU, many machines.

A ``Learner`` is a module whose ``forward`` turns a batch into a sum of losses and the number of
terms in it; everything else is the same for all: packed rows, warm-up and cosine, clipping,
validation by the acceptance that the draft would have, checkpoints, a log.

What a step sees is a function of the seed and the step's number alone, and a checkpoint holds the
rest, so a killed run that goes on gives the same numbers as one that was never stopped.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ..drafters.base import head_rows
from ..models import LanguageModel, computes_in_bf16
from .data import Batch, TextData


@dataclass(frozen=True)
class Recipe:
    """How to train.

    steps: updates. rows: packed rows an update, over all processes and accumulated parts.
    accumulate: parts that an update is computed in (memory). lr: the highest; it rises over
    ``warmup`` (a share of the steps) and falls to a tenth along a cosine. precision: "no", "bf16"
    (autocast), or "auto": bf16 where the machine computes in it, since elsewhere it is many times
    as slow. validate_every, save_every: in steps; 0: only at the end.
    """

    steps: int
    rows: int = 8
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    precision: str = "no"
    seed: int = 0
    validate_every: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1 or self.accumulate < 1:
            raise ValueError("steps, rows and accumulate must be at least 1")
        if self.rows % self.accumulate:
            raise ValueError(
                f"rows must be a multiple of accumulate: {self.rows}, {self.accumulate}"
            )
        if self.precision not in ("no", "bf16", "auto"):
            raise ValueError(f"precision must be no, bf16 or auto, not {self.precision!r}")
        if not 0 <= self.warmup < 1 or not self.lr > 0:
            raise ValueError("warmup must be in [0, 1) and lr above 0")

    def half(self, device: torch.device) -> bool:
        """Whether ``device`` computes the losses in bfloat16."""
        if self.precision == "auto":
            return computes_in_bf16(device)
        return self.precision == "bf16"

    def rate(self, step: int) -> float:
        """The learning rate of update ``step`` as a share of ``lr``."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        gone = (step - warm) / max(1, self.steps - warm)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * gone)) / 2


class Learner(nn.Module):
    """What can be trained: the parameters of a draft, and the loss that it learns by.

    Frozen tensors (the target's LM head, token maps) are non-persistent buffers, so that they move
    with the module and are in no checkpoint.
    """

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The sum of the losses over a batch, and how many terms there are in it."""
        raise NotImplementedError

    def ranks(self, batch: Batch, most: int = 10) -> tuple[Tensor, Tensor]:
        """At which rank the draft held the text's own tokens: ranks [steps, R, T], valid [R, T].

        ranks[i, r, t]: in a draft begun where place t says it, of the (i+1)-th token, all before
        it being the text's; ``most``: not among the best ``most``. valid: the places from which
        greedy answers are drafted.
        """
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the trained draft in its published form."""
        raise NotImplementedError


def law_rows(target: LanguageModel, token_map: Tensor | None) -> Tensor:
    """[V_d, H] float32: a copy of the rows of the target's LM head that give its law.

    Raises ValueError where its logits are more than a product with them.
    """
    config, head = target.config, target.model.get_output_embeddings()
    extras = {
        "logit_scale": getattr(config, "logit_scale", 1) != 1,
        "logits_scaling": getattr(config, "logits_scaling", 1) != 1,
        "final_logit_softcapping": bool(getattr(config, "final_logit_softcapping", None)),
        "bias": getattr(head, "bias", None) is not None,
    }
    for name, there in extras.items():
        if there:
            raise ValueError(f"this target's LM head has a {name}: nothing here learns its law")
    return head_rows(target, token_map).detach().to(torch.float32, copy=True)


class Laws:
    """The target's law after each place that is asked for, worked out once for all heads or steps.

    rows [V_d, H]: of its LM head; hidden [R, T, H]; places [R, T] bool.
    """

    @torch.no_grad()
    def __init__(self, rows: Tensor, hidden: Tensor, places: Tensor) -> None:
        self.laws = F.linear(hidden[places], rows).float().softmax(-1)  # [M, V_d]
        self.number = places.flatten().cumsum(0).view(places.shape) - 1  # which of the M

    def ahead(self, batch: Batch, steps: int, learn: Tensor) -> Tensor:
        """[L, V_d] the laws ``steps`` places further on than the L places of ``learn`` [R, T]."""
        return self.laws[batch.ahead(self.number, steps)[learn]]


def rank_of(logits: Tensor, label: Tensor, most: int) -> Tensor:
    """The rank [M] of each label [M] among logits [M, V]; ``most``: not among the best ``most``."""
    best = logits.topk(min(most, logits.shape[-1]), -1).indices == label.unsqueeze(-1)
    return torch.where(best.any(-1), best.long().argmax(-1), most)


def run_lengths(hits: Tensor) -> Tensor:
    """hits [steps, ...] to how many drafted tokens in a row are right [...]."""
    return hits.long().cumprod(0).sum(0)


def acceptance(hits: Tensor, valid: Tensor) -> dict[str, float]:
    """tau of a greedy chain as long as the draft, and n-alpha by position.

    hits [steps, ...]: whether the draft's first choices were the text's; see ``Learner.ranks``.
    """
    runs = run_lengths(hits)[valid]
    found = {"tau": 1 + float(runs.double().mean()) if len(runs) else math.nan}
    for n in range(1, len(hits) + 1):
        tried = int((runs >= n - 1).sum())
        found[f"alpha_{n}"] = int((runs >= n).sum()) / tried if tried else math.nan
    return found


def rows_of_step(step: int, rows: int, total: int, seed: int) -> list[int]:
    """The rows of update ``step``: pass after pass over all rows, each in an order of its own."""
    chosen: list[int] = []
    for place in range(step * rows, (step + 1) * rows):
        epoch, i = divmod(place, total)
        chosen.append(_order(epoch, total, seed)[i])
    return chosen


@lru_cache(maxsize=1)
def _order(epoch: int, total: int, seed: int) -> list[int]:
    """A permutation of the rows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(total, generator=generator).tolist()


def fit(
    learner: Learner,
    data: TextData,
    recipe: Recipe,
    folder: Path,
    *,
    validation: TextData | None = None,
    watch: Callable[[pd.DataFrame], None] | None = None,
    facts: dict[str, Any] | None = None,
    cpu: bool = False,
) -> pd.DataFrame:
    """Trains ``learner`` and returns the log: one row an update, also in ``folder``/log.csv.

    folder: checkpoints and the log; a run that was killed goes on from the last checkpoint when it
    is called again with the same recipe and the same ``facts`` (what else tells one run from
    another: the loss, the vocabulary, the corpus). watch: called with the log after each
    validation (a live plot). Columns: step, loss, lr, and after a validation tau, alpha_1,
    alpha_2, ...

    Under ``accelerate launch`` every process takes its share of each update's rows.
    """
    accelerator = Accelerator(cpu=cpu)
    if recipe.rows % (recipe.accumulate * accelerator.num_processes):
        raise ValueError(
            f"{recipe.rows} rows an update cannot be split over {accelerator.num_processes} "
            f"processes and {recipe.accumulate} parts"
        )
    optimizer = torch.optim.AdamW(
        [p for p in learner.parameters() if p.requires_grad],
        recipe.lr,
        recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    model, optimizer = accelerator.prepare(learner, optimizer)
    run = _Log(folder, recipe, facts or {}, accelerator)
    first = run.resume()
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * recipe.rate(step)
        loss = _update(accelerator, model, optimizer, data, recipe, step)
        row = {"step": step, "loss": loss, "lr": recipe.lr * recipe.rate(step)}
        last = step == recipe.steps - 1
        if validation is not None and _due(step, recipe.validate_every, last):
            row |= validate(accelerator.unwrap_model(model), validation)
        run.add(row)
        if watch is not None and "tau" in row and accelerator.is_main_process:
            watch(run.frame())
        if _due(step, recipe.save_every, last):
            run.save(step + 1)
    accelerator.wait_for_everyone()
    return run.frame()


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and (step + 1) % every == 0)


def _update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TextData,
    recipe: Recipe,
    step: int,
) -> float:
    """One update; the mean loss over every term of its rows, on all processes."""
    rows = rows_of_step(step, recipe.rows, len(data), recipe.seed)
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    size = len(mine) // recipe.accumulate
    parts = [data.batch(mine[i : i + size]) for i in range(0, len(mine), size)]
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of terms
    # Not the accelerator's own setting: that is fixed for a whole process, and a notebook trains
    # several drafts in one.
    half = recipe.half(accelerator.device)
    autocast = torch.autocast(accelerator.device.type, torch.bfloat16, enabled=half)
    optimizer.zero_grad()
    for number, batch in enumerate(parts):
        final = number == len(parts) - 1  # gradients are exchanged once
        with nullcontext() if final else accelerator.no_sync(model), autocast:
            loss, count = model(batch.to(accelerator.device), step)
        accelerator.backward(loss)
        total += torch.stack([loss.detach().double(), count.double()]).cpu()
    total = accelerator.reduce(total.to(accelerator.device), "sum").cpu()
    # Losses were summed; the processes' gradients are averaged. So that the update follows the
    # mean over all terms, however the rows were dealt out:
    scale = accelerator.num_processes / max(float(total[1]), 1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    return float(total[0] / total[1].clamp(min=1))


def validate(learner: Learner, data: TextData) -> dict[str, float]:
    """tau and n-alpha of the draft on held-out greedy answers: see ``acceptance``."""
    ranks = held_out_ranks(learner, data, 1)
    return acceptance(ranks == 0, torch.ones_like(ranks[0], dtype=torch.bool))


@torch.no_grad()
def held_out_ranks(learner: Learner, data: TextData, most: int = 10, rows: int = 8) -> Tensor:
    """[steps, M] ``Learner.ranks`` at the M places from which held-out greedy answers are drafted.

    What a static tree is chosen by: see ``shapes.path_values``.
    """
    learner.eval()
    device = next(learner.parameters()).device
    found = []
    for begin in range(0, len(data), rows):
        batch = data.batch(range(begin, min(begin + rows, len(data)))).to(device)
        ranks, valid = learner.ranks(batch, most)
        found.append(ranks[:, valid].cpu())
    learner.train()
    return torch.cat(found, 1)


class _Log:
    """The log and the checkpoints of a run, in one folder."""

    def __init__(
        self, folder: Path, recipe: Recipe, facts: dict[str, Any], accelerator: Accelerator
    ) -> None:
        self.folder, self.accelerator = folder, accelerator
        # As JSON gives it back, so that it can be compared with what a checkpoint holds.
        self.run = json.loads(json.dumps(asdict(recipe) | facts, default=str))
        self.rows: list[dict[str, float]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        if self.accelerator.is_main_process:
            # A row may bring new columns: the file is small and written whole.
            write_text(self.folder / "log.csv", self.frame().to_csv(index=False))

    def save(self, done: int) -> None:
        """A checkpoint after ``done`` updates, whole or not at all; the one before it goes."""
        self.accelerator.wait_for_everyone()
        place = self.folder / f"checkpoint-{done}"
        part = self.folder / "checkpoint.part"
        if self.accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        logging.getLogger("accelerate.utils.other").setLevel("ERROR")  # tied weights are meant
        self.accelerator.save_state(str(part), safe_serialization=True)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            facts = {"done": done, "run": self.run, "log": self.rows}
            write_text(part / "facts.json", json.dumps(facts))
            shutil.rmtree(place, ignore_errors=True)
            os.replace(part, place)
            for other in self._checkpoints():
                if other != place:
                    shutil.rmtree(other)
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        found = self.folder.glob("checkpoint-*")
        return sorted(found, key=lambda p: int(p.name.split("-")[1]))

    def resume(self) -> int:
        """Takes up the last checkpoint, if there is one; the number of updates already done."""
        found = self._checkpoints()
        if not found:
            return 0
        facts = json.loads((found[-1] / "facts.json").read_text())
        if facts["run"] != self.run:
            names = sorted(facts["run"].keys() | self.run.keys())
            differing = [k for k in names if facts["run"].get(k) != self.run.get(k)]
            raise ValueError(
                f"{self.folder} holds another run ({', '.join(differing)} differ): choose another "
                "folder, or take that one away"
            )
        self.accelerator.load_state(str(found[-1]))
        self.rows = facts["log"]
        return int(facts["done"])


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)
