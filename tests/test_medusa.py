"""Medusa: heads that know the future are always right; a row, a shift or a tree off is seen."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import VOCAB, prompts_of, tiny
from torch import Tensor

import minispec as ms
from minispec.checkpoints import (
    CheckpointError,
    load_medusa,
    read_tensors,
    save_draft,
    save_medusa,
    write_tensors,
)
from minispec.drafters.medusa import Medusa, MedusaHeads
from minispec.head_checks import Prophet
from minispec.shapes import chain, from_paths, kary
from minispec.training.distil import new_draft

SHAPE = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def texts_of(target, prompts, num=24) -> list[list[int]]:
    out = ms.generate(target, prompts, max_new_tokens=num, eos=())
    return [p + t.tolist() for p, t in zip(prompts, out.tokens, strict=True)]


@pytest.mark.parametrize("shape", [chain(3), SHAPE], ids=["chain", "tree"])
def test_heads_that_know_the_future_are_always_right(llama, shape):  # pitfall 25
    prompts = prompts_of(3, 6, 9)
    texts = texts_of(llama, prompts, 36)
    drafter = Medusa(Prophet(llama, texts, 3), shape)  # type: ignore[arg-type]
    out = ms.generate(llama, prompts, drafter, max_new_tokens=24, eos=())
    assert [p + t.tolist() for p, t in zip(prompts, out.tokens, strict=True)] == [
        t[: len(p) + 24] for p, t in zip(prompts, texts, strict=True)
    ]
    assert out.trace.alpha == 1.0
    assert out.trace.passes == 1 + 6  # 23 tokens after the first, four a round


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_one_place_off_are_never_right(llama, shift):  # pitfall 25
    prompts = prompts_of(3, 6, 9)
    texts = texts_of(llama, prompts, 36)
    repeats = sum(a == b for t in texts for a, b in pairwise(t))
    drafter = Medusa(Prophet(llama, texts, 3, shift), chain(3))  # type: ignore[arg-type]
    out = ms.generate(llama, prompts, drafter, max_new_tokens=24, eos=())
    accepted = sum(int(a.sum()) for a in out.accepted)
    assert accepted <= repeats, "right by more than the text's own repetitions"
    assert [p + t.tolist() for p, t in zip(prompts, out.tokens, strict=True)] == [
        t[: len(p) + 24] for p, t in zip(prompts, texts, strict=True)
    ]


def random_heads(width: int = 32, seed: int = 0, **options) -> MedusaHeads:
    heads = MedusaHeads(width, 3, **options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in heads.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return heads


def test_greedy_tokens_are_the_targets_whatever_the_heads_say(any_target):
    prompts = prompts_of(2, 5, 9)
    plain = ms.generate(any_target, prompts, max_new_tokens=20)
    for heads in (random_heads(), random_heads(token_map=torch.arange(0, VOCAB, 3))):
        out = ms.generate(any_target, prompts, Medusa(heads, SHAPE), max_new_tokens=20)
        assert [t.tolist() for t in out.tokens] == [t.tolist() for t in plain.tokens]


def test_the_forward_is_the_papers(llama):
    """softmax(W2 (SiLU(W1 h + b) + h)), head by head."""
    heads = random_heads(vocab_size=VOCAB)
    h = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = heads.state_dict()
    for k in range(3):
        z = h @ state[f"{k}.0.linear.weight"].T + state[f"{k}.0.linear.bias"]
        by_hand = (z * torch.sigmoid(z) + h) @ state[f"{k}.1.weight"].T
        torch.testing.assert_close(heads(h)[k], by_hand)


def test_new_heads_say_what_the_target_says_next(llama):
    heads = MedusaHeads(32, 2, vocab_size=VOCAB).double()
    heads.start_from(llama)
    with torch.no_grad():
        out = llama.forward(llama.new_cache(1, 9), torch.tensor(prompts_of(9)))
    torch.testing.assert_close(heads(out.hidden)[1], out.logits)
    shared = MedusaHeads(32, 2).double()
    torch.testing.assert_close(shared(out.hidden, shared.shared_rows(llama))[1], out.logits)


def test_typical_acceptance_runs_and_calls_itself_lossy(llama):
    out = ms.generate(
        llama, prompts_of(4), Medusa(random_heads(), SHAPE), max_new_tokens=8,
        sampling=ms.Sampling(1.0), verifier="typical (lossy)",
    )  # fmt: skip
    assert len(out.tokens[0]) <= 8


def test_what_does_not_fit_is_refused(llama):
    with pytest.raises(ValueError, match="depth 4"):
        Medusa(random_heads(), chain(4))
    with pytest.raises(ValueError, match="width 16"):
        ms.generate(llama, prompts_of(3), Medusa(random_heads(16), chain(2)))
    few = random_heads(token_map=torch.arange(3))
    with pytest.raises(ValueError, match="candidates"):  # pitfall 24
        ms.generate(llama, prompts_of(3), Medusa(few, kary(5, 1)))
    beyond = random_heads(token_map=torch.tensor([1, 2, VOCAB]))
    with pytest.raises(ValueError, match="does not have"):
        ms.generate(llama, prompts_of(3), Medusa(beyond, chain(2)))


# Published files.


def tensors_v1(num_heads: int = 5, num_layers: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {}
    for i in range(num_heads):
        for j in range(num_layers):
            found[f"{i}.{j}.linear.weight"] = new(32, 32)
            found[f"{i}.{j}.linear.bias"] = new(32)
        found[f"{i}.{num_layers}.weight"] = new(VOCAB, 32)
    return found


def serving(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The same heads as serving engines name them."""
    found = {}
    for key, value in tensors.items():
        head, layer, *rest = key.split(".")
        if int(layer) == num_layers:
            found[f"lm_heads.{head}.weight"] = value
        else:
            found[f"blocks.{head}.layers.{layer}.{rest[-1]}"] = value
    return found


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form", ["pt", "safetensors", "version 2", "serving"])
def test_published_files_load(tmp_path, form, num_layers):
    tensors = tensors_v1(5, num_layers)
    if form == "version 2":
        tensors = {k: v for k, v in tensors.items() if "linear" in k}
    path = tmp_path / "medusa_lm_head.safetensors"
    if form == "pt":
        path = tmp_path / "medusa_lm_head.pt"
        torch.save(tensors, path)
    else:
        write_tensors(serving(tensors, num_layers) if form == "serving" else tensors, path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')  # published configs err
    heads = load_medusa(tmp_path)
    assert (heads.num_heads, heads.num_layers) == (5, num_layers)
    assert heads.vocab_size == (None if form == "version 2" else VOCAB)
    state = heads.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[k], v) for k, v in tensors.items())


