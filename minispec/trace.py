"""What happened, round by round, and the metrics that follow from it.

One definition of each, used everywhere:

    accepted   draft tokens kept in a round
    tau        tokens emitted per target pass: mean(accepted + 1)
    alpha      probability that a candidate is accepted, its parent having been accepted:
               positions accepted / positions tried
    n_alpha    the same by position in the draft, 1, 2, 3, ...

A round that the end of a text cuts short emits fewer than accepted + 1 tokens; what was cut off
counts nowhere. The prefill pass, which reads the prompt and emits each row's first token, is a
target pass but not a round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor


@dataclass
class Round:
    """One round of B rows; the tensors are [B], on the CPU, 0 in rows that had stopped."""

    drafted: Tensor  # nodes proposed
    tried: Tensor  # positions at which a candidate stood to be accepted
    accepted: Tensor  # draft tokens kept
    emitted: Tensor  # tokens emitted: accepted + 1, less where the text ended
    draft_s: float = 0.0  # seconds in the drafter
    target_s: float = 0.0  # seconds in the target's pass
    total_s: float = 0.0  # seconds of the whole round


@dataclass
class Trace:
    """The rounds of one generation."""

    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0  # seconds of the pass over the prompt
    start_s: float = 0.0  # seconds of the drafter's preparation
    prefill_emitted: Tensor | None = None  # [B] 1 where the prefill pass emitted a token

    def _stack(self, name: str) -> Tensor:
        """[R, B] one field of all rounds."""
        if not self.rounds:
            return torch.zeros(0, 0, dtype=torch.long)
        return torch.stack([getattr(r, name) for r in self.rounds])

    @property
    def passes(self) -> int:
        """Target passes, the prefill among them; one pass serves all rows."""
        return len(self.rounds) + 1

    @property
    def tau(self) -> float:
        """Tokens emitted per target pass (acceptance length), over rows and rounds."""
        emitted = self._stack("emitted")
        live = int((emitted > 0).sum())
        return int(emitted.sum()) / live if live else float("nan")

    @property
    def alpha(self) -> float:
        """Acceptance probability of a draft token whose parent was accepted; nan if none tried."""
        tried = int(self._stack("tried").sum())
        return int(self._stack("accepted").sum()) / tried if tried else float("nan")

    @property
    def n_alpha(self) -> list[float]:
        """alpha by position in the draft: entry n-1 is that of the n-th drafted token."""
        tried, accepted = self._stack("tried"), self._stack("accepted")
        deepest = int(tried.max()) if tried.numel() else 0
        return [int((accepted >= n).sum()) / int((tried >= n).sum()) for n in range(1, deepest + 1)]

    @property
    def tokens(self) -> int:
        """Tokens emitted in all, over all rows."""
        first = int(self.prefill_emitted.sum()) if self.prefill_emitted is not None else 0
        return first + int(self._stack("emitted").sum())

    @property
    def rounds_s(self) -> float:
        """Seconds of the rounds alone: decoding, without the prompt and the preparation."""
        return sum(r.total_s for r in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time of it all: prefill, the drafter's preparation, the rounds."""
        return self.prefill_s + self.start_s + self.rounds_s

    def share(self) -> dict[str, float]:
        """Where the time of the rounds went: draft, target and rest, as fractions of 1."""
        total = self.rounds_s or float("nan")
        draft = sum(r.draft_s for r in self.rounds) / total
        target = sum(r.target_s for r in self.rounds) / total
        return {"draft": draft, "target": target, "rest": 1 - draft - target}

    def to_frame(self) -> pd.DataFrame:
        """One line per row and round in which the row was still running."""
        names = ("drafted", "tried", "accepted", "emitted")
        count, batch = self._stack("emitted").shape
        frame = pd.DataFrame({name: self._stack(name).flatten().numpy() for name in names})
        frame.insert(0, "round", [r for r in range(count) for _ in range(batch)])
        frame.insert(0, "row", list(range(batch)) * count)
        for name in ("draft_s", "target_s", "total_s"):
            frame[name] = [getattr(r, name) for r in self.rounds for _ in range(batch)]
        return frame[frame["emitted"] > 0].reset_index(drop=True)

    def __repr__(self) -> str:
        return (
            f"<Trace: {self.tokens} tokens in {self.passes} target passes, "
            f"tau {self.tau:.2f}, alpha {self.alpha:.2f}>"
        )


def pooled(traces: Iterable[Trace]) -> Trace:
    """Several generations (of equally many rows) as one, for metrics over all of them."""
    out = Trace()
    for trace in traces:
        out.rounds += trace.rounds
        out.prefill_s += trace.prefill_s
        out.start_s += trace.start_s
        if trace.prefill_emitted is not None:
            before = 0 if out.prefill_emitted is None else out.prefill_emitted
            out.prefill_emitted = trace.prefill_emitted + before
    return out
