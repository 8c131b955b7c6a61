"""The GPU's script, on a toy and without a GPU: all of it but the capture."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import minispec as ms
from minispec import synthetic
from minispec.cli import app
from minispec.graphs import StaticPass
from minispec.synthetic import SHAPES, TOY, num_weights, random_target, ratio, run_synthetic
from minispec.trace import Round, Trace


@pytest.fixture(scope="module")
def result() -> synthetic.SyntheticResult:
    return run_synthetic("toy", "cpu", plan=replace(TOY, new_tokens=64))


def shown(result: synthetic.SyntheticResult, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result)
    return console.export_text()


# The model.


def test_the_shapes_have_the_published_sizes():
    assert num_weights(SHAPES["llama-8b"]) == 8_030_261_248
    assert num_weights(SHAPES["llama-1b"]) == 1_235_814_400
    assert num_weights(SHAPES["smollm2-135m"]) == 134_515_008
    toy = random_target("toy", torch.float32, "cpu")
    assert num_weights(SHAPES["toy"]) == sum(p.numel() for p in toy.model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_greedy_text_is_known_and_does_not_hang_on_rounding(monkeypatch, tied, dtype):
    monkeypatch.setitem(SHAPES, "other", SHAPES["toy"] | {"tie_word_embeddings": tied})
    target = random_target("other", dtype, "cpu")
    tokens = ms.generate(target, [3, 9, 50], max_new_tokens=6, eos=()).tokens[0].tolist()
    assert tokens == ([50] * 6 if tied else [51, 52, 53, 54, 55, 56])
    with torch.no_grad():
        logits = target.forward(target.new_cache(1, 8), torch.tensor([[3, 9, 50]])).logits
    first, second = logits[0].float().topk(2).values.T
    assert (first > 1.2 * second).all()
    # and yet the layers have their say
    without = target.model.get_input_embeddings()(torch.tensor([3, 9, 50])).float()
    hidden = target.forward(target.new_cache(1, 8), torch.tensor([[3, 9, 50]])).hidden[0].float()
    assert (torch.cosine_similarity(hidden, without) < 0.99).all()


def test_making_a_model_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_target("toy", torch.float32, "cpu")
    assert torch.equal(torch.rand(3), expected)


# The measurement.


def test_the_whole_plan_is_measured(result):
    assert (result.skipped, result.failed) == ([], [])
    lines = {(p["engine"], p["batch"], p["context"], p["tokens"], p["kind"]) for p in result.passes}
    expected = {(1, 24, n, "chain") for n in (1, 2, 4, 5, 8)} | {(1, 24, 8, "tree")}
    expected |= {(1, 40, n, "chain") for n in (1, 4)} | {(2, 24, n, "chain") for n in (1, 2)}
    assert lines == {(engine, *rest) for engine in ("graph", "eager") for rest in expected}
    assert len(result.passes) == len(lines)
    for line in result.passes:
        assert 0 < line["low"] <= line["seconds"] <= line["high"]
        assert line["error"] < 1e-5
        assert line["repeats"] == TOY.repeats


def test_bytes_are_those_of_weights_and_cache(result):
    line = next(p for p in result.passes if (p["batch"], p["tokens"]) == (2, 2))
    read = num_weights(SHAPES["toy"]) - 128 * 32  # the embedding is looked up, not read
    a_token = 2 * 2 * 2 * 8  # layers, keys and values, heads, dim
    cache = 2 * (24 + 2 + 2) * a_token  # what is there and what is new is read, and the new written
    looked_up = 4 * 32
    assert line["bytes"] == 4 * (read + cache + looked_up)


def test_the_oracle_decodes_as_asked(result):
    plain, eager, *grid = result.race
    assert [(way["alpha"], way["k"]) for way in grid] == [(0.6, 4), (0.9, 4)]
    assert (plain["engine"], plain["tau"], plain["speedup"]) == ("graph", 1.0, 1.0)
    assert eager["engine"] == "eager"
    for way in grid:
        alpha, k = way["alpha"], way["k"]
        assert way["tau_predicted"] == pytest.approx(sum(alpha**i for i in range(k + 1)))
        tried = way["rounds"] * way["tau"]
        assert abs(way["alpha_measured"] - alpha) < 4 * (alpha * (1 - alpha) / tried) ** 0.5
        times = result.pass_times(1, 24)
        overhead = times[5] / times[1]
        assert way["predicted"] == pytest.approx(way["tau_predicted"] / overhead)
        assert way["low"] <= way["speedup"] <= way["high"]


def test_ratio_of_known_rounds():
    def trace(emitted, seconds) -> Trace:
        zero = torch.zeros(1)
        return Trace([Round(zero, zero, zero, torch.tensor([e]), total_s=s)
                      for e, s in zip(emitted, seconds, strict=True)])  # fmt: skip

    plain = trace([1] * 10, [0.5] * 10)  # 2 tokens/s
    middle, low, high = ratio(trace([3, 5] * 10, [1.0] * 20), plain)  # 4 tokens/s
    assert middle == pytest.approx(2.0)
    # The mean of 20 draws from {3, 5} has standard deviation 1 / sqrt(20) = .22, so 2 +- .22.
    assert 1.7 < low < 1.9
    assert 2.1 < high < 2.3
    assert np.allclose(ratio(plain, plain), 1)


def test_json_and_table(result, tmp_path):
    facts = json.loads(result.to_json(tmp_path / "toy.json").read_text())
    assert facts["synthetic"] == "toy"
    assert facts["captured"] is torch.cuda.is_available()
    assert len(facts["passes"]) == len(result.passes)
    line = facts["passes"][0]
    share = line["bytes"] / line["seconds"] / facts["roofline"]["bandwidth"]
    assert line["bandwidth_share"] == pytest.approx(share)
    assert facts["race"][0]["alpha_measured"] is None  # not NaN, which is no JSON
    text = shown(result)
    for words in ("a pass, batch 1, context 24", "8 tree", "α 0.9, K 4", "without a graph"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


def test_when_time_is_up_what_is_missing_is_named():
    result = run_synthetic("toy", "cpu", seconds=0)
    assert result.skipped == [
        "passes at batch 1, context 24",
        "the oracle",
        "passes at batch 1, context 40",
        "passes at batch 2, context 24",
    ]
    assert "Left out for lack of time: the oracle." in shown(result)


def test_a_capture_that_fails_is_said_and_the_rest_is_measured(monkeypatch):
    def compute(self) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(StaticPass, "compute", compute)
    result = run_synthetic("toy", "cpu")
    assert result.failed == ["capture: operation not permitted when stream is capturing"]
    assert {p["engine"] for p in result.passes} == {"eager"}
    assert [way["engine"] for way in result.race] == ["eager"] * 3
    assert result.race[1]["predicted"] > 0
    assert "Failed: capture" in shown(result)


def test_a_part_that_fails_does_not_end_the_others(monkeypatch):
    usual = synthetic._Run.time_passes

    def time_passes(self, batch: int, *rest) -> None:
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        usual(self, batch, *rest)

    monkeypatch.setattr(synthetic._Run, "time_passes", time_passes)
    result = run_synthetic("toy", "cpu")
    assert [f.split(":")[0] for f in result.failed] == ["passes at batch 2, context 24"]
    assert result.race


def test_graphs_that_give_other_logits_are_called_wrong(monkeypatch):
    usual = StaticPass.run

    def run(self, read=None):
        out = usual(self, read)
        out.logits = out.logits.roll(1, -1)
        return out

    monkeypatch.setattr(StaticPass, "run", run)
    result = run_synthetic("toy", "cpu", plan=replace(TOY, new_tokens=8, seeds=1))
    assert "WRONG: graph and eager logits differ" in shown(result)


# Where it cannot run.


@pytest.fixture
def unbuilt(monkeypatch):
    """Nothing may be built before a complaint."""

    def refuse(*args, **kwargs) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(synthetic, "new_llama", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("llama-9b", "cuda", "unknown shape 'llama-9b': there are llama-8b, llama-1b"),
        ("llama-8b", "cuda", "there is no CUDA device here"),
        ("toy", "cuda", "there is no CUDA device here"),
        ("smollm2-135m", "auto", "there is no CUDA device here"),
        ("llama-8b", "cpu", "for a CUDA device, not cpu"),
    ],
)
def test_it_says_so_at_once(unbuilt, name, device, message):
    with pytest.raises(ValueError, match=message):
        run_synthetic(name, device)


def test_too_little_memory_is_seen_beforehand(unbuilt, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (12 * 10**9, 16 * 10**9))
    with pytest.raises(ValueError, match="llama-8b needs 22 GB of the device's memory; 12 are"):
        run_synthetic("llama-8b", "cuda")


def test_the_command_line(unbuilt, tmp_path):
    command = ["bench", "--device", "cuda", "--synthetic", "llama-8b"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "there is no CUDA device here" in result.stderr
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "no" / "file.json")])
    assert result.exit_code == 1
    assert "there is no folder" in result.stderr


def test_the_command_line_on_a_toy(tmp_path):
    path = tmp_path / "toy.json"
    command = ["bench", "--device", "cpu", "--synthetic", "toy", "--json", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "toy: a pass, batch 1, context 24" in result.stdout
    assert json.loads(path.read_text())["failed"] == []


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 3090", 0.936e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("cpu", None),
    ],
)
def test_known_devices(name, bandwidth):
    assert synthetic.known_bandwidth(name) == (bandwidth and pytest.approx(bandwidth))
