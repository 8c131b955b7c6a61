"""From texts to batches: the committed corpus, packed rows, and the target's features there.

Every head learns from the same batches: whole texts laid end to end in rows of one length, and
the target's hidden states at every token. The target is frozen, so its features are worked out
once (``cache_features``: on disk, resumable) or anew for each batch (``features=None``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..models import LanguageModel
from .corpus import Text


@dataclass
class Batch:
    """R rows of T tokens, several texts to a row.

    tokens    [R, T] ids, 0 in the padding
    text      [R, T] the number of the text that a token belongs to, within its row; -1: padding
    position  [R, T] within its text
    answer    [R, T] bool: a token of the answer, not of the prompt
    greedy    [R, T] bool: a token of an answer at temperature 0
    hidden    [R, T, H] the target's features there, after its final norm
    taps      the inputs [R, T, H] of the target's layers that were asked for
    """

    tokens: Tensor
    text: Tensor
    position: Tensor
    answer: Tensor
    greedy: Tensor
    hidden: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)

    def visible(self) -> Tensor:
        """[R, T, T] bool: a token sees itself and what stands before it in its own text."""
        num = self.tokens.shape[1]
        causal = torch.ones(num, num, dtype=torch.bool, device=self.tokens.device).tril()
        same = self.text.unsqueeze(2) == self.text.unsqueeze(1)
        # Padding sees itself, so that no softmax is empty.
        return causal & same

    def ahead(self, values: Tensor, steps: int) -> Tensor:
        """values [R, T, ...] as they stand ``steps`` places further on; see ``has_ahead``."""
        return torch.cat([values[:, steps:], torch.zeros_like(values[:, :steps])], 1)

    def has_ahead(self, steps: int) -> Tensor:
        """[R, T] bool: the token ``steps`` places on is of the same text."""
        text = torch.cat([self.text[:, steps:], torch.full_like(self.text[:, :steps], -2)], 1)
        return (text == self.text) & (self.text >= 0)

    def to(self, device: torch.device) -> Batch:
        moved = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return Batch(**moved, taps={i: t.to(device) for i, t in self.taps.items()})


def places_of(token_map: Tensor | None, vocab_size: int) -> Tensor:
    """[V] for each of the target's ids its draft id, -1 for those that are not drafted."""
    if token_map is None:
        return torch.arange(vocab_size)
    known = torch.full((vocab_size,), -1)
    known[token_map] = torch.arange(len(token_map))
    return known


