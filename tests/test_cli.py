"""The command line, on a tiny model in a folder."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import VOCAB, tiny_transformer
from rich.console import Console
from test_models import words
from typer.testing import CliRunner

import minispec as ms
from minispec import demo
from minispec.cli import app

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_transformer("llama", torch.float32, 0).save_pretrained(path)
    tokenizer = words(VOCAB)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def run(*arguments: str):
    return runner.invoke(app, list(arguments))


@pytest.mark.parametrize("drafter", ["none", "lookup", "early-exit", "oracle"])
def test_generate_prints_the_text(folder, drafter):
    options = ["--model", folder, "--layer", "1", "--max-new-tokens", "6", "--dtype", "float32"]
    result = run("generate", "w5 w6", "--drafter", drafter, *options)
    assert result.exit_code == 0, result.output
    target = ms.load_target(folder, dtype="float32")
    chat = [{"role": "user", "content": "w5 w6"}]
    assert ms.generate(target, chat, max_new_tokens=6).text[0] in result.output.replace("\n", "")


def test_generate_as_json(folder):
    options = ["--model", folder, "--raw", "--json", "--max-new-tokens", "5", "--dtype", "float32"]
    facts = json.loads(run("generate", "w5 w6", *options).stdout)
    assert len(facts["tokens"]) == 5
    assert facts["finish"] == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such"], "cannot load 'no/such'"),
        (["--temperature", "-1"], "temperature must be"),
        (["--max-new-tokens", "0"], "at least 1"),
        (["--num-tokens", "0"], "num_tokens must be"),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_1(folder, arguments, message):
    result = run(
        "generate", "w5", *(["--model", folder] if "--model" not in arguments else []), *arguments
    )
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_the_demo_compares_every_method(folder, monkeypatch):
    methods = {
        "plain": None,
        "prompt lookup": ms.PromptLookup(4),
        "early exit": ms.EarlyExit(1, 2),
        "oracle": ms.Oracle(0.8, 4),
    }
    monkeypatch.setattr(demo, "demo_methods", lambda target, like=None: methods)
    target = ms.load_target(folder, dtype="float32")
    prompts = [demo.Prompt(f"p{i}", "conversation", "dev", f"w{i} w7 w8") for i in (3, 4)]
    console = Console(record=True, width=120)
    runs = demo.run_demo(target, prompts, console, max_new_tokens=12)
    assert {name: r.identical(runs["plain"]) for name, r in runs.items()} == dict.fromkeys(
        methods, 2
    )
    text = console.export_text()
    assert all(name in text for name in methods)
    assert "yes" in text


def test_data_that_is_not_there_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MINISPEC_DATA", str(tmp_path))
    result = run("demo")
    assert result.exit_code == 1
    assert "set MINISPEC_DATA" in " ".join(result.stderr.split())


def test_output_shows_itself_in_notebook_and_terminal(folder):
    target = ms.load_target(folder, dtype="float32")
    out = ms.generate(target, "w5 w6", ms.Oracle(1.0, 3), max_new_tokens=8, eos=())
    page = out._repr_html_()
    assert page.count("<span") == 8 + 2  # a span a token, and the legend
    assert page.count("drafted and accepted") == int(out.accepted[0].sum()) + 1
    console = Console(record=True, width=200)
    console.print(out)
    assert out.text[0] in console.export_text()


BENCH = ["--limit", "1", "--kind", "mathematics", "--max-new-tokens", "3", "--dtype", "float32"]


@pytest.fixture
def small_methods(monkeypatch):
    from minispec import bench

    found = {"plain": None, "prompt lookup": ms.PromptLookup(3), "early exit": ms.EarlyExit(9)}
    monkeypatch.setattr(bench, "all_methods", lambda: found)
    monkeypatch.setattr(bench, "trained", list)
    prompts = [demo.Prompt(f"m{i}", "mathematics", "test", f"w{i} w7 w8 w7") for i in range(5)]
    monkeypatch.setattr(bench, "load_prompts", lambda split: prompts)


def test_bench_measures_keeps_and_draws(folder, small_methods, tmp_path):
    kept, figures = tmp_path / "bench.json", tmp_path / "png"
    options = ["--model", folder, "--json", str(kept), "--png", str(figures), "--threads", "1"]
    result = run("bench", *options, *BENCH, "--limit", "3")
    assert result.exit_code == 0, result.output
    assert "prompt lookup" in result.stdout
    assert "early exit at temperature 0 failed on 3 of 3 calls" in " ".join(result.stdout.split())
    assert "…" not in result.stdout  # also where the output is no terminal
    found = json.loads(kept.read_text())
    assert found["facts"]["threads"] == 1
    assert len(found["rows"]) == 3 * (3 + 3)  # prompts; methods, and as many peers
    assert len(list(figures.glob("*.png"))) == 3
    short = run("bench", "--model", folder, *BENCH, "--methods", "prompt-lookup", "--no-peers")
    assert "early exit" not in short.stdout
    assert "transformers" not in short.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "train"], "split must be dev, test or all"),
        (["--kind", "poetry"], "no kind 'poetry': there are mathematics"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--batch", "0"], "batch must be"),
        (["--threads", "0"], "threads must be"),
        (["--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["--methods", "magic"], "no method 'magic': there are plain, prompt lookup"),
        (["--json", "no/such/folder/bench.json"], "there is no folder 'no/such/folder'"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bench_refuses_before_it_loads_anything(small_methods, arguments, message):
    result = run("bench", "--model", "no/such/model", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "cannot load" not in result.stderr
    assert "Traceback" not in result.output