def test_our_own_heads_come_back(tmp_path):
    heads = random_heads(token_map=torch.arange(0, VOCAB, 2)).float()
    save_medusa(heads, tmp_path, torch.float32)
    back = load_medusa(tmp_path)
    assert torch.equal(back.token_map, heads.token_map)
    h = torch.randn(2, 32)
    rows = torch.randn(31, 32)
    torch.testing.assert_close(back(h, rows), heads(h, rows))


BROKEN = {
    "a missing tensor": lambda t: t.pop("1.0.linear.bias"),
    "a missing head": lambda t: [t.pop(k) for k in list(t) if k.startswith("1.")],
    "one too many": lambda t: t.update({"0.0.norm.weight": torch.ones(32)}),
    "another shape": lambda t: t.update({"0.0.linear.bias": torch.ones(31)}),
    "a NaN": lambda t: t["2.0.linear.bias"].fill_(float("nan")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, what):  # pitfall 28
    tensors = tensors_v1(3)
    BROKEN[what](tensors)
    write_tensors(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(CheckpointError, match=r"\d\.\d\."):
        load_medusa(tmp_path)


class Payload:
    def __reduce__(self):
        return print, ("code ran while a file was read",)


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    torch.save({"0.0.linear.weight": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError):
        load_medusa(tmp_path)
    assert "code ran" not in capsys.readouterr().out


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_medusa(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "x.safetensors")


# A draft model with a reduced vocabulary.


@pytest.mark.parametrize("sampling", [ms.Sampling(), ms.Sampling(0.8)], ids=["greedy", "T .8"])
def test_a_draft_with_its_own_vocabulary_comes_back_and_drafts(tmp_path, sampling):
    target = tiny(dtype=torch.float32)
    ids = torch.tensor([1, *range(5, VOCAB, 2)])
    draft = new_draft(target, ids, width=16, layers=1, heads=2)
    save_draft(draft, tmp_path, torch.float32)
    back = ms.load_target(tmp_path, dtype=torch.float32)
    assert torch.equal(back.token_map, ids)
    options = {"max_new_tokens": 16, "sampling": sampling, "eos": ()}
    one = ms.generate(target, prompts_of(3, 7), ms.DraftModel(draft, 3), **options)
    two = ms.generate(target, prompts_of(3, 7), ms.DraftModel(back, 3), **options)
    assert [t.tolist() for t in one.tokens] == [t.tolist() for t in two.tokens]
    if sampling.greedy:
        plain = ms.generate(target, prompts_of(3, 7), **options)
        assert [t.tolist() for t in one.tokens] == [t.tolist() for t in plain.tokens]
    other = tiny(vocab_size=VOCAB + 3)
    with pytest.raises(ValueError, match="vocabulary of 61"):
        ms.generate(other, prompts_of(3), ms.DraftModel(back, 3))


def test_unknown_tokens_are_read_as_the_most_similar(llama):
    ids = torch.arange(0, VOCAB, 4)
    draft = new_draft(llama, ids, width=16, layers=1, heads=2)
    weight = llama.model.get_input_embeddings().weight
    cosine = torch.nn.functional.cosine_similarity
    for token in range(VOCAB):
        best = int(cosine(weight[token].unsqueeze(0), weight[ids]).argmax())
        assert int(draft.read_map[token]) == best
    assert draft.read_map[ids].tolist() == list(range(len(ids)))
