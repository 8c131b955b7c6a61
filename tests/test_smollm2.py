"""The real model: SmolLM2-135M-Instruct in fp32 gives the tokens of transformers' greedy search."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

import minispec as ms
from minispec.heads import load_head, shipped
from minispec.models import computes_in_bf16
from minispec.prompts import load_prompts

pytestmark = pytest.mark.slow
NEW, PROMPTS = 64, 20
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # a neighbour has the other core
# A processor that only imitates bfloat16 is old, and several times as slow: one prompt in three.
STEP = 1 if computes_in_bf16(torch.device("cpu")) else 3


@cache
def target() -> ms.LanguageModel:
    torch.set_num_threads(THREADS)
    return ms.load_target("smollm2", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


@cache
def chats() -> list[list[int]]:
    """Twenty short prompts, all kinds but those with long passages over-represented."""
    by_length = sorted(load_prompts("test"), key=lambda p: len(p.text))
    picked = by_length[:14] + by_length[-6:]  # six with a passage, where lookup has work to do
    assert len(picked) == PROMPTS
    return [target().encode(p.chat()) for p in picked[::STEP]]


@cache
def expected() -> list[list[int]]:
    rows = []
    for ids in chats():
        tokens = torch.tensor([ids])
        out = target().model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False
        )
        rows.append(out[0, len(ids) :].tolist())
    return rows


def drafter(name: str, num: int) -> ms.Drafter | None:
    return {
        "plain": lambda: None,
        "lookup": lambda: ms.PromptLookup(num),
        "early exit": lambda: ms.EarlyExit(6, num),
        "draft model": lambda: ms.DraftModel(target().first_layers(3), num),
        "oracle": lambda: ms.Oracle(0.8, num),
    }[name]()


CASES = [("plain", 0)] + [
    (name, num) for name in ("lookup", "early exit", "draft model", "oracle") for num in (1, 3, 7)
]


@pytest.mark.parametrize(("name", "num"), CASES)
def test_tokens_are_those_of_transformers(name, num):  # pitfall 1
    out = ms.generate(target(), chats(), drafter(name, num), max_new_tokens=NEW)
    for row, (ours, theirs) in enumerate(zip(out.tokens, expected(), strict=True)):
        assert ours.tolist() == theirs, f"prompt {row}"


TREES = {
    "distilled draft": (ms.shapes.kary(2, 3), ms.Grow(12, 3, 5, min_value=0.03, min_gain=0.1)),
    "medusa": (ms.shapes.kary(3, 2), ms.shapes.chain(4)),
    "eagle": (ms.shapes.kary(2, 3), ms.Grow(12, 3, 5, min_value=0.03, min_gain=0.1)),
    "eagle-3": (ms.shapes.kary(2, 3), ms.Grow(12, 3, 5, min_value=0.03, min_gain=0.1)),
}
TREES = {name: trees for name, trees in TREES.items() if name in shipped()}


@pytest.mark.parametrize(("name", "which"), [(name, i) for name in TREES for i in (0, 1)])
def test_trained_drafts_leave_the_text_as_it_is(name, which):
    drafter = load_head(name, target(), TREES[name][which])
    out = ms.generate(target(), chats()[::2], drafter, max_new_tokens=32)
    for row, (ours, theirs) in enumerate(zip(out.tokens, expected()[::2], strict=True)):
        assert ours.tolist() == theirs[:32], f"prompt {row}"
    assert out.trace.tau > 1.2
    merged = ms.Merged(drafter, ms.PromptLookup(4))
    both = ms.generate(target(), chats()[-3:], merged, max_new_tokens=32)
    assert [t.tolist() for t in both.tokens] == [theirs[:32] for theirs in expected()[-3:]]


def test_lookup_finds_something_where_a_passage_is_given():
    out = ms.generate(target(), chats()[-6 // STEP :], ms.PromptLookup(8), max_new_tokens=NEW)
    assert out.trace.tau > 1.2


def test_the_stream_spells_the_text():
    text = "".join(p.text for p in ms.stream(target(), chats()[0], max_new_tokens=40))
    assert text == ms.generate(target(), chats()[0], max_new_tokens=40).text[0]


def test_characters_of_several_tokens_are_held_back_until_they_are_whole():
    from minispec.show import pieces

    tokenizer = target().tokenizer
    ids = tokenizer("naïve 🙂 日本語 – done")["input_ids"]
    texts = [p.text for p in pieces(tokenizer, 0, ids, [True] * len(ids))]
    assert "".join(texts) == "naïve 🙂 日本語 – done"
    assert "\ufffd" not in "".join(texts)
    cut = [p.text for p in pieces(tokenizer, 0, ids[:4], [True] * 4)]
    assert "".join(cut) == tokenizer.decode(ids[:4])  # also where the text ends inside one


def test_bf16_texts_part_only_at_near_ties():  # pitfall 1
    from minispec.exactness import first_divergence

    bf16 = ms.load_target("smollm2", dtype="bfloat16", device="cpu")
    chosen = chats()[::2] if STEP == 1 else chats()[:2]  # the shortest
    new = 32 // STEP
    plain = ms.generate(bf16, chosen, max_new_tokens=new)
    heads = [load_head(name, bf16, trees[0]) for name, trees in TREES.items()]
    for drafter in (ms.PromptLookup(7), ms.Oracle(0.8, 3), *heads):
        out = ms.generate(bf16, chosen, drafter, max_new_tokens=new)
        found = first_divergence(plain, out, bf16)
        assert [d for d in found if d.verdict == "fault"] == []


def test_flips_stand_where_the_margin_is_within_the_drift():
    import pandas as pd

    from minispec.exactness import block_drift

    bf16 = ms.load_target("smollm2", dtype="bfloat16", device="cpu")
    frames = [block_drift(bf16, ids[:64]) for ids in chats()[: 5 - STEP]]
    table = pd.concat(frames)
    assert table["drift"].max() > 0  # bf16 does drift with the shape of the pass
    flips = table[table["flipped"]]
    assert (flips["margin"] <= 2 * flips["drift"]).all()
    exact = pd.concat([block_drift(target(), ids[:64]) for ids in chats()[:2]])
    assert not exact["flipped"].any()
    assert exact["drift"].max() < table["drift"].max() / 100


def test_sampled_continuations_are_those_of_plain_decoding():
    """A two-sample test at temperature 1: drafted and plain texts come from one law.

    Fails a correct implementation once in 10,000 seeds (the seeds are fixed); the same test must
    tell temperature 1 from temperature 1.4.
    """
    from minispec.exactness import permutation_test

    prompt, rows = target().encode("The capital of France is"), 160

    def texts(drafter, temperature, seed):
        out = ms.generate(
            target(),
            [prompt] * rows,
            drafter,
            max_new_tokens=4,
            sampling=ms.Sampling(temperature),
            seed=seed,
            eos=(),
        )
        return torch.stack(out.tokens)

    plain = texts(None, 1.0, 1)
    drafted = texts(ms.DraftModel(target().first_layers(20), 3), 1.0, 2)
    hotter = texts(None, 1.4, 3)
    assert permutation_test(plain, drafted, 20_000) > 1e-4
    assert permutation_test(plain, hotter, 20_000) <= 1e-4
