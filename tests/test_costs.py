"""Costs: counts against torch's own counter, formulas against the papers' numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import minispec as ms
from minispec import costs
from minispec.costs import CostModel, Part, PassCost, Roofline, expected_tokens, leviathan


def counted_by_torch(target: ms.LanguageModel, tokens: int, context: int, batch: int) -> dict:
    """FLOPs of a real pass, by module; with plain attention, since fused kernels go uncounted."""
    cache = target.new_cache(batch, context + tokens)
    cache.set_lengths(torch.full((batch,), context))
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as c:
        target.forward(cache, ids)
    return {name: sum(by_op.values()) for name, by_op in c.get_flop_counts().items()}


@pytest.mark.parametrize(("tokens", "context", "batch"), [(1, 0, 1), (4, 10, 2)])
def test_flops_equal_torchs_counter(any_target, tokens, context, batch):
    theirs = counted_by_torch(any_target, tokens, context, batch)
    cost = costs.pass_cost(any_target, tokens, context, batch)
    assert cost.flops == theirs["Global"]


def test_flops_by_part_equal_torchs_counter():
    target = tiny("llama")
    theirs = counted_by_torch(target, 3, 7, 2)
    parts = costs.pass_cost(target, 3, 7, 2).parts
    attention = parts["attention projections"].flops + parts["attention over the cache"].flops
    for part, module in ((attention, "self_attn"), (parts["MLP"].flops, "mlp")):
        assert part == sum(n for name, n in theirs.items() if name.endswith(f".{module}"))
    assert parts["LM head"].flops == theirs["LlamaForCausalLM.lm_head"]


def test_bytes_are_the_weights_once_and_the_cache(any_target):
    """Whatever the shape of the pass: all parameters, less the embedding rows not looked up."""
    head = any_target.model.get_output_embeddings()
    tables = [
        m.weight
        for m in any_target.model.modules()
        if isinstance(m, nn.Embedding) and m.weight is not head.weight
    ]
    fixed = sum(p.nbytes for p in any_target.model.parameters()) - sum(t.nbytes for t in tables)
    embeddings = [m for m in any_target.model.modules() if isinstance(m, nn.Embedding)]
    row = sum(m.weight[0].nbytes for m in embeddings)
    for tokens, context, batch in ((1, 0, 1), (5, 20, 3)):
        cache = any_target.new_cache(batch, context + tokens).nbytes  # read whole
        written = any_target.new_cache(batch, tokens).nbytes
        expected = fixed + row * batch * tokens + cache + written
        assert costs.pass_cost(any_target, tokens, context, batch).bytes == expected


def test_a_tied_head_is_read_once_as_the_head():
    tied, untied = tiny("gemma2"), tiny("llama")
    assert tied.model.lm_head.weight is tied.model.get_input_embeddings().weight
    for target in (tied, untied):
        cost = costs.pass_cost(target)
        assert cost.parts["LM head"].bytes == target.model.lm_head.weight.nbytes
    assert costs.pass_cost(tied).bytes < sum(p.nbytes for p in tied.model.parameters()) * 1.2


def test_a_prefill_reads_logits_at_one_token(llama):
    whole, last = costs.pass_cost(llama, 16), costs.pass_cost(llama, 16, read=1)
    assert whole.parts["LM head"].flops == 16 * last.parts["LM head"].flops
    assert whole.bytes == last.bytes


def test_bytes_follow_the_dtype_and_flops_do_not():
    wide, narrow = tiny(dtype=torch.float32), tiny(dtype=torch.bfloat16)
    a, b = costs.pass_cost(wide, 4, 8), costs.pass_cost(narrow, 4, 8)
    assert a.flops == b.flops
    assert a.bytes == 2 * b.bytes
    assert costs.kv_bytes_per_token(wide) == 2 * costs.kv_bytes_per_token(narrow)
    # Weights alone have an intensity of tokens x batch in 16 bits.
    assert costs.pass_cost(narrow, 5, 0, 3).parts["MLP"].intensity == 15


@pytest.fixture(scope="module")
def llama_8b() -> ms.LanguageModel:
    """Llama-3.1-8B's shape on the meta device: no memory, no download."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        return ms.LanguageModel(LlamaForCausalLM(config).to(torch.bfloat16), trial=False)


