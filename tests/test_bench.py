"""The benchmark: ratios from rows of known times, turns that interleave, failures that are told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import VOCAB, Scripted, tiny
from rich.console import Console
from test_models import words

import minispec as ms
from minispec import bench
from minispec.bench import BenchResult, Method, Row, run_bench, with_peers
from minispec.bench_report import OURS, THEIRS, ratio
from minispec.demo import Prompt
from minispec.peers import peer_generate
from minispec.trace import pooled

NEW = 10


@pytest.fixture
def target() -> ms.LanguageModel:
    model = tiny()
    model.tokenizer = words(VOCAB)
    return model


def prompts(*kinds: str, each: int = 2) -> list[Prompt]:
    texts = (" ".join(f"w{(7 * i + j) % 50 + 5}" for j in range(4 + i % 3)) for i in range(99))
    return [Prompt(f"{k}-{i}", k, "dev", next(texts)) for k in kinds for i in range(each)]


# Ratios, from rows written by hand.


def row(unit: int, method: str, tokens: int, rounds_s: float, kind: str = "a", **more) -> Row:
    made = Row(unit, f"p{unit}", kind, 1, 0, 0, 0.0, OURS, method)
    made.tokens, made.emitted, made.rounds_s = tokens + 1, tokens, rounds_s
    made.whole_s, made.rounds, made.live = rounds_s + 1.0, tokens, tokens
    made.draft_s, made.target_s = 0.25 * rounds_s, 0.5 * rounds_s
    for name, value in more.items():
        setattr(made, name, value)
    return made


def by_hand() -> BenchResult:
    fast = dict(tried_at=[5, 4], accepted_at=[4, 1], rounds=5, live=5)
    rows = [
        row(0, "plain", 10, 10.0),
        row(1, "plain", 20, 22.0),
        row(2, "plain", 10, 11.0, "b"),
        row(0, "fast", 10, 5.0, **fast),  # 2 times as fast
        row(1, "fast", 20, 5.5, **fast),  # 4 times
        row(2, "fast", 10, 11.0, "b", **(fast | {"tried_at": [5], "accepted_at": [5]})),  # 1 time
    ]
    return BenchResult(pd.DataFrame([asdict(r) for r in rows]))


def line(result: BenchResult, method: str, kind: str = "all", engine: str = OURS):
    found = result.summary().query("method == @method and kind == @kind and engine == @engine")
    assert len(found) == 1
    return found.iloc[0]


def test_ratios_are_of_sums_and_not_means_of_ratios():
    fast = line(by_hand(), "fast")
    assert fast.speedup == pytest.approx((43 / 40) / (21.5 / 40))
    assert fast.whole == pytest.approx((46 / 43) / (24.5 / 43))
    assert line(by_hand(), "fast", "a").speedup == pytest.approx((32 / 30) / (10.5 / 30))
    assert line(by_hand(), "plain").speedup == 1


def test_a_method_that_writes_more_is_judged_by_the_token():
    rows = [row(u, "plain", 10, 10.0) for u in range(3)]
    rows += [row(u, "long", 40, 40.0) for u in range(3)]
    assert line(BenchResult(pd.DataFrame([asdict(r) for r in rows])), "long").speedup == 1


def test_overhead_tau_and_alpha_follow_from_the_rows():
    fast = line(by_hand(), "fast")
    assert fast.tau == pytest.approx(40 / 15)
    assert fast.overhead == pytest.approx((21.5 / 15) / (43 / 40))
    assert fast.speedup == pytest.approx(fast.tau / fast.overhead)
    assert fast.n_alpha == pytest.approx([13 / 15, 2 / 8])
    assert fast.alpha == pytest.approx(15 / 23)
    assert (fast.draft, fast.target, fast.rest) == pytest.approx((0.25, 0.5, 0.25))


def test_prompts_that_a_method_failed_on_are_left_out_of_its_base_too():
    result = by_hand()
    failed = (result.frame["method"] == "fast") & (result.frame["unit"] == 1)
    result.frame.loc[failed, "error"] = "Boom: no"
    fast = line(result, "fast")
    assert fast.speedup == pytest.approx((21 / 20) / (16 / 20))
    assert (fast.failed, fast.calls, fast.error) == (1, 3, "Boom: no")


def test_repeats_of_a_prompt_are_one_unit():
    frame = by_hand().frame
    twice = pd.concat([frame, frame.assign(repeat=1)], ignore_index=True)
    for method in ("plain", "fast"):
        one, two = line(by_hand(), method), line(BenchResult(twice), method)
        names = ["speedup", "speedup_low", "speedup_high", "tau", "alpha", "overhead"]
        pd.testing.assert_series_equal(
            one[names], two[names], check_names=False, check_index_type=False
        )


def test_one_disturbed_repeat_of_three_changes_nothing_and_is_told():
    from minispec.bench_report import disturbed

    thrice = pd.concat([by_hand().frame.assign(repeat=r) for r in range(3)], ignore_index=True)
    assert disturbed(thrice) == 3  # unit 2 of the fast one takes twice its usual time a round
    busy = (thrice["method"] == "plain") & (thrice["unit"] == 1) & (thrice["repeat"] == 1)
    thrice.loc[busy, ["rounds_s", "whole_s"]] *= 3
    assert disturbed(thrice) == 4
    assert line(BenchResult(thrice), "fast").speedup == line(by_hand(), "fast").speedup
    assert "In 4 calls a round took" in text_of(BenchResult(thrice))


def test_intervals_cover_the_true_ratio():
    """Prompts differ in pace, methods in more; 95 % intervals hold the truth in 88 to 99 of 100.

    An interval that forgets the pairing would be far wider: that is checked as well.
    """
    chance, hits, widths, loose = np.random.default_rng(0), 0, [], []
    for _ in range(200):
        tokens = np.full(20, 64.0)
        pace = chance.lognormal(0, 0.5, 20)  # of a prompt, alike for both methods
        base = tokens * pace * chance.lognormal(0, 0.05, 20)
        fast = tokens * pace * chance.lognormal(0, 0.05, 20) / 1.5
        value, low, high = ratio(fast, tokens, base, tokens)
        assert low <= value <= high
        hits += low <= 1.5 <= high
        widths.append(high - low)
        _, low, high = ratio(chance.permutation(fast), tokens, base, tokens)
        loose.append(high - low)
    assert 0.88 <= hits / 200 <= 0.99
    assert np.mean(loose) > 5 * np.mean(widths)


def test_no_interval_is_made_up_for_two_prompts():
    value, low, high = ratio([1, 2], [1, 1], [2, 4], [1, 1])
    assert value == 2
    assert math.isnan(low)
    assert math.isnan(high)


# The run.


def ways(target: ms.LanguageModel) -> list[Method]:
    return with_peers(
        [
            Method("plain"),
            Method("prompt lookup", ms.PromptLookup(4)),
            Method("early exit", ms.EarlyExit(2, 2)),
            Method("draft model", ms.DraftModel(target.first_layers(2), 3)),
            Method("oracle", ms.Oracle(0.8, 4)),
        ]
    )


def test_every_method_and_peer_gives_the_greedy_text(target):
    result = run_bench(target, ways(target), prompts("a", "b"), max_new_tokens=NEW)
    frame = result.frame
    assert (frame["error"] == "").all(), frame["error"].unique()
    assert (frame["identical"] == 1).all()
    assert set(frame.loc[frame["engine"] == THEIRS, "method"]) == {
        "plain",
        "prompt lookup",
        "early exit",
        "draft model",
    }
    assert frame.groupby(["engine", "method"]).size().eq(4).all()


def test_a_wrong_text_is_counted_and_judged(target):
    wrong = Method("wrong", ms.PromptLookup(2))
    tokens = torch.tensor([5, 6, 7])
    rows = [Row(0, "p", "a", 1, 0, 0, 0.0, OURS, name) for name in ("plain", "wrong")]
    good = ms.generate(target, [[5, 6]], max_new_tokens=3, eos=()).tokens[0]
    assert not torch.equal(good, tokens)
    bench._compare(target, [[5, 6]], [(rows[0], [good]), (rows[1], [tokens])], judge=True)
    assert (rows[0].identical, rows[1].identical, rows[1].faults, rows[1].near_ties) == (1, 0, 1, 0)
    assert wrong.name == rows[1].method


def test_metrics_are_those_of_the_traces(target):
    asked = prompts("a", "b")
    drafter = ms.EarlyExit(2, 3)
    result = run_bench(target, {"early exit": drafter}, asked, max_new_tokens=NEW)
    outs = [ms.generate(target, p.text, drafter, max_new_tokens=NEW) for p in asked]
    trace, found = pooled(o.trace for o in outs), line(result, "early exit")
    assert found.tau == pytest.approx(trace.tau)
    assert found.alpha == pytest.approx(trace.alpha)
    assert found.n_alpha == pytest.approx(trace.n_alpha)
    assert result.frame.query("method == 'early exit'")["tokens"].sum() == trace.tokens


def test_turns_interleave_and_their_order_is_drawn(target):
    asked = prompts("a", each=6)
    drafters = {"plain": None, "one": ms.PromptLookup(2), "two": ms.PromptLookup(3)}
    seen: list[str] = []

    def run(seed: int):
        seen.clear()
        return run_bench(target, drafters, asked, max_new_tokens=2, seed=seed, progress=seen.append)

    frame = run(0).frame
    steps = [s.split(": ")[1] for s in seen if not s.startswith("warm-up")]
    turns = [steps[i : i + 3] for i in range(0, len(steps), 3)]
    assert all(sorted(turn) == ["one", "plain", "two"] for turn in turns)  # each once a prompt
    assert len(set(map(tuple, turns))) > 1  # and not always in one order
    told = frame.sort_values(["unit", "order"])["method"].tolist()
    assert told == steps
    assert run(0).frame["order"].tolist() == frame["order"].tolist()
    assert run(1).frame["order"].tolist() != frame["order"].tolist()


def test_an_oracle_spoils_other_places_in_each_prompt(target):
    seeds = [bench._seeded(Method("oracle", ms.Oracle(0.5, 4)), s).drafter.seed for s in (3, 4)]
    assert seeds == [3, 4]


def test_batches_are_full_and_of_one_kind(target):
    asked = [*prompts("a", each=3), *prompts("b", each=2)]
    groups = bench.batches(asked, 2)
    assert [[p.id for p in g] for g in groups] == [["a-0", "a-1"], ["a-2", "a-0"], ["b-0", "b-1"]]
    result = run_bench(target, ways(target), asked, batch=2, max_new_tokens=NEW)
    good = result.frame[result.frame["error"] == ""]
    assert set(good["rows"]) == {2}
    assert (good["identical"] == 2).all()
    failed = result.frame[result.frame["error"] != ""]
    assert set(failed["engine"]) == {THEIRS}
    assert set(failed["method"]) == {"prompt lookup", "early exit", "draft model"}
    assert failed["error"].str.contains("batch_size").all()  # transformers says so itself


def test_temperatures_stand_apart(target):
    result = run_bench(
        target, ways(target), prompts("a"), temperatures=[1.0, 0.0], max_new_tokens=NEW
    )
    summary = result.summary()
    assert (result.frame["error"] == "").all(), result.frame["error"].unique()
    assert sorted(set(summary["temperature"])) == [0.0, 1.0]
    assert len(summary) == 2 * len(ways(target))
    assert (summary.query("temperature == 0")["identical"] == 2).all()


class Broken(ms.Drafter):
    max_nodes = 1

    def propose(self, rows):
        raise KeyError("nothing here")


def test_a_failing_method_is_reported_and_the_others_go_on(target):
    found = [Method("plain"), Method("broken", Broken()), Method("gone", missing="no weights")]
    result = run_bench(target, found, prompts("a", each=3), max_new_tokens=4)
    broken, gone, plain = (line(result, name) for name in ("broken", "gone", "plain"))
    assert (broken.failed, broken.calls) == (3, 3)
    assert "KeyError: 'nothing here'" in broken.error
    assert gone.error == "no weights"
    assert plain.failed == 0
    shown = text_of(result)
    assert "broken at temperature 0 failed on 3 of 3 calls: KeyError" in shown
    assert "gone at temperature 0 failed on 3 of 3 calls: no weights" in shown


def test_a_failing_peer_is_reported_and_the_others_go_on(target, monkeypatch):
    def refuse(*args, **options):
        if "prompt_lookup_num_tokens" in options:
            raise ValueError("not today")
        return real(*args, **options)

    real = target.model.generate
    monkeypatch.setattr(target.model, "generate", refuse)
    result = run_bench(target, ways(target), prompts("a"), max_new_tokens=4)
    peer = line(result, "prompt lookup", engine=THEIRS)
    assert peer.failed == peer.calls == 2
    assert line(result, "plain", engine=THEIRS).failed == 0
    assert "prompt lookup, transformers at temperature 0 failed on 2 of 2 calls" in text_of(result)


def test_plain_decoding_must_work(target, monkeypatch):
    def refuse(*args):
        raise FloatingPointError("nan")

    monkeypatch.setattr(bench, "_Run", refuse)
    with pytest.raises(RuntimeError, match="plain decoding itself fails: FloatingPointError"):
        run_bench(target, {"plain": None}, prompts("a"), max_new_tokens=4)


def test_memory_counts_caches_and_drafter_weights_once(target):
    asked = prompts("a", each=1)
    small = tiny(seed=3, num_hidden_layers=1)
    drafters = {
        "early exit": ms.EarlyExit(2, 3),
        "own cache": ms.DraftModel(target.first_layers(2), 3),
        "own weights": ms.DraftModel(small, 3),
    }
    result = run_bench(target, drafters, asked, max_new_tokens=NEW)
    memory = {name: line(result, name).memory for name in ("plain", *drafters)}
    ids = target.encode(asked[0].text)
    per_token = sum(shape.bytes_per_token for shape in target.layer_shapes)
    assert 0 <= memory["plain"] - (len(ids) + NEW + 1) * per_token < 100  # and the lengths
    deeper = (len(ids) + NEW + 1 + 3) * per_token
    assert memory["early exit"] < deeper + 2000  # its cache is the target's, its layers too
    weights = sum(p.nbytes for p in small.model.parameters())
    assert deeper + weights < memory["own weights"] < deeper + weights + deeper
    assert deeper < memory["own cache"] < 2 * deeper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"repeats": 1.5}, "repeats must be"),
        ({"temperatures": []}, "no temperatures"),
        ({"temperatures": [-1]}, "temperature must be"),
        ({"prompts": []}, "no prompts"),
        ({"methods": [Method("plain"), Method("plain")]}, "two methods have one name"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(target, options, message, monkeypatch):
    monkeypatch.setattr(bench, "_call", lambda *a: pytest.fail("work was done"))
    options = {"methods": {"plain": None}, "prompts": prompts("a")} | options
    with pytest.raises(ValueError, match=message):
        run_bench(target, **options)


def test_the_registry_reports_weights_that_are_not_there(target, monkeypatch):
    def load(name: str, target):
        if name == "medusa":
            raise FileNotFoundError("data/heads/medusa.safetensors is not there")
        return Scripted([5])

    monkeypatch.setattr(bench, "trained", lambda: ["medusa", "scripted"])
    monkeypatch.setattr(bench, "load_trained", load)
    found = {m.name: m for m in bench.methods(target, target.first_layers(1))}
    assert list(found) == bench.names(draft_model=True)
    assert set(found) >= {"plain", "prompt lookup", "early exit", "oracle", "draft model"}
    assert found["medusa"].missing == "data/heads/medusa.safetensors is not there"
    assert found["scripted"].drafter.max_nodes == 1
    assert [m.name for m in with_peers(found.values()) if m.engine == THEIRS] == [
        "plain",
        "prompt lookup",
        "early exit",
        "draft model",
    ]


def test_methods_are_chosen_by_name_and_plain_comes_along():
    found = ["plain", "prompt lookup", "early exit", "eagle-3"]
    chosen = ["plain", "prompt lookup", "eagle-3"]
    assert bench.choose(found, ["eagle-3", " prompt-lookup"]) == chosen
    with pytest.raises(ValueError, match="no method 'magic': there are plain, prompt lookup"):
        bench.choose(found, ["magic"])


def test_prompts_are_picked_by_split_kind_and_limit():
    found = bench.pick_prompts("test", ["retrieval", "mathematics"], 2)
    assert [p.id for p in found] == [
        f"{k}-0{i}" for k in ("mathematics", "retrieval") for i in (2, 4)
    ]
    assert len(bench.pick_prompts("all")) == 2 * len(bench.pick_prompts("dev"))
    for arguments in (("nowhere",), ("test", ["poetry"]), ("test", [], 0)):
        with pytest.raises(ValueError, match=r"split must|no kind|limit must"):
            bench.pick_prompts(*arguments)


# transformers' side.


def test_peers_sample_from_the_same_law_and_leave_chance_alone(target):
    """At temperature .5, top-k 3: the first token's law over 400 draws, against the exact one."""
    from scipy import stats

    law = ms.Sampling(0.5, top_k=3)
    prompt = [5, 9, 12]
    p = law.probs(target.model(torch.tensor([prompt])).logits[0, -1])
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    drawn = peer_generate(target, [prompt] * 400, max_new_tokens=1, sampling=law, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    counts = torch.bincount(torch.cat(drawn), minlength=VOCAB)[p > 0]
    assert int(counts.sum()) == 400
    expected = 400 * (p[p > 0] / p.sum()).detach().double().numpy()
    assert stats.chisquare(counts.numpy(), expected * 400 / expected.sum()).pvalue > 1e-4
    hotter = ms.Sampling(1.5, top_k=3).probs(target.model(torch.tensor([prompt])).logits[0, -1])
    other = 400 * hotter[p > 0].detach().double().numpy()
    assert stats.chisquare(counts.numpy(), other * 400 / other.sum()).pvalue < 1e-4


def test_peers_are_told_the_draft_length_and_the_config_comes_back(target, monkeypatch):
    seen = []
    real = type(target.model).generate

    def spy(self, *args, **options):
        seen.append((self.generation_config.num_assistant_tokens, options))
        return real(self, *args, **options)

    monkeypatch.setattr(type(target.model), "generate", spy)
    before = target.model.generation_config
    draft = ms.DraftModel(target.first_layers(1), 6)
    before.repetition_penalty = 1.7  # what the model's own config says must not bend their work
    for drafter in (ms.EarlyExit(2, 5), draft):
        peer_generate(target, [[5, 9, 12]], drafter, max_new_tokens=4)
    outer = [(num, o) for num, o in seen if "generation_config" not in o]  # the drafts' have one
    assert (outer[0][0], outer[0][1]["assistant_early_exit"]) == (5, 2)
    assert "assistant_model" in outer[1][1]
    assert seen[-1][0] == 6
    assert target.model.generation_config is before
    plain = ms.generate(target, [[5, 9, 12]], max_new_tokens=8).tokens[0]
    assert torch.equal(peer_generate(target, [[5, 9, 12]], max_new_tokens=8)[0], plain)


def test_peers_refuse_what_they_do_not_have(target):
    with pytest.raises(ValueError, match="no method like Oracle"):
        peer_generate(target, [[5]], ms.Oracle())


def test_a_peers_rows_end_at_their_end_of_text(target):
    ids = [[5, 9, 12], [7, 7, 30, 31, 8]]
    ours = ms.generate(target, ids, max_new_tokens=40)
    theirs = peer_generate(target, ids, max_new_tokens=40)
    assert [t.tolist() for t in theirs] == [t.tolist() for t in ours.tokens]
    first = int(ours.tokens[0][4])
    target.__dict__["eos_ids"] = (first,)
    cut = peer_generate(target, ids[:1], max_new_tokens=40)[0].tolist()
    assert cut == ours.tokens[0].tolist()[: ours.tokens[0].tolist().index(first) + 1]


# What is kept and shown.


def text_of(result: BenchResult, width: int = 100) -> str:
    console = Console(record=True, width=width)
    console.print(result)
    return " ".join(console.export_text().split())


@pytest.fixture(scope="module")
def measured() -> BenchResult:
    model = tiny()
    model.tokenizer = words(VOCAB)
    found = [*ways(model), Method("gone", missing="no weights")]
    asked = prompts("a", "question_answering", each=3)
    return run_bench(model, found, asked, temperatures=[0, 1], max_new_tokens=NEW)


def test_json_gives_the_same_result_back(measured, tmp_path):
    path = measured.to_json(tmp_path / "bench.json")
    again = BenchResult.load(path)
    pd.testing.assert_frame_equal(again.frame, measured.frame)
    pd.testing.assert_frame_equal(again.summary(), measured.summary())
    assert again.facts == measured.facts
    assert {"machine", "versions", "threads", "dtype", "batch", "max_new_tokens"} <= set(
        again.facts
    )
    kept = json.loads(path.read_text())
    assert len(kept["summary"]) == len(measured.summary())


def test_a_failed_write_leaves_the_old_file_whole(measured, tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    path.write_text("old")
    spoiled = BenchResult(measured.frame, {"machine": object()})
    with pytest.raises(TypeError):
        spoiled.to_json(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]


def test_the_table_fits_and_says_what_it_must(measured):
    console = Console(record=True, width=100)
    console.print(measured)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)  # nothing was cut off
    text = " ".join(" ".join(lines).split())
    assert "The oracle is no method" in text
    assert "oracle*" in text
    assert "6/6" in text
    assert "gone at temperature 1 failed on 6 of 6 calls: no weights" in text
    plain = line(BenchResult(measured.frame.query("temperature == 0")), "prompt lookup")
    assert f"{plain.speedup:.2f} [{plain.speedup_low:.2f}, {plain.speedup_high:.2f}]" in text


def test_a_wide_table_of_large_ratios_still_fits():
    result = by_hand()
    result.frame.loc[result.frame["method"] == "fast", ["rounds_s", "whole_s"]] /= 8
    result.frame["method"] = result.frame["method"].replace("fast", "prompt lookup")
    console = Console(record=True, width=100)
    console.print(result)
    assert "…" not in console.export_text()


def test_figures_are_drawn_with_the_methods_colours(measured, tmp_path):
    from matplotlib.colors import to_hex

    from minispec import plots

    paths = measured.figures(tmp_path / "figures")
    names = [f"{name}-t{t}.png" for t in (0, 1) for name in ("speedup", "kinds", "shares")]
    assert [p.name for p in paths] == names
    assert all(p.stat().st_size > 5000 for p in paths)
    lines = measured.summary().query("kind == 'all' and temperature == 0")
    axes = plots.speedup_bars(lines).axes
    drawn = dict(
        zip([t.get_text() for t in axes[0].get_yticklabels()], axes[0].patches, strict=True)
    )
    assert to_hex(drawn["prompt lookup"].get_facecolor()).upper() == plots.color("prompt lookup")
    assert "prompt lookup (transformers)" in [t.get_text() for t in axes[1].get_yticklabels()]
    assert "gone" not in drawn
    fast = lines.query("method == 'prompt lookup' and engine == 'minispec'").iloc[0]
    assert drawn["prompt lookup"].get_width() == pytest.approx(fast.speedup)
    shares = plots.share_bars(lines.query("engine == 'minispec'")).axes[0]
    total = sum(bar.get_width() for bar in shares.patches)
    assert total == pytest.approx(lines["overhead"].sum())


def test_a_method_of_ones_own_is_drawn_too(target, tmp_path):
    result = run_bench(target, {"mine": ms.PromptLookup(2)}, prompts("a"), max_new_tokens=4)
    assert len(result.figures(tmp_path)) == 3
