"""A guard against growing slow: ratios in one process, with bounds that no noise reaches.

How much faster than plain a method is depends on the machine: on what its passes over several
tokens cost. So a method is held to what its tau and the times of passes promise here.

    make guard

Every method runs on the same prompts in turn, so that whatever else the machine does hits all
alike; what is judged is the median over the turns. Absolute times are judged nowhere.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pandas as pd
import pytest

import minispec as ms
from minispec.bench import BenchResult, Method, run_bench
from minispec.bench_report import OURS, THEIRS
from minispec.heads import card, load_head, pass_times, path_values, shipped
from minispec.prompts import Prompt
from minispec.shapes import from_paths

REPEATS, NEW, NODES = 5, 24, 6
SHARE = 0.75  # of what is promised
PASSAGE = (
    "The harbour master keeps a red book. In the red book she writes the name of every ship, the "
    "day it came, and the weight of what it carried. At noon the harbour master closes the book."
)
PROMPTS = [
    Prompt("story", "free", "", "Tell me a story about the sea."),
    Prompt("copy", "repetitive", "", f"Repeat this text word for word.\n\n{PASSAGE}"),
]


class Lazy(ms.Drafter):
    """Drafts nothing and wastes as much time as a plain step takes: what the guard must catch."""

    pause = 0.0  # seconds

    def propose(self, rows: Any) -> ms.TokenTree:
        time.sleep(self.pause)
        return ms.TokenTree.empty(rows.batch, rows.tokens.device)


@cache
def target() -> ms.LanguageModel:
    return ms.load_target("smollm2", device="cpu")


@cache
def result() -> BenchResult:
    warm = ms.generate(target(), PROMPTS[0].chat(), max_new_tokens=8).trace
    lazy = Lazy()
    lazy.pause = warm.rounds_s / len(warm.rounds)
    ways = [
        Method("plain"),
        Method("plain", engine=THEIRS),
        Method("prompt lookup", ms.PromptLookup(8)),
        Method("oracle", ms.Oracle(0.8, NODES)),
        Method("lazy", lazy),
        *(Method(name, trained(name)) for name in shipped()),
    ]
    return run_bench(target(), ways, PROMPTS, max_new_tokens=NEW, repeats=REPEATS)


def trained(name: str) -> ms.Drafter:
    """A shipped draft with its likeliest paths: the same on every machine."""
    return load_head(name, target(), from_paths(list(path_values(card(name)))[:NODES]))


def promised(method: str, nodes: int, draft: float, kind: str | None = None) -> float:
    """The speed-up of a round of ``nodes`` whose drafting takes ``draft`` plain steps.

    From the tau that the method had, and the times of passes measured by themselves.
    """
    frame = result().frame
    frame = frame[frame["method"].eq(method) & (frame["kind"].eq(kind) if kind else True)]
    t = pass_times(target()).t
    tau = frame["emitted"].sum() / frame["live"].sum()
    return float(tau / (t(nodes + 1) / t(1) + draft))


def times_as_fast(one: str, other: str, time: str, tokens: str, kind: str | None = None) -> float:
    """Median over the turns: how many times as fast a token is by ``one`` as by ``other``."""
    frame = result().frame
    assert (frame["error"] == "").all(), frame["error"].unique()
    if kind:
        frame = frame[frame["kind"] == kind]
    who = frame["engine"] + " " + frame["method"]
    pace = (frame[time] / frame[tokens]).groupby([who, frame["unit"], frame["repeat"]]).first()
    ratios: pd.Series = pace[other] / pace[one]
    print(f"{one} / {other}: {ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
    return float(ratios.median())


def test_plain_decoding_is_not_slower_than_transformers() -> None:
    ratio = times_as_fast(f"{OURS} plain", f"{THEIRS} plain", "whole_s", "tokens")
    assert ratio > 1 / 1.25


def test_the_bound_catches_a_loop_that_takes_twice_as_long() -> None:
    assert times_as_fast(f"{OURS} lazy", f"{THEIRS} plain", "whole_s", "tokens") < 1 / 1.25


def test_a_good_drafter_that_costs_nothing_gains_what_its_passes_allow() -> None:
    faster = times_as_fast(f"{OURS} oracle", f"{OURS} plain", "rounds_s", "emitted")
    assert faster > SHARE * promised("oracle", NODES, 0)


def test_lookup_gains_where_the_answer_repeats_the_prompt() -> None:
    names = f"{OURS} prompt lookup", f"{OURS} plain"
    faster = times_as_fast(*names, "rounds_s", "emitted", "repetitive")
    assert faster > SHARE * promised("prompt lookup", 8, 0, "repetitive")
    assert faster > 1.1


@pytest.mark.parametrize("name", list(shipped()))
def test_trained_drafts_gain_what_their_passes_allow(name: str) -> None:
    faster = times_as_fast(f"{OURS} {name}", f"{OURS} plain", "rounds_s", "emitted")
    assert faster > SHARE * promised(name, NODES, 0.3)


def test_the_promise_catches_a_drafter_that_wastes_time() -> None:
    faster = times_as_fast(f"{OURS} lazy", f"{OURS} plain", "rounds_s", "emitted")
    assert faster < SHARE * promised("lazy", 0, 0)


@pytest.mark.parametrize("method", ["prompt lookup", "oracle", "lazy", *shipped()])
def test_the_guard_measured_what_it_meant_to(method: str) -> None:
    """Every turn is there: a median over nothing would pass nothing on."""
    frame = result().frame
    assert len(frame[frame["method"] == method]) == REPEATS * len(PROMPTS)
