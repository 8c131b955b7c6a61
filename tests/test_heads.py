"""Trained heads as a user gets them: the card, the right target, the tree that pays."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import VOCAB, tiny_transformer
from test_models import words
from test_training import some_texts
from typer.testing import CliRunner

import minispec as ms
from minispec import heads
from minispec.cli import app
from minispec.costs import CostModel
from minispec.prompts import Prompt
from minispec.training.corpus import Text, load_batch, save_batch
from minispec.training.data import held_out
from minispec.training.distil import frequent_tokens

ODD = 10  # a token that is rare but in one held-out text
KINDS = ("draft", "medusa", "eagle", "eagle3")
PROMPTS = [Prompt(f"p{i}", kind, "dev", "w5 w6 w7") for i, kind in enumerate(("a", "a", "b"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny target, its corpus, and a head of each kind that the CLI trained."""
    folder = tmp_path_factory.mktemp("home")
    tiny_transformer("llama", torch.float32, 0, num_hidden_layers=8).save_pretrained(
        folder / "target"
    )
    words(VOCAB).save_pretrained(folder / "target")
    texts = [t for seed in range(9) for t in some_texts(40, seed)]
    assert any(held_out(t) for t in texts), "nothing is left for validation"
    odd = (Text("a", 1.0, [5, i, j], [ODD] * 200) for i in range(2, VOCAB) for j in range(2, VOCAB))
    texts.append(next(t for t in odd if held_out(t)))
    save_batch(folder / "corpus.npz", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minispec.prompts.load_prompts", lambda split: PROMPTS)
        patch.setattr(heads, "pass_times", lambda target: FLAT)
        for kind in KINDS:
            options = ["--corpus", folder / "corpus.npz", "--model", folder / "target"]
            options += ["--out", folder / kind, "--vocab", 30, "--width", 16, "--layers", 1]
            options += ["--steps", 3, "--rows", 2, "--length", 64, "--precision", "no", "--cpu"]
            done = CliRunner().invoke(app, ["train", kind, *map(str, options)])
            assert done.exit_code == 0, done.output
    return folder


FLAT = CostModel([1, 64], [1.0, 1.1])  # a pass over 64 tokens costs hardly more than over one


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_says_what_was_done(home, kind):
    card = heads.card(home / kind)
    assert card["kind"] == kind
    assert card["recipe"]["steps"] == 3
    assert card["training tokens"] > 1000
    assert len(card["target sha256"]) == 64
    assert card["validation"]["tau"] >= 1
    assert set(card["tau by kind"]) == {"a", "b", "all"}
    values = list(card["path values"].values())
    assert values == sorted(values, reverse=True)
    assert 0 < values[0] < 1
    assert card["tree"]


def test_held_out_texts_have_no_say_in_which_tokens_are_drafted(home):
    texts, eos = load_batch(home / "corpus.npz"), ms.load_target(home / "target").eos_ids
    learn = [t for t in texts if not held_out(t)]
    drafted = ms.load_eagle(home / "eagle3", 8).token_map
    assert torch.equal(drafted, frequent_tokens(learn, 30, eos))
    assert ODD not in drafted
    assert ODD in frequent_tokens(texts, 30, eos)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_for_its_target_and_for_no_other(home, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "pass_times", lambda target: FLAT)
    target = ms.load_target(home / "target", dtype="float32")
    drafter = heads.load_head(home / kind, target)
    plain = ms.generate(target, ["w5 w6", "w7"], max_new_tokens=12, eos=())
    out = ms.generate(target, ["w5 w6", "w7"], drafter, max_new_tokens=12, eos=())
    assert [t.tolist() for t in out.tokens] == [t.tolist() for t in plain.tokens]
    assert max(int(r.drafted.max()) for r in out.trace.rounds) > 0
    tiny_transformer("llama", torch.float32, 1, num_hidden_layers=8).save_pretrained(tmp_path)
    words(VOCAB).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not for these weights"):
        heads.load_head(home / kind, ms.load_target(tmp_path, dtype="float32"))
    in_hand = tiny_transformer("llama", torch.float32, 0, num_hidden_layers=8)
    with pytest.raises(ValueError, match="was trained for target"):
        heads.load_head(home / kind, ms.load_target(in_hand))


def test_a_dearer_pass_makes_a_smaller_tree(home, monkeypatch):
    target = ms.load_target(home / "target", dtype="float32")
    make = heads.maker("draft", home / "draft", target)
    values = {"0": 0.6, "0 0": 0.4, "1": 0.2, "0 0 0": 0.2, "0 1": 0.1, "2": 0.01}
    sizes = []
    for dear in (1.01, 10.0, 64.0):
        model = CostModel([1, 64], [1e6, dear * 1e6])  # beside which drafting is free
        monkeypatch.setattr(heads, "pass_times", lambda target, model=model: model)
        facts = {"kind": "draft", "path values": values}
        sizes.append(heads.best_tree(target, facts, make).shape.size)
    assert sizes[0] == 6
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] == 1, "a drafter drafts, whatever it costs"