def held_out(text: Text, share: float = 0.02) -> bool:
    """Whether a text is for validation: by its question, so that no question is on both sides."""
    digest = hashlib.sha256(np.array(text.prompt, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Texts into rows of at most ``width`` tokens: first-fit, the longest first.

    Returns the numbers of the texts in each row; texts longer than a row are cut by the caller.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    open_from = 0  # rows before this one are full for every length still to come
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = min(lengths[index], width)
        for row in range(open_from, len(rows)):
            if room[row] >= need:
                break
        else:
            row = len(rows)
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= need
        while open_from < len(rows) and room[open_from] < 8:
            open_from += 1
    return rows


class TextData:
    """Texts, packed, with the target's features: what ``fit`` draws its batches from."""

    def __init__(
        self,
        texts: Sequence[Text],
        target: LanguageModel,
        *,
        width: int = 640,
        taps: Sequence[int] = (),
        features: Path | None = None,
    ) -> None:
        """features: a folder written by ``cache_features``; None: worked out batch by batch."""
        if not texts:
            raise ValueError("there are no texts to learn from")
        self.texts, self.target, self.width, self.taps = list(texts), target, width, tuple(taps)
        self.lengths = [min(len(t.prompt) + len(t.answer), width) for t in texts]
        self.rows = pack(self.lengths, width)
        self.store = FeatureStore(features, self.lengths, self.taps) if features else None

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows of these numbers."""
        shape = (len(rows), self.width)
        tokens = torch.zeros(shape, dtype=torch.long)
        text = torch.full(shape, -1)
        position, answer, greedy = torch.zeros_like(tokens), tokens.bool(), tokens.bool()
        places: list[tuple[int, int, int]] = []  # (row, start, text)
        for r, row in enumerate(rows):
            start = 0
            for n, i in enumerate(self.rows[row]):
                item, stop = self.texts[i], start + self.lengths[i]
                ids = (item.prompt + item.answer)[: self.lengths[i]]
                tokens[r, start:stop] = torch.tensor(ids)
                text[r, start:stop] = n
                position[r, start:stop] = torch.arange(len(ids))
                answer[r, start + len(item.prompt) : stop] = True
                greedy[r, start + len(item.prompt) : stop] = item.temperature == 0
                places.append((r, start, i))
                start = stop
        batch = Batch(tokens, text, position, answer, greedy, torch.empty(0))
        if self.store is None:
            batch.hidden, batch.taps = read_features(self.target, batch, self.taps)
        else:
            batch.hidden, batch.taps = self.store.read(shape, places)
        return batch


def read_features(
    target: LanguageModel, batch: Batch, taps: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """The target's features at every token of a batch, by one pass: hidden and taps [R, T, H]."""
    with torch.inference_mode():
        cache = target.new_cache(*batch.tokens.shape)
        here = batch.to(target.device)
        none = here.tokens.new_zeros(len(here.tokens), 1)  # logits are wanted nowhere
        out = target.forward(cache, here.tokens, here.position, here.visible(), none, taps)
    # A tensor made in inference mode cannot be saved for backward; a copy can.
    return out.hidden.clone(), {i: t.clone() for i, t in out.taps.items()}


class FeatureStore:
    """Features on disk: one flat file of bfloat16 a kind, texts end to end."""

    def __init__(self, folder: Path, lengths: Sequence[int], taps: Sequence[int]) -> None:
        facts = json.loads((folder / "features.json").read_text())
        if facts["lengths"] != fingerprint(lengths) or not set(taps) <= set(facts["taps"]):
            raise ValueError(f"{folder} holds the features of other texts or other layers")
        if facts["done"] != len(lengths):
            raise ValueError(f"{folder} is not complete: run cache_features again")
        self.width, self.taps = facts["width"], tuple(taps)
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self.files = {
            name: np.memmap(folder / f"{name}.bf16", np.int16, "r").reshape(-1, self.width)
            for name in ("hidden", *(f"tap-{i}" for i in taps))
        }

    def read(
        self, shape: tuple[int, int], places: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """hidden and taps [R, T, H]; places: (row, start within it, text)."""
        found = {}
        for name, held in self.files.items():
            out = torch.zeros(*shape, self.width, dtype=torch.bfloat16)
            for row, start, i in places:
                begin, end = self.starts[i], self.starts[i + 1]
                part = torch.from_numpy(np.array(held[begin:end])).view(torch.bfloat16)
                out[row, start : start + end - begin] = part
            found[name] = out
        return found["hidden"], {i: found[f"tap-{i}"] for i in self.taps}


def fingerprint(lengths: Sequence[int]) -> str:
    """Tells one list of text lengths from another."""
    return hashlib.sha256(np.array(lengths, np.int64).tobytes()).hexdigest()


def cache_features(
    target: LanguageModel,
    texts: Sequence[Text],
    folder: Path,
    *,
    width: int = 640,
    taps: Sequence[int] = (),
    chunk: int = 256,
    tell: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the target's features at every token of every text; a killed run goes on.

    Size on disk: tokens x (1 + taps) x hidden width x 2 bytes. tell: called with texts done, all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [min(len(t.prompt) + len(t.answer), width) for t in texts]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    size = int(target.model.get_output_embeddings().weight.shape[1])
    facts: dict[str, Any] = {
        "lengths": fingerprint(lengths),
        "taps": list(taps),
        "width": size,
        "done": 0,
    }
    note = folder / "features.json"
    if note.exists():
        held = json.loads(note.read_text())
        same = all(held[k] == facts[k] for k in ("lengths", "width"))
        if not same or not set(taps) <= set(held["taps"]):
            raise ValueError(f"{folder} holds the features of other texts or other layers")
        facts, taps = held, held["taps"]  # more layers than are asked for are kept up
    names = ["hidden", *(f"tap-{i}" for i in taps)]
    files = {}
    for name in names:
        path = folder / f"{name}.bf16"
        mode: Literal["r+", "w+"] = "r+" if path.exists() else "w+"
        files[name] = np.memmap(path, np.int16, mode, shape=(int(starts[-1]), size))
    for first in range(facts["done"], len(texts), chunk):
        group = list(range(first, min(first + chunk, len(texts))))
        rows = pack([lengths[i] for i in group], width)
        part = TextData([texts[i] for i in group], target, width=width, taps=taps)
        for begin in range(0, len(rows), 8):  # a few thousand tokens a pass
            chosen = range(begin, min(begin + 8, len(rows)))
            batch = part.batch(chosen)
            found = {"hidden": batch.hidden} | {f"tap-{i}": t for i, t in batch.taps.items()}
            for r, row in enumerate(chosen):
                place = 0
                for n in part.rows[row]:
                    i = group[n]
                    for name in names:
                        piece = found[name][r, place : place + lengths[i]]
                        bits = piece.to(torch.bfloat16).cpu().view(torch.int16)
                        files[name][starts[i] : starts[i] + lengths[i]] = bits.numpy()
                    place += lengths[i]
        for held_file in files.values():
            held_file.flush()
        facts["done"] = group[-1] + 1
        temporary = note.with_suffix(".part")
        temporary.write_text(json.dumps(facts))
        os.replace(temporary, note)
        if tell is not None:
            tell(facts["done"], len(texts))
