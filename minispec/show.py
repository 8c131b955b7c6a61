"""Tokens as people see them: pieces of text in the colour of where they came from."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

# Okabe and Ito's colours, told apart by nearly everyone. One colour a method, in every figure.
COLORS = {
    "target": "#999999",
    "plain": "#999999",
    "accepted": "#0072B2",
    "own": "#D55E00",
    "draft model": "#E69F00",
    "distilled draft": "#E69F00",
    "distilled draft + lookup": "#A6761D",
    "prompt lookup": "#009E73",
    "early exit": "#CC79A7",
    "oracle": "#000000",
    "medusa": "#F0E442",
    "medusa + lookup": "#999933",
    "eagle": "#56B4E9",
    "eagle + lookup": "#117799",
    "eagle-2": "#0072B2",
    "eagle-3": "#D55E00",
    "eagle-3 + lookup": "#882255",
}
ACCEPTED_STYLE, OWN_STYLE = "bold #56B4E9", "#E69F00"  # legible on dark and on light terminals


@dataclass
class Piece:
    """A piece of one row's text as it is committed.

    row; text, "" while a character is still incomplete; token, its id; accepted, True where it
    was drafted and accepted, False where it is the target's own.
    """

    row: int
    text: str
    token: int
    accepted: bool


class Detokenizer:
    """Token by token to text, holding back characters that are not whole yet."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # where the window begins that is decoded again and again
        self.done = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if self.tokenizer is None:
            self.ids.append(token)
            return f" {token}" if len(self.ids) > 1 else str(token)
        self.ids.append(token)
        before = self._decode(self.ids[self.start : self.done])
        after = self._decode(self.ids[self.start :])
        # A replacement character at the end is a character cut in two: wait for its other half.
        if after.endswith("\ufffd") and len(self.ids) - self.done < 8:
            return ""
        # A window of a few tokens decides spacing; the rest need not be decoded again.
        self.start, self.done = max(self.start, self.done - 4), len(self.ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What was held back and will not be completed: the text ends inside a character."""
        if self.tokenizer is None or self.done == len(self.ids):
            return ""
        before = self._decode(self.ids[self.start : self.done])
        self.done = len(self.ids)
        return self._decode(self.ids[self.start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def pieces(
    tokenizer: Any, row: int, tokens: Sequence[int], accepted: Sequence[bool]
) -> list[Piece]:
    """One row's tokens as pieces of text."""
    text = Detokenizer(tokenizer)
    found = [
        Piece(row, text.push(int(t)), int(t), bool(a))
        for t, a in zip(tokens, accepted, strict=True)
    ]
    if found:
        found[-1].text += text.flush()
    return found


def rich_text(row: Sequence[Piece]) -> Text:
    """For a terminal: accepted drafts in one colour, the target's own tokens in another."""
    out = Text()
    for piece in row:
        out.append(piece.text, ACCEPTED_STYLE if piece.accepted else OWN_STYLE)
    return out


def html_text(row: Sequence[Piece]) -> str:
    """For a notebook: the same, as spans; hovering shows the token's id."""
    spans = []
    for piece in row:
        color = COLORS["accepted" if piece.accepted else "own"]
        origin = "drafted and accepted" if piece.accepted else "the target's own"
        text = html.escape(piece.text).replace("\n", "<br>")
        spans.append(
            f'<span style="background:{color}26;border-bottom:2px solid {color};padding:1px 0" '
            f'title="{piece.token}: {origin}">{text}</span>'
        )
    return "".join(spans)


def html_legend() -> str:
    """What the two colours mean."""
    marks = (("accepted", "drafted and accepted"), ("own", "the target's own"))
    return " &nbsp; ".join(
        f'<span style="border-bottom:2px solid {COLORS[k]};background:{COLORS[k]}26">{t}</span>'
        for k, t in marks
    )