def test_floors_follow_the_price_of_nodes_and_levels(home, monkeypatch):
    target = ms.load_target(home / "target", dtype="float32")
    make = heads.maker("eagle3", home / "eagle3", target)
    monkeypatch.setattr(heads, "_draft_and_rest", lambda target, drafter: (3.0, 0.0))
    for slope, floor in ((0.0, 0.0), (1.0, 0.015), (10.0, 0.15), (1000.0, 1.0)):
        model = CostModel([1, 101], [100.0, 100.0 + 100 * slope])
        monkeypatch.setattr(heads, "pass_times", lambda target, model=model: model)
        spec = heads.best_growth(target, make)
        assert spec.min_value == pytest.approx(floor)  # slope / (100 / 1.5)
        assert spec.min_gain == pytest.approx(3 * (3 / 3) / (100 / 1.5))


def test_a_given_tree_is_taken_and_nothing_timed(home, monkeypatch):
    monkeypatch.setattr(heads, "pass_times", lambda target: pytest.fail("it was timed"))
    target = ms.load_target(home / "target", dtype="float32")
    shape = ms.shapes.chain(2)
    assert heads.load_head(home / "draft", target, shape).tree == shape
    assert heads.load_head(home / "eagle3", target, ms.Grow(5, 2, 2)).max_nodes == 5


def test_pass_times_are_measured_once(home, monkeypatch):
    target = ms.load_target(home / "target", dtype="float32")
    first = heads.pass_times(target)
    monkeypatch.setattr(heads, "time_pass", lambda *a, **k: pytest.fail("timed again"))
    assert heads.pass_times(target) is first
    assert first.t(33) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_generate_takes_a_head_from_a_folder(home, kind, monkeypatch):
    monkeypatch.setattr(heads, "pass_times", lambda target: FLAT)
    options = [
        "--model",
        home / "target",
        "--max-new-tokens",
        9,
        "--dtype",
        "float32",
        "--json",
        "--raw",
    ]

    def text(*drafter):
        done = CliRunner().invoke(app, ["generate", "w5 w6", *map(str, [*options, *drafter])])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["text"]

    assert text("--head", home / kind) == text("--drafter", "none")
    missing = CliRunner().invoke(app, ["generate", "w5", *map(str, options), "--head", "no/such"])
    assert missing.exit_code == 1
    assert "no head 'no/such'" in " ".join(missing.stderr.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[1]", "names no kind of head"),
        ('{"kind": "oracle"}', "names no kind of head"),
    ],
)
def test_a_bad_card_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        heads.card(tmp_path)


def test_without_path_values_a_tree_must_be_given():
    with pytest.raises(ValueError, match="give the tree"):
        heads.path_values({"kind": "medusa", "path values": {}})


def test_what_is_not_there_is_said(home, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISPEC_DATA", str(tmp_path))
    (tmp_path / "prompts.jsonl").touch()
    assert heads.shipped() == {}
    target = ms.load_target(home / "target", dtype="float32")
    with pytest.raises(FileNotFoundError, match="no head 'medusa' in"):
        heads.load_head("medusa", target)
    (tmp_path / "heads").mkdir()
    (home / "medusa").rename(tmp_path / "heads" / "medusa")
    try:
        assert list(heads.shipped()) == ["medusa"]
        assert heads.card("medusa")["kind"] == "medusa"
    finally:
        (tmp_path / "heads" / "medusa").rename(home / "medusa")


def test_shipped_heads_fit_the_limits():
    """What is in data/heads: small enough, for SmolLM2, with everything a card must say."""
    for name, folder in heads.shipped().items():
        card = json.loads((folder / "card.json").read_text())
        size = sum(p.stat().st_size for p in folder.iterdir())
        assert size <= (16 if "eagle" in name else 12) * 2**20, name
        assert card["target"] == "smollm2-135m-instruct"
        for key in ("target sha256", "corpus", "recipe", "training tokens", "path values", "tree"):
            assert card[key], (name, key)
        assert {"tau", "alpha_1"} <= set(card["validation"])
        assert len(card["tau by kind"]) == 7
        assert {p.suffix for p in folder.iterdir()} <= {".json", ".safetensors"}
