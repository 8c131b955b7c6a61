"""The loop: limits, endings, seeds, streams, and every complaint before any work."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import AlwaysWrong, Scripted, prompts_of, tiny, tiny_transformer

import minispec as ms


def plain(target, prompts, num, **options) -> list[list[int]]:
    return [t.tolist() for t in ms.generate(target, prompts, max_new_tokens=num, **options).tokens]


# How texts end.


@pytest.mark.parametrize("num", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_exactly_the_number_asked_for(llama, num, alpha):  # pitfall 15
    out = ms.generate(llama, prompts_of(3, 7), ms.Oracle(alpha, 4), max_new_tokens=num, eos=())
    assert [len(t) for t in out.tokens] == [num, num]
    assert out.finish == ["length", "length"]


def test_an_end_token_inside_an_accepted_run_ends_the_text(llama):
    prompts = prompts_of(3, 7)
    free = plain(llama, prompts, 12, eos=())
    end = free[0][6]  # a token in the middle of a run of eight
    stop_at = [row.index(end) + 1 if end in row else 12 for row in free]
    out = ms.generate(llama, prompts, ms.Oracle(1.0, 8), max_new_tokens=12, eos=end)
    assert [t.tolist() for t in out.tokens] == [r[:n] for r, n in zip(free, stop_at, strict=True)]
    assert out.finish[0] == "eos"
    assert out.trace.tokens == sum(stop_at)


def test_the_context_limit_ends_the_text():
    target = tiny("gpt2", torch.float64, n_positions=20)
    for drafter in (None, ms.Oracle(1.0, 7), ms.PromptLookup(7), ms.EarlyExit(1, 7)):
        out = ms.generate(target, prompts_of(13, 18), drafter, max_new_tokens=50, eos=())
        assert [len(t) for t in out.tokens] == [7, 2]
        assert out.finish == ["context", "context"]


def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(llama):
    free = plain(llama, prompts_of(3), 12, eos=())[0]
    llama = ms.LanguageModel(llama.model, Letters())
    words = Letters().decode(free)
    stop = words[5:8]  # ends with the token that says words[7]
    out = ms.generate(llama, prompts_of(3), ms.Oracle(1.0, 8), max_new_tokens=12, eos=(), stop=stop)
    assert out.text[0] == words[: words.index(stop) + 3]
    assert out.finish == ["stop"]
    assert out.trace.tokens == len(out.tokens[0])


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids, **_):
        return "".join(chr(0x4E00 + i) for i in ids)

    def get_vocab(self):
        return {chr(0x4E00 + i): i for i in range(61)}


def test_stopped_rows_stay_as_they_are(llama):
    prompts = prompts_of(3, 7, 5)
    free = plain(llama, prompts, 20, eos=())
    end = free[1][2]
    together = ms.generate(llama, prompts, ms.Oracle(0.7, 3), max_new_tokens=20, eos=end)
    for row, prompt in enumerate(prompts):
        alone = ms.generate(llama, [prompt], max_new_tokens=20, eos=end)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert together.finish[row] == alone.finish[0]


# Prompts.


def test_batched_rows_equal_single_rows():  # pitfall 19: GPT-2 has absolute positions
    target = tiny("gpt2")
    prompts = prompts_of(1, 4, 11, 7)
    single = [plain(target, [p], 10)[0] for p in prompts]
    assert plain(target, prompts, 10) == single


@pytest.mark.parametrize("length", range(1, 21))
def test_the_first_token_does_not_depend_on_the_prompts_length(llama, length):  # pitfall 2
    prompt = prompts_of(length, seed=length)[0]
    with torch.no_grad():
        expected = int(llama.model(torch.tensor([prompt])).logits[0, -1].argmax())
    for drafter in (None, ms.PromptLookup(3), ms.Oracle(0.5, 3)):
        out = ms.generate(llama, [prompt], drafter, max_new_tokens=2, eos=())
        assert int(out.tokens[0][0]) == expected


def test_a_long_prompt_is_read_in_chunks(llama, monkeypatch):
    prompts = prompts_of(30, 3, 17)
    expected = plain(llama, prompts, 6)
    # by its full name: minispec.generate is the function
    monkeypatch.setattr(sys.modules["minispec.generate"], "PREFILL_CHUNK", 7)
    assert plain(llama, prompts, 6) == expected


def test_prompts_come_in_many_forms(llama):
    one = prompts_of(5)[0]
    expected = plain(llama, [one], 4)
    for form in (one, [one], torch.tensor(one), torch.tensor([one]), [torch.tensor(one)]):
        assert plain(llama, form, 4) == expected


# Chance.


def test_seeds(llama):  # pitfall 9
    def run(seed, drafter=None):
        return plain_tokens(
            ms.generate(
                llama,
                prompts_of(4) * 3,
                drafter,
                max_new_tokens=16,
                sampling=ms.Sampling(1.0),
                seed=seed,
            )
        )

    before = torch.get_rng_state()
    for drafter in (None, ms.Oracle(0.6, 3), ms.PromptLookup(3)):
        first = run(1, drafter)
        assert run(1, drafter) == first
        assert run(2, drafter) != first
        assert len({tuple(row) for row in first}) == 3  # rows do not share their chance
    assert torch.equal(before, torch.get_rng_state())


def plain_tokens(out: ms.Generation) -> list[list[int]]:
    return [t.tolist() for t in out.tokens]


def test_tiny_temperature_equals_greedy(llama):  # pitfall 8
    prompts = prompts_of(4, 6)
    tiny_t = ms.generate(
        llama, prompts, ms.Oracle(0.5, 3), max_new_tokens=16, sampling=ms.Sampling(1e-6)
    )
    assert plain_tokens(tiny_t) == plain(llama, prompts, 16)


def test_a_drafter_can_serve_two_runs_at_once(llama):
    other = ms.DraftModel(tiny_transformer("llama", torch.float64, 1), 3)
    a, b = prompts_of(4, 9)
    both = zip(
        ms.stream(llama, [a], other, max_new_tokens=12, eos=()),
        ms.stream(llama, [b], other, max_new_tokens=12, eos=()),
        strict=True,
    )
    tokens = [(x.token, y.token) for x, y in both]
    assert [t for t, _ in tokens] == plain(llama, [a], 12, eos=())[0]
    assert [t for _, t in tokens] == plain(llama, [b], 12, eos=())[0]


def test_two_threads_can_share_a_target(llama):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [prompts_of(n, seed=n) for n in range(3, 11)]
    expected = [plain(llama, p, 16, eos=()) for p in prompts]
    drafters = [ms.Oracle(0.6, 3), ms.EarlyExit(1, 2), ms.PromptLookup(2), None] * 2
    with ThreadPoolExecutor(4) as pool:
        outs = pool.map(
            lambda job: ms.generate(llama, job[0], job[1], max_new_tokens=16, eos=()),
            zip(prompts, drafters, strict=True),
        )
        assert [plain_tokens(out) for out in outs] == expected


# Streams.


def test_the_stream_is_the_result(llama):
    pieces: list[ms.Piece] = []
    out = ms.generate(
        llama, prompts_of(3, 5), ms.Oracle(0.7, 4), max_new_tokens=15, stream=pieces.append
    )
    for row in range(2):
        mine = [p for p in pieces if p.row == row]
        assert [p.token for p in mine] == out.tokens[row].tolist()
        assert [p.accepted for p in mine] == out.accepted[row].tolist()
        assert "".join(p.text for p in mine) == out.text[row]


def test_what_was_accepted_and_what_was_the_targets_own(llama):
    out = ms.generate(llama, prompts_of(3), ms.Oracle(1.0, 3), max_new_tokens=9, eos=())
    #   prefill's own | three drafts and the bonus | ... | one left: cut to the budget
    assert out.accepted[0].int().tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0]


# Complaints.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": []}, ValueError, "no prompts"),
        ({"prompts": [[]]}, ValueError, "prompt 0 is empty"),  # pitfall 20
        ({"prompts": [[3, 61]]}, ValueError, "61 is outside the vocabulary of 61"),
        ({"prompts": [[3, -1]]}, ValueError, "-1 is outside"),
        ({"prompts": [[3, 1.5]]}, TypeError, "a prompt is"),
        ({"prompts": 7}, TypeError, "prompts are"),
        ({"prompts": "hello"}, ValueError, "no tokenizer"),
        ({"prompts": [[5] * 128]}, ValueError, "no room for a new one"),
        ({"max_new_tokens": 0}, ValueError, "at least 1"),
        ({"max_new_tokens": -3}, ValueError, "at least 1"),
        ({"max_new_tokens": 2.0}, TypeError, "whole number"),
        ({"max_new_tokens": True}, TypeError, "whole number"),
        ({"drafter": "lookup"}, TypeError, "must be a Drafter"),
        ({"sampling": 0.7}, TypeError, "must be a Sampling"),
        ({"seed": 0.5}, TypeError, "seed"),
        ({"verifier": "magic"}, ValueError, "unknown verifier 'magic'"),
        ({"repetition_penalty": 1.2}, TypeError, "its own prefix"),  # pitfall 16
        ({"temperature": 0.7}, TypeError, "Sampling"),
        ({"maximum": 3}, TypeError, "no such argument"),
        ({"stop": ""}, ValueError, "empty stop string"),
        ({"stop": "x"}, ValueError, "need a tokenizer"),
        ({"target": "smollm2"}, TypeError, "load_target"),
        ({"prompts": torch.empty(0, 5, dtype=torch.long)}, ValueError, "no prompts"),
        ({"prompts": b"ab"}, TypeError, "a prompt is"),
        ({"max_new_tokens": 10**30}, ValueError, "at least 1"),
        ({"seed": 2**64}, ValueError, "64 bits"),
        ({"eos": 1.5}, TypeError, "eos must be"),
        ({"eos": [1.5]}, TypeError, "eos must be"),
        ({"eos": True}, TypeError, "eos must be"),
        ({"stop": [5]}, TypeError, "stop must be"),
        ({"stream": True}, TypeError, "function of a Piece"),
        ({"verifier": 5}, ValueError, "unknown verifier"),
        ({"drafter": ms.EarlyExit(9)}, ValueError, r"layer must be a whole number in 1\.\.2"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(llama, monkeypatch, changes, error, message):
    def no_work(*args, **kwargs):
        raise AssertionError("work was begun")

    monkeypatch.setattr(ms.LanguageModel, "forward", no_work)
    arguments = {"target": llama, "prompts": [[3]], "max_new_tokens": 4, **changes}
    with pytest.raises(error, match=message):
        ms.generate(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_that_are_not_numbers_are_an_error(dtype):  # pitfall 23
    target = tiny("llama", dtype)
    with torch.no_grad():
        target.model.lm_head.weight[7] = float("nan")
    for sampling in (ms.Sampling(), ms.Sampling(1.0)):
        with pytest.raises(FloatingPointError, match="row 0 hold NaN or infinity"):
            ms.generate(target, prompts_of(3), max_new_tokens=4, sampling=sampling)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Scripted([61]), "token 61 is outside"),
        (Scripted([1], torch.eye(61)[2:3]), "probability 0"),
        (Scripted([1], torch.ones(1, 60) / 60), "whole vocabulary"),
        (Scripted([1], torch.ones(1, 61)), "q is no law"),
    ],
)
def test_a_faulty_proposal_is_refused(llama, drafter, message):
    with pytest.raises(ValueError, match=message):
        ms.generate(llama, prompts_of(3), drafter, max_new_tokens=4, sampling=ms.Sampling(1.0))


class Padded(ms.Drafter):
    """Leaves whatever in the padding, and in its second round something worse."""

    max_nodes = 3

    def __init__(self, later: int | None = None) -> None:
        self.later = later

    def propose(self, rows):
        tokens = torch.tensor([[4, -1, 99]]).expand(rows.batch, -1)
        if self.later is not None and hasattr(self, "once"):
            tokens = tokens.clone().index_fill(1, torch.tensor([0]), self.later)
        self.once = True
        parents = torch.tensor([[-1, 7, -5]]).expand(rows.batch, -1)
        valid = torch.tensor([[True, False, False]]).expand(rows.batch, -1)
        return ms.TokenTree(tokens, parents, valid=valid)


def test_padding_may_hold_anything(llama):
    prompts = prompts_of(3, 6)
    out = ms.generate(llama, prompts, Padded(), max_new_tokens=8, eos=())
    assert plain_tokens(out) == plain(llama, prompts, 8, eos=())


def test_a_drafter_that_goes_wrong_later_is_a_clear_error_too(llama):
    with pytest.raises(ValueError, match="token 77 is outside"):
        ms.generate(llama, prompts_of(3), Padded(later=77), max_new_tokens=8, eos=())


def test_a_drafter_that_proposes_nothing_at_all_is_a_clear_error(llama):
    class Nothing(ms.Drafter):
        def propose(self, rows):
            return None

    with pytest.raises(TypeError, match=r"Nothing\.propose must return a TokenTree"):
        ms.generate(llama, prompts_of(3), Nothing(), max_new_tokens=4)


def test_numpy_numbers_are_numbers(llama):
    import numpy as np

    prompts = [np.array(p) for p in prompts_of(3, 6)]
    out = ms.generate(
        llama, prompts, ms.PromptLookup(np.int64(3)), max_new_tokens=np.int64(8), eos=np.int64(1)
    )
    assert plain_tokens(out) == plain(llama, prompts_of(3, 6), 8, eos=1)


def test_training_mode_is_refused():
    target = tiny("gpt2")
    target.model.train()
    with pytest.raises(ValueError, match="training mode"):
        ms.generate(target, prompts_of(3), max_new_tokens=3)


def test_autocast_around_the_call_changes_nothing():
    target = tiny("llama", torch.float32)
    expected = plain(target, prompts_of(5, 9), 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(target, prompts_of(5, 9), 6) == expected


def test_a_draft_model_reads_a_long_prompt_in_chunks(llama, monkeypatch):
    prompts = prompts_of(30, 3, 17)
    expected = plain(llama, prompts, 9, eos=())
    monkeypatch.setattr("minispec.drafters.draft_model.CHUNK", 7)
    out = ms.generate(llama, prompts, ms.DraftModel(llama, 3), max_new_tokens=9, eos=())
    assert plain_tokens(out) == expected
    assert out.trace.alpha == 1  # the chunks gave the draft the very cache of one pass


def test_lookup_of_more_than_the_text_holds(llama):
    for prompt in ([[5]], prompts_of(4)):
        out = ms.generate(llama, prompt, ms.PromptLookup(3, max_ngram=12), max_new_tokens=9, eos=())
        assert plain_tokens(out) == plain(llama, prompt, 9, eos=())


def test_more_nodes_than_announced_are_refused(llama):
    drafter = Scripted([3, 4, 5])
    drafter.max_nodes = 2
    with pytest.raises(ValueError, match="max_nodes is 2"):
        ms.generate(llama, prompts_of(3), drafter, max_new_tokens=4)


# What drafts are worth.


def test_a_drafter_that_is_always_wrong_costs_rounds_and_changes_nothing(llama):  # pitfall 6
    prompts = prompts_of(3, 6)
    out = ms.generate(llama, prompts, AlwaysWrong(3), max_new_tokens=10, eos=())
    assert plain_tokens(out) == plain(llama, prompts, 10, eos=())
    assert out.trace.alpha == 0
    assert out.trace.tau == 1
    assert out.trace.passes == 10


def test_a_drafter_that_is_the_target_is_always_right(llama):
    for sampling in (ms.Sampling(), ms.Sampling(1.0)):
        out = ms.generate(
            llama,
            prompts_of(3, 6),
            ms.DraftModel(llama, 3),
            max_new_tokens=13,
            sampling=sampling,
            eos=(),
        )
        assert out.trace.alpha == 1
        assert out.trace.passes == 1 + 3  # the prefill's token, then 4 + 4 + 4


def test_early_stop_saves_drafts_and_keeps_the_text(llama):
    other = tiny_transformer("llama", torch.float64, 1)
    prompts = prompts_of(3, 6)
    whole = ms.generate(llama, prompts, ms.DraftModel(other, 5), max_new_tokens=20)
    for options in ({"min_top": 0.7}, {"max_entropy": 0.8}):
        early = ms.generate(llama, prompts, ms.DraftModel(other, 5, **options), max_new_tokens=20)
        assert plain_tokens(early) == plain_tokens(whole)
        drafted = [t.trace.to_frame()["drafted"].mean() for t in (early, whole)]
        assert drafted[0] < drafted[1]


def test_early_exit_shares_layers_and_cache(llama):
    cut = llama.first_layers(2)
    ours = {id(p) for p in llama.model.parameters()}
    assert all(id(p) in ours for p in cut.model.parameters())
    assert llama.num_layers == 3  # the target itself is whole
    cache = llama.new_cache(1, 8)
    part = cache.first_layers(2)
    assert part.layers[0][0].data_ptr() == cache.layers[0][0].data_ptr()


def test_early_exit_at_a_layer_that_is_not_there(llama):
    for layer in (3, 9):
        with pytest.raises(ValueError, match=r"layer must be a whole number in 1\.\.2"):
            ms.generate(llama, prompts_of(3), ms.EarlyExit(layer), max_new_tokens=4)


@pytest.mark.parametrize("make", [ms.PromptLookup, ms.EarlyExit, ms.Oracle])
@pytest.mark.parametrize("num", [0, -1, 2.5, True])
def test_drafters_check_their_numbers(make, num):
    with pytest.raises(ValueError, match="num_tokens must be a whole number >= 1"):
        make(num_tokens=num)


def test_lookup_refuses_a_range_that_is_none():
    with pytest.raises(ValueError, match="min_ngram 4 is above max_ngram 3"):
        ms.PromptLookup(min_ngram=4)


def test_lookup_finds_the_longest_and_then_the_latest_match():
    from minispec.drafters import Rows

    def propose(text, num=3, max_ngram=3, min_ngram=1):
        tokens = torch.tensor([text + [0] * 4])
        length = torch.tensor([len(text)])
        rows = Rows(tokens, length, length, length + 4, length < 0, ms.Sampling(), None)
        tree = ms.PromptLookup(num, max_ngram, min_ngram).propose(rows)
        return tree.tokens[0][tree.valid[0]].tolist()

    assert propose([1, 2, 3, 9, 8, 7, 2, 3, 5, 1, 2, 3]) == [9, 8, 7]  # three match, not two
    assert propose([2, 3, 9, 4, 2, 3, 8, 6, 2, 3]) == [8, 6, 2]  # the later of two places
    assert propose([2, 3, 9, 4, 7, 3], max_ngram=3) == [9, 4, 7]  # one token is better than none
    assert propose([2, 3, 9, 4, 7, 3], min_ngram=2) == []
    assert propose([2, 3, 9, 4, 2, 3], min_ngram=2) == [9, 4, 2]
    assert propose([2, 3, 9, 4, 2, 3], min_ngram=3) == []
    assert propose([4, 5, 6]) == []
    assert propose([4]) == []
    assert propose([6, 6]) == [6]  # what follows is cut at the end of the text


def test_a_round_without_a_draft_is_a_plain_pass(llama, monkeypatch):
    """Padding that no row uses is not read: a lookup that finds nothing costs a plain step."""
    widths = []
    forward = type(llama).forward

    def watch(self, cache, tokens, *args, **kwargs):
        widths.append(tokens.shape[1])
        return forward(self, cache, tokens, *args, **kwargs)

    monkeypatch.setattr(type(llama), "forward", watch)
    out = ms.generate(llama, prompts_of(6), ms.PromptLookup(8), max_new_tokens=30, eos=())
    drafted = [int(r.drafted.max()) for r in out.trace.rounds]
    assert widths[1:] == [n + 1 for n in drafted]
    assert 0 in drafted, "the case does not test what it should"
    assert max(drafted) > 0