def test_known_shapes_without_weights(llama_8b):
    assert costs.kv_bytes_per_token(llama_8b) == 128 * 1024
    cost = costs.pass_cost(llama_8b)
    matrices = 8.03e9 - 128256 * 4096  # the published size, less the embedding
    assert cost.flops == pytest.approx(2 * matrices, rel=2e-3)
    assert cost.intensity == pytest.approx(1, rel=1e-2)
    # Grouped queries: 32 heads read 8 heads' keys, so a token's attention has intensity 4.
    long = costs.pass_cost(llama_8b, 1, 100_000).parts["attention over the cache"]
    assert long.intensity == pytest.approx(4, rel=1e-3)


@pytest.mark.slow
def test_smollm2_keeps_22_5_kib_a_token():
    target = ms.load_target("smollm2", dtype="bfloat16", device="cpu")
    assert costs.kv_bytes_per_token(target) == 22.5 * 1024
    cost = costs.pass_cost(target, 1, 255)
    assert cost.parts["attention over the cache"].bytes == 257 * 22.5 * 1024
    assert cost.parts["LM head"].bytes == 49152 * 576 * 2


@pytest.mark.parametrize(
    "change", [dict(tokens=0), dict(batch=0), dict(context=-1), dict(tokens=1.5), dict(read=-1)]
)
def test_pass_cost_refuses_what_is_no_pass(llama, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        costs.pass_cost(llama, **change)


def test_what_cannot_be_counted_is_refused():
    target = tiny("llama")
    target.model.model.layers[0].mlp.experts = nn.Module()
    target.model.model.layers[0].mlp.experts.stack = nn.Parameter(torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="cannot be counted"):
        costs.pass_cost(target)


# The roofline.


def test_roofline_is_the_slower_of_memory_and_arithmetic():
    roof = Roofline(bandwidth=10.0, peak=200.0)
    assert roof.ridge == 20
    cases = {(5, 10): 1.0, (1000, 10): 5.0, (200, 10): 1.0}  # memory, arithmetic, the ridge
    for (flops, moved), seconds in cases.items():
        cost = PassCost({"x": Part(flops, moved)}, 1, 0, 1)
        assert roof.seconds(cost) == seconds
        assert cost.flops / seconds <= roof.attainable(cost.intensity)
    assert roof.attainable([5, 20, 80]).tolist() == [50, 200, 200]


def test_known_gpus_have_the_published_ridge_points():
    ridges = {name: round(gpu.ridge) for name, gpu in costs.KNOWN_GPUS.items()}
    assert ridges == {
        "H100 SXM": 295,
        "H200": 206,
        "A100-80 SXM": 153,
        "RTX 4090": 164,
        "RTX 3090": 76,
    }


def test_measured_roofline_is_made_of_its_rates():
    roof = costs.measure_roofline(torch.float32, megabytes=8, size=64, repeats=2)
    assert set(roof.rates) == {"sum", "matvec", "copy", "matmul"}
    assert min(roof.rates.values()) > 0
    assert roof.bandwidth == max(roof.rates["sum"], roof.rates["matvec"])
    assert roof.peak == roof.rates["matmul"]
    assert (roof.dtype, roof.threads) == ("float32", torch.get_num_threads())


# Timing.


def test_time_pass_visits_every_point_in_shuffled_turns(llama, monkeypatch):
    seen = []
    forward = type(llama).forward

    def spy(self, cache, tokens, *args, **kwargs):
        assert all(bool(b.isfinite().all()) for pair in cache.buffers for b in pair)
        seen.append((tokens.shape[1], tokens.shape[0], int(cache.lengths_host[0])))
        return forward(self, cache, tokens, *args, **kwargs)

    monkeypatch.setattr(type(llama), "forward", spy)
    before = torch.get_rng_state()
    frame = costs.time_pass(llama, (1, 3), (1, 2), (0, 9), repeats=4)
    assert torch.equal(before, torch.get_rng_state())
    points = list(frame[["tokens", "batch", "context"]].itertuples(index=False, name=None))
    turns = [seen[i : i + 8] for i in range(0, len(seen), 8)]
    assert len(turns) == 5  # one warms up
    assert all(sorted(t) == sorted(points) for t in turns)
    assert len({tuple(t) for t in turns}) > 1
    assert ((frame["low"] <= frame["seconds"]) & (frame["seconds"] <= frame["high"])).all()
    assert set(frame["repeats"]) == {4}
    assert set(frame["threads"]) == {torch.get_num_threads()}
    assert set(frame["dtype"]) == {"float64"}


def test_time_pass_refuses_passes_beyond_the_context(llama):
    with pytest.raises(ValueError, match="do not fit the context of 128"):
        costs.time_pass(llama, (1, 64), context=(100,))


def test_median_interval():
    middle, low, high = costs.median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (middle, low >= 1, high <= 5, low < 3 < high) == (3.0, True, True, True)
    assert costs.median_interval([2.0]) == (2.0, 2.0, 2.0)


# The formulas.


def flat(c: float, plain: float = 1.0) -> CostModel:
    """Leviathan's assumptions: any pass takes the same time, and nothing else takes any."""
    return CostModel([1, 300], [plain, plain], draft_s=c * plain)


def test_leviathans_table_1():
    assert round(leviathan(0.8, 5), 2) == 3.69
    assert round(leviathan(0.9, 10), 2) == 6.86
    assert round(costs.operations(0.8, 5), 2) == 1.63
    assert round(costs.operations(0.9, 10), 2) == 1.60


def test_expected_tokens_is_the_geometric_sum():
    for alpha in (0.0, 0.3, 0.999, 1.0):
        for gamma in (0, 1, 7):
            assert expected_tokens(alpha, gamma) == pytest.approx(
                sum(alpha**i for i in range(gamma + 1))
            )
    assert expected_tokens([0.5, 1.0], 3).tolist() == [1.875, 4.0]
    for bad in ((1.2, 3), (-0.1, 3), (0.5, -1)):
        with pytest.raises(ValueError, match="alpha"):
            expected_tokens(*bad)


def test_leviathans_theorem_is_the_special_case():
    k = np.arange(20)
    for c in (0.0, 0.05, 0.24):
        for alpha in (0.2, 0.6, 1.0):
            predicted = flat(c, plain=0.037).chain_speedup(alpha, k)
            assert np.allclose(predicted, leviathan(alpha, k, c), rtol=1e-12)


@pytest.mark.parametrize(
    ("alpha", "c", "k", "speedup"),
    [
        (0.6, 0.01, 7, 2.30), (0.6, 0.05, 4, 1.92), (0.6, 0.10, 3, 1.67), (0.6, 0.24, 2, 1.32),
        (0.8, 0.01, 14, 4.23), (0.8, 0.05, 8, 3.09), (0.8, 0.10, 6, 2.47), (0.8, 0.24, 3, 1.72),
        (0.9, 0.01, 24, 7.49), (0.9, 0.05, 13, 4.67), (0.9, 0.10, 10, 3.43), (0.9, 0.24, 6, 2.14),
    ],
)  # fmt: skip
def test_best_chain_by_alpha_and_c(alpha, c, k, speedup):
    best, gain = flat(c).best_chain(alpha)
    assert (best, round(gain, 2)) == (k, speedup)


def test_t_goes_through_its_points_and_on():
    model = CostModel([1, 2, 8, 16], [10.0, 11.0, 17.0, 33.0])
    assert [float(model.t(n)) for n in (1, 2, 8, 16)] == [10, 11, 17, 33]
    assert model.t(5) == 14  # between
    assert model.t(20) == 41  # beyond: the last slope, 2 a token
    assert model.t([1, 5, 20]).tolist() == [10, 14, 41]
    assert (np.diff(model.t(np.arange(1, 40))) >= 0).all()
    assert isinstance(model.t(3), float)
    assert CostModel([1], [7.0]).t(9) == 7


def test_rest_and_draft_are_part_of_a_round():
    model = CostModel([1, 5], [10.0, 14.0], draft_s=2.0, rest_s=[1.0, 3.0])
    assert model.plain_s == 11
    assert model.c == pytest.approx(2 / 11)
    assert model.round_s(4) == 14 + 3 + 4 * 2
    assert model.round_s(4, depth=2) == 14 + 3 + 2 * 2
    assert model.chain_speedup(1.0, 4) == pytest.approx(5 * 11 / 25)
    assert CostModel([1], [1.0], rest_s=1.0).overhead(3) == 1


def test_a_chain_is_a_tree_with_one_node_a_level():
    model = CostModel([1, 4, 9], [10.0, 12.0, 20.0], draft_s=0.7, rest_s=1.0)
    alpha, k = 0.7, 5
    values = [alpha**i for i in range(1, k + 1)]
    assert model.tree_speedup(values, k) == pytest.approx(model.chain_speedup(alpha, k))
    # Two siblings at each of two levels (accepted with .6, then .2): 6 nodes, 2 draft steps.
    p = np.array([0.6, 0.2])
    values = [*p, *np.outer(p, p).ravel()]
    assert sum(values) == pytest.approx(0.8 + 0.8**2)
    assert model.tree_speedup(values, 2) == pytest.approx(
        (1 + 0.8 + 0.64) * 11 / (float(model.t(7)) + 1 + 1.4)
    )
    assert model.tree_speedup([], 0) == 1
    with pytest.raises(ValueError, match="probabilities"):
        model.tree_speedup([1.2], 1)


def test_break_even_is_corollary_3_9():
    """With a flat t a chain of one wins if and only if α > c; longer ones do not win earlier."""
    for c in (0.05, 0.3):
        model = flat(c)
        assert model.break_even() == pytest.approx(c, abs=1e-9)
        assert model.best_chain(c - 1e-3)[0] == 0
        assert model.best_chain(c + 1e-3)[0] == 1
    assert np.isnan(flat(1.1).break_even())


def test_advice_names_what_is_to_blame():
    slow = CostModel([1, 2, 64], [1.0, 1.9, 60.0], batch=64)  # arithmetic-bound: t grows with n
    jump = CostModel([1, 2, 9], [1.0, 1.5, 1.6])  # one token costs; eight more do not
    assert "wins" in flat(0.05).advice(0.8)
    assert "8 drafted tokens a round make 3.09x" in flat(0.05).advice(0.8)
    assert "too poor" in flat(0.2).advice(0.1)
    assert "draft step takes 0.80 of a plain step" in flat(0.8).advice(0.6)
    assert "no α would help" in flat(1.2).advice(0.9)
    assert "bound by arithmetic" in slow.advice(0.8)
    assert "batch 64" in slow.advice(0.8)
    assert "wins" in jump.advice(0.45)  # though a chain of one would lose
    assert jump.chain_speedup(0.45, 1) < 1


@pytest.mark.parametrize(
    "bad",
    [
        dict(tokens=[2, 4], seconds=[1.0, 2.0]),
        dict(tokens=[1, 1], seconds=[1.0, 2.0]),
        dict(tokens=[1, 2], seconds=[1.0]),
        dict(tokens=[], seconds=[]),
        dict(tokens=[1, 2], seconds=[1.0, 0.0]),
        dict(tokens=[1, 2], seconds=[1.0, float("nan")]),
        dict(tokens=[1, 2], seconds=[1.0, 2.0], draft_s=-1.0),
        dict(tokens=[1, 2], seconds=[1.0, 2.0], rest_s=[1.0, -1.0]),
    ],
)
def test_a_cost_model_refuses_times_that_are_none(bad):
    with pytest.raises(ValueError, match=r"tokens must rise|times must be"):
        CostModel(**bad)


def test_measured_model_times_draft_and_rest(llama):
    options = dict(context=20, tokens=(1, 2, 4), repeats=2, rounds=6)
    free = CostModel.measure(llama, **options)
    assert free.c == 0
    assert free.plain_s > free.t(1)  # verification takes time
    assert len(free.rest_s) == 3
    assert CostModel.measure(llama, ms.DraftModel(llama, num_tokens=3), **options).c > 0
    with pytest.raises(ValueError, match="proposed nothing"):
        CostModel.measure(llama, Silent(), **options)


class Silent(ms.Drafter):
    def propose(self, rows):
        return ms.TokenTree.empty(rows.batch)


def test_what_a_round_spends_outside_its_pass_and_on_a_draft_step(llama):
    trace = ms.generate(llama, [[5, 6, 7]], ms.Oracle(1.0, 2), max_new_tokens=13, eos=()).trace
    model = CostModel([1, 3], [4.0, 7.0], rest_s=1.0)
    for r in trace.rounds:
        r.draft_s, r.target_s, r.total_s = 5.0, 6.0, 12.0
    assert costs._outside(trace, model) == 12 - 6
    assert costs._draft_step(trace, model) == 5 / 2
    for r in trace.rounds:  # on a GPU a launch returns before the work is done: totals alone
        r.draft_s, r.target_s = 0.0, 0.0
    assert costs._outside(trace, model) == 12 - 7
    assert costs._draft_step(trace, model) == (12 - 7 - 1) / 2
