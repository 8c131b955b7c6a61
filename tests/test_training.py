"""Training: the corpus, the batches, the loop that resumes exactly, and what the losses mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB, prompts_of, tiny
from torch import nn

import minispec as ms
from minispec.drafters.medusa import MedusaHeads
from minispec.sampling import Random, Sampling
from minispec.training import corpus as corpus_module
from minispec.training.corpus import (
    KINDS,
    Text,
    load_batch,
    merge,
    opening,
    save_batch,
    write,
    write_corpus,
)
from minispec.training.data import TextData, cache_features, held_out, pack
from minispec.training.distil import DraftLearner, frequent_tokens, new_draft
from minispec.training.eagle import EagleLearner
from minispec.training.fit import Recipe, acceptance, fit, law_rows, rows_of_step, run_lengths
from minispec.training.medusa import MedusaLearner

ROOT = Path(__file__).parent.parent


class Letters:
    """A tokenizer of letters with a chat template: <user> text <answer>."""

    chat_template = "yes"
    letters = "_|<>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:?"[:VOCAB]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.letters.find(c) if c in self.letters else 4 for c in text]}

    def apply_chat_template(self, chat, tokenize=True, add_generation_prompt=True, **kwargs):
        text = f"<{chat[0]['content']}>"
        return self(text) if tokenize else text

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(self.letters[i] for i in ids if i > 3 or not skip_special_tokens)


@pytest.fixture(scope="module")
def writer() -> ms.LanguageModel:
    """A tiny model that can chat, after a fashion; its texts end quickly enough."""
    target = tiny(dtype=torch.float32)
    target.tokenizer = Letters()
    with torch.no_grad():  # end-of-text a little likelier, so that turns end by themselves
        target.model.lm_head.weight[1] *= 1.5
    return target


def some_texts(num: int = 40, seed: int = 0) -> list[Text]:
    """Random prompts with the tiny model's own greedy or sampled answers."""
    target = tiny(dtype=torch.float32)
    prompts = prompts_of(*[3 + i % 5 for i in range(num)], seed=seed)
    texts = []
    for temperature in (0.0, 1.0):
        half = prompts[::2] if temperature else prompts[1::2]
        out = ms.generate(target, half, max_new_tokens=20, sampling=Sampling(temperature), eos=())
        texts += [
            Text("conversation", temperature, p, a.tolist())
            for p, a in zip(half, out.tokens, strict=True)
        ]
    return texts


# The corpus.


def test_the_writer_decodes_as_generate_does(llama):
    prompts = prompts_of(*range(2, 14))
    end = llama.eos_ids[0]
    found = write(llama, prompts, Sampling(), Random(0), 24)
    plain = ms.generate(llama, prompts, max_new_tokens=24)
    for (tokens, ended), theirs in zip(found, plain.tokens, strict=True):
        assert tokens + [end] * ended == theirs.tolist()


def test_rows_that_have_ended_leave_the_others_as_they_are(writer):
    """Many rows end early here, so the batch shrinks more than once."""
    prompts = prompts_of(*[4] * 30)
    found = write(writer, prompts, Sampling(), Random(0), 40)
    assert 3 < sum(ended for _, ended in found) < 30, "the case does not test what it should"
    for prompt, (tokens, _) in list(zip(prompts, found, strict=True))[:8]:
        alone = write(writer, [prompt], Sampling(), Random(0), 40)
        assert alone[0][0] == tokens


def test_drawn_answers_follow_the_law(llama):
    """The first token of 4,000 equal rows against the model's own probabilities."""
    prompt = prompts_of(5)[0]
    found = write(llama, [prompt] * 4000, Sampling(1.0), Random(3), 1)
    first = torch.tensor([t[0] if t else llama.eos_ids[0] for t, _ in found])
    law = torch.softmax(llama.model(torch.tensor([prompt])).logits[0, -1], -1)
    tv = 0.5 * (torch.bincount(first, minlength=VOCAB) / 4000 - law).abs().sum()
    assert tv < 0.07


def test_a_killed_corpus_goes_on_and_is_the_same(writer, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_corpus(writer, whole, range(3), size=12)
    calls = []

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:  # in the middle of the second batch
            raise KeyboardInterrupt
        return write(*args, **kwargs)

    monkeypatch.setattr(corpus_module, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(writer, broken, range(3), size=12)
    assert [p.name for p in broken.iterdir()] == ["batch-00000.npz"], "a part was left behind"
    before = (broken / "batch-00000.npz").stat().st_mtime_ns
    monkeypatch.setattr(corpus_module, "write", write)
    write_corpus(writer, broken, range(3), size=12)
    assert (broken / "batch-00000.npz").stat().st_mtime_ns == before, "work was done twice"
    for path in sorted(whole.iterdir()):
        assert load_batch(path) == load_batch(broken / path.name)
    assert sum(len(load_batch(p)) for p in whole.iterdir()) > 0


def test_batches_go_round_the_kinds_and_differ(writer, tmp_path):
    write_corpus(writer, tmp_path, range(7), size=12)
    batches = [load_batch(tmp_path / f"batch-{i:05d}.npz") for i in range(7)]
    kinds = [{t.kind for t in b} for b in batches if b]
    assert set.union(*kinds) <= set(KINDS)
    assert all(len(k) == 1 for k in kinds)
    assert all({t.temperature for t in b} <= {0.0, 0.7, 1.0} for b in batches)
    prompts = [tuple(t.prompt) for b in batches for t in b if t.temperature == 0]
    assert len(set(prompts)) > 0.9 * len(prompts)


def test_an_opening_ends_where_the_user_goes_on(writer):
    assert writer.tokenizer.decode(opening(writer, "abc"), False) == "<abc"


def test_merge_drops_duplicates_and_the_prompts_that_we_measure_with(writer, tmp_path):
    def text(question: str, temperature: float = 0.0) -> Text:
        prompt = writer.encode([{"role": "user", "content": question}])
        return Text("conversation", temperature, prompt, [5, 6, 1])

    one = [text("what is a dog"), text("what is a dog", 0.7), text("who is it")]
    two = [text("what is a dog"), text("please say: Why is it so.. ?"), text("who is she")]
    save_batch(tmp_path / "batch-00000.npz", one)
    save_batch(tmp_path / "batch-00001.npz", two)
    texts, counts = merge(tmp_path, ["why is it so?"], writer)
    assert texts == [*one, two[2]]
    assert (counts.duplicates, counts.avoided) == (1, 1)
    assert counts.tokens == {("conversation", 0.0): 9, ("conversation", 0.7): 3}


def test_a_corpus_file_holds_what_was_put_in(tmp_path):
    texts = some_texts(10)
    texts.append(Text("retrieval", 0.7, [70000], [1]))  # an id that needs more than 16 bits
    save_batch(tmp_path / "a.npz", texts)
    assert load_batch(tmp_path / "a.npz") == texts
    save_batch(tmp_path / "b.npz", texts[:-1])
    assert np.load(tmp_path / "b.npz")["tokens"].dtype == np.uint16


# Batches and features.


def test_packing_loses_nothing_and_wastes_little():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 200, (500,), generator=generator).tolist()
    rows = pack(lengths, 256)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= 256 for row in rows)
    assert sum(lengths) / (256 * len(rows)) > 0.95


@pytest.fixture(scope="module")
def learner_target() -> ms.LanguageModel:
    return tiny(dtype=torch.float32)


def test_features_are_those_of_each_text_alone(learner_target):
    """Packed side by side, a text sees nothing of its neighbours."""
    texts = some_texts(12)
    data = TextData(texts, learner_target, width=80, taps=(0, 2))
    batch = data.batch(range(len(data)))
    for row in range(len(data)):
        for n, i in enumerate(data.rows[row]):
            here = batch.text[row] == n
            ids = torch.tensor([texts[i].prompt + texts[i].answer])
            assert torch.equal(batch.tokens[row, here], ids[0])
            with torch.no_grad():
                states = learner_target.model(ids, output_hidden_states=True).hidden_states
            torch.testing.assert_close(batch.hidden[row, here], states[-1][0])
            torch.testing.assert_close(batch.taps[0][row, here], states[0][0])
            torch.testing.assert_close(batch.taps[2][row, here], states[2][0])
            assert batch.answer[row, here].sum() == len(texts[i].answer)


def test_a_target_whose_logits_are_no_plain_product_is_refused():
    llama = tiny("llama")
    head = llama.model.lm_head.weight
    ids = torch.tensor([3, 7])
    assert torch.equal(law_rows(llama, ids), head[ids].float())
    for name, part in (("phi", "bias"), ("gemma2", "final_logit_softcapping")):
        with pytest.raises(ValueError, match=part):
            law_rows(tiny(name), None)


def test_features_on_disk_equal_those_on_the_fly_and_go_on_after_a_stop(learner_target, tmp_path):
    texts = some_texts(30)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_features(learner_target, texts, tmp_path, width=64, taps=(1,), chunk=8, tell=stop)
    with pytest.raises(ValueError, match="not complete"):
        TextData(texts, learner_target, width=64, taps=(1,), features=tmp_path)
    told: list[int] = []
    cache_features(
        learner_target, texts, tmp_path, width=64, taps=(1,), chunk=8,
        tell=lambda done, total: told.append(done),
    )  # fmt: skip
    assert told == [16, 24, 30], "the first eight were done already"
    held = TextData(texts, learner_target, width=64, taps=(1,), features=tmp_path).batch([0, 1])
    fresh = TextData(texts, learner_target, width=64, taps=(1,)).batch([0, 1])
    real = fresh.text >= 0
    for a, b in ((held.hidden, fresh.hidden), (held.taps[1], fresh.taps[1])):
        torch.testing.assert_close(a[real].float(), b[real], atol=2e-2, rtol=1e-2)  # bfloat16
    with pytest.raises(ValueError, match="other texts"):
        TextData(texts[1:], learner_target, width=64, taps=(1,), features=tmp_path)


def test_ahead_never_crosses_from_one_text_into_the_next(learner_target):
    batch = TextData(some_texts(12), learner_target, width=80).batch([0])
    for steps in (1, 3):
        has = batch.has_ahead(steps)[0]
        for t in range(80 - steps):
            same = batch.text[0, t] == batch.text[0, t + steps] and batch.text[0, t] >= 0
            assert bool(has[t]) == bool(same)
        assert not has[80 - steps :].any()
        assert torch.equal(batch.ahead(batch.tokens, steps)[0, :-steps], batch.tokens[0, steps:])


def test_no_question_is_in_both_training_and_validation():
    texts = [Text("x", t, [i, i + 1], [1]) for i in range(2000) for t in (0.0, 1.0)]
    sides = {}
    for text in texts:
        assert sides.setdefault(tuple(text.prompt), held_out(text)) == held_out(text)
    assert 0.01 < np.mean(list(sides.values())) < 0.03


# The loop.


def draft_of(target, seed: int = 0) -> DraftLearner:
    ids = torch.arange(VOCAB)
    return DraftLearner(new_draft(target, ids, width=16, layers=1, heads=2, seed=seed), target)


RECIPE = Recipe(steps=8, rows=2, lr=3e-3, validate_every=4, save_every=2)


def test_a_killed_run_goes_on_with_the_same_curve(learner_target, tmp_path):
    data = TextData(some_texts(40), learner_target, width=64)
    whole = fit(draft_of(learner_target), data, RECIPE, tmp_path / "a", validation=data, cpu=True)

    class Killed(DraftLearner):
        def forward(self, batch, step):
            if step == 5:
                raise KeyboardInterrupt
            return super().forward(batch, step)

    first = draft_of(learner_target)
    first.__class__ = Killed
    with pytest.raises(KeyboardInterrupt):
        fit(first, data, RECIPE, tmp_path / "b", validation=data, cpu=True)
    # Another start on purpose: everything must come from the checkpoint.
    again = draft_of(learner_target, seed=9)
    rest = fit(again, data, RECIPE, tmp_path / "b", validation=data, cpu=True)
    assert list(rest["step"]) == list(range(8))
    np.testing.assert_allclose(rest["loss"], whole["loss"], atol=1e-6, rtol=0)
    np.testing.assert_allclose(rest["tau"], whole["tau"])
    assert [p.name for p in (tmp_path / "b").glob("checkpoint*")] == ["checkpoint-8"]
    with pytest.raises(ValueError, match="another run"):
        fit(again, data, Recipe(steps=9, rows=2), tmp_path / "b", cpu=True)


def test_accumulated_parts_make_the_same_update(learner_target, tmp_path):
    data = TextData(some_texts(40), learner_target, width=64)
    one = fit(draft_of(learner_target), data, Recipe(steps=4, rows=4), tmp_path / "a", cpu=True)
    two = fit(
        draft_of(learner_target), data, Recipe(steps=4, rows=4, accumulate=2), tmp_path / "b",
        cpu=True,
    )  # fmt: skip
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-4)


def test_every_row_is_seen_once_a_pass():
    seen = [r for step in range(10) for r in rows_of_step(step, 4, 20, 0)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_rate_warms_up_and_falls_to_a_tenth():
    recipe = Recipe(steps=100, warmup=0.1)
    rates = [recipe.rate(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0) == rates[10]
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"rows": 3, "accumulate": 2}, {"precision": "fp8"}, {"lr": 0.0}]
)
def test_a_bad_recipe_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Recipe(**{"steps": 5, **bad})


def test_acceptance_counts_runs():
    #              right at step 1, 2, 3 for four drafts
    hits = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]).bool()
    assert run_lengths(hits).tolist() == [2, 1, 0, 3]
    found = acceptance(hits, torch.tensor([True, True, True, True]))
    assert found == pytest.approx({"tau": 2.5, "alpha_1": 3 / 4, "alpha_2": 2 / 3, "alpha_3": 0.5})


@pytest.mark.slow
def test_two_processes_train_the_same_draft_as_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from test_training import draft_of, some_texts, Recipe, fit, TextData\n"
        "from minispec.checkpoints import save_draft\n"
        "from conftest import tiny\n"
        "target = tiny(dtype=torch.float32)\n"
        "data = TextData(some_texts(40), target, width=64)\n"
        "learner, out = draft_of(target), Path(sys.argv[1])\n"
        "fit(learner, data, Recipe(steps=6, rows=4, save_every=3), out / 'work', cpu=True)\n"
        "save_draft(learner.draft, out, torch.float32)\n"
    )
    for num in (1, 2):
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines=1"]
        launch += [f"--num_processes={num}", "--mixed_precision=no", "--dynamo_backend=no"]
        launch += ["--num_cpu_threads_per_process=1", str(script), str(tmp_path / str(num))]
        done = subprocess.run(
            [*launch, str(ROOT / "tests")], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
    from safetensors.torch import load_file

    one, two = (load_file(tmp_path / n / "model.safetensors") for n in "12")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=1e-4)
    start = draft_of(tiny(dtype=torch.float32)).draft.model.state_dict()
    moved = max(float((one[k] - start[k]).abs().max()) for k in one)
    assert moved > 1e-3, "nothing was trained"


# What the losses mean.


@pytest.mark.parametrize("loss", ["forward kl", "reverse kl", "tvd"])
def test_distillation_losses_by_hand(learner_target, loss):
    data = TextData(some_texts(4), learner_target, width=64)
    batch = data.batch([0])
    learner = draft_of(learner_target)
    learner.loss = loss
    total, count = learner(batch, 0)
    by_hand, terms = 0.0, 0
    q_all = learner.logits(batch).double().softmax(-1)
    p_all = learner_target.model.lm_head(batch.hidden).double().softmax(-1)
    for t in range(63):
        if batch.text[0, t] >= 0 and batch.text[0, t] == batch.text[0, t + 1]:
            p, q = p_all[0, t], q_all[0, t]
            by_hand += {
                "forward kl": (p * (p / q).log()).sum(),
                "reverse kl": (q * (q / p).log()).sum(),
                "tvd": 1 - torch.minimum(p, q).sum(),
            }[loss].item()
            terms += 1
    assert int(count) == terms
    assert float(total) == pytest.approx(by_hand, rel=1e-4)


def test_a_draft_that_is_the_target_is_always_right(learner_target):
    """ranks() line up: the target as its own draft accepts all of its own greedy text."""
    texts = [t for t in some_texts(20) if t.temperature == 0]
    learner = draft_of(learner_target)
    learner.draft = learner_target
    learner.draft.read_map = None
    ranks, valid = learner.ranks(TextData(texts, learner_target, width=64).batch([0, 1]))
    hits = ranks == 0
    first = hits[0][valid]
    assert bool(first.all())
    assert len(first) > 30
    off = torch.stack([h.roll(1, -1) for h in hits])
    assert acceptance(off, valid)["tau"] < acceptance(hits, valid)["tau"]


@pytest.mark.parametrize("what", ["draft", "medusa"])
def test_a_learner_learns(learner_target, tmp_path, what):
    data = TextData(some_texts(60), learner_target, width=64)
    learner: torch.nn.Module = draft_of(learner_target)
    if what == "medusa":
        learner = MedusaLearner(MedusaHeads(32, 3), learner_target)
    log = fit(learner, data, Recipe(steps=60, rows=8, lr=1e-2), tmp_path, cpu=True)
    assert log["loss"].tail(5).mean() < 0.9 * log["loss"].head(5).mean()


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_medusa_loss_by_hand(learner_target, labels):
    """Head k at t learns what stands at t+2+k, weighted by 0.8^k; a shift by one shows."""
    data = TextData(some_texts(4), learner_target, width=64)
    batch = data.batch([0])
    learner = MedusaLearner(MedusaHeads(32, 2), learner_target, labels)
    nn.init.normal_(learner.heads[1][0].linear.weight, std=0.2)
    total, count = learner(batch, 0)
    weight = learner_target.model.lm_head.weight
    by_hand, terms = 0.0, 0
    for k, head in enumerate(learner.heads):
        for t in range(64 - 2 - k):
            place = t + 2 + k
            if batch.text[0, t] < 0 or batch.text[0, t] != batch.text[0, place]:
                continue
            if not batch.answer[0, place]:
                continue
            log_q = (weight @ head(batch.hidden[0, t])).log_softmax(-1)
            law = (weight @ batch.hidden[0, place - 1]).softmax(-1)
            token = batch.tokens[0, place]
            term = -log_q[token] if labels == "hard" else -(law * log_q).sum()
            by_hand += 0.8**k * term.item()
            terms += 1
    assert int(count) == terms
    assert float(total) == pytest.approx(by_hand, rel=1e-4)


def test_frequent_tokens_keep_the_end_of_text():
    texts = [Text("x", 0.0, [9], [5, 5, 5, 7, 7, 8])]
    assert frequent_tokens(texts, 3, always=(1,)).tolist() == [1, 5, 7]


def test_unknown_losses_and_labels_are_refused(learner_target):
    with pytest.raises(ValueError, match="loss"):
        DraftLearner(draft_of(learner_target).draft, learner_target, "mse")
    with pytest.raises(ValueError, match="labels"):
        MedusaLearner(MedusaHeads(32, 1), learner_target, "firm")


# What is committed.


def committed() -> Path:
    return ROOT / "data" / "corpus" / "smollm2.npz"


@pytest.mark.skipif(not committed().exists(), reason="no corpus in this checkout")
def test_the_committed_corpus_is_what_its_card_says():
    texts = load_batch(committed())
    card = json.loads(committed().with_suffix(".json").read_text())
    assert sum(len(t.answer) for t in texts) == card["answer tokens"] >= 1_000_000
    assert len(texts) == card["answers"]
    assert {t.kind for t in texts} == set(KINDS)
    keys = [(tuple(t.prompt), t.temperature) for t in texts]
    assert len(set(keys)) == len(keys), "duplicates"


@pytest.mark.slow
def test_the_prompts_that_we_measure_with_are_not_in_the_corpus():
    from minispec.demo import load_prompts

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    tokenizer = ms.load_target("smollm2").tokenizer
    taboo = [plain(p.text) for p in load_prompts()]
    for prompt in {tuple(t.prompt) for t in load_batch(committed())}:
        text = plain(tokenizer.decode(prompt))
        assert not any(t in text for t in taboo)


# EAGLE.


def eagle_head(version: int):
    from test_eagle import random_head

    return random_head(version, seed=3, taps=(0, 1, 2) if version == 3 else ()).float()


@pytest.mark.parametrize("version", [1, 3])
def test_the_unrolled_head_drafts_as_the_drafter_does(learner_target, version):
    """Training-time test against the obvious: from every place, step by step with a cache."""
    head = eagle_head(version)
    texts = some_texts(3)
    taps = head.config.taps
    batch = TextData(texts, learner_target, width=80, taps=taps).batch([0])
    learner = EagleLearner(head, learner_target)
    with torch.no_grad():
        outs = learner.unroll(batch, batch.hidden, 4)
        feature = head.first(batch.hidden, batch.taps)
        embed = learner_target.model.get_input_embeddings().weight
        for n in range(int(batch.text.max()) + 1):
            here = (batch.text[0] == n).nonzero().flatten()
            begin, end = int(here[0]), int(here[-1]) + 1
            for t in range(begin, end - 1):
                cache = head.new_cache(1, 100)
                state = None
                for i in range(4):
                    if t + 1 + i >= end:
                        break
                    num = t - begin + 1 if i == 0 else 1
                    if i == 0:  # the true pairs up to t
                        tokens = batch.tokens[:, begin + 1 : t + 2]
                        given = feature[:, begin : t + 1]
                    else:
                        tokens, given = batch.tokens[:, t + 1 + i : t + 2 + i], state
                    cache.begin(num)
                    steps = torch.arange(num)[None]
                    mask = cache.mask(steps, torch.ones(1, num, num).tril().bool(), torch.float32)
                    position = cache.lengths[:, None] + steps
                    out = head.step(embed[tokens], given, position, mask, cache)
                    cache.advance(num)
                    state = out[:, -1:]
                    torch.testing.assert_close(outs[i][0, t], state[0, 0], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("version", [1, 3])
def test_eagle_loss_by_hand(learner_target, version):
    head = eagle_head(version)
    texts = some_texts(3)
    batch = TextData(texts, learner_target, width=80, taps=head.config.taps).batch([0])
    learner = EagleLearner(head, learner_target, steps=1 if version == 1 else 3, noise=0.0)
    with torch.no_grad():
        total, count = learner(batch, 0)
        outs = learner.unroll(batch, batch.hidden, learner.steps)
        by_hand, terms = 0.0, 0
        for i, out in enumerate(outs):
            for t in range(80 - 2 - i):
                if batch.text[0, t] < 0 or batch.text[0, t] != batch.text[0, t + 2 + i]:
                    continue
                f = batch.hidden[0, t + 1 + i]
                law = learner_target.model.lm_head(f).softmax(-1)
                log_q = head.logits(out[0, t], learner.rows).log_softmax(-1)
                term = -(law * log_q).sum()
                if version == 1:
                    gap = (out[0, t] - f).abs()
                    smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                    term = smooth + 0.1 * term
                by_hand += 0.8**i * float(term)
                terms += 1
    assert int(count) == terms
    assert float(total) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("version", [1, 3])
def test_eagle_heads_learn_and_draft_what_validation_says(learner_target, tmp_path, version):
    """tau in validation is the tau of real greedy decoding of the same texts."""
    from minispec.drafters.eagle import Eagle
    from minispec.shapes import chain

    head = eagle_head(version)
    texts = [t for t in some_texts(60) if t.temperature == 0]
    data = TextData(texts, learner_target, width=80, taps=head.config.taps)
    learner = EagleLearner(head, learner_target, measured=3)
    recipe = Recipe(steps=60, rows=4, lr=1e-2)
    log = fit(learner, data, recipe, tmp_path, validation=data, cpu=True)
    assert log["loss"].tail(5).mean() < 0.95 * log["loss"].head(5).mean()
    rigged = Eagle(head.eval(), chain(3))
    prompts = [t.prompt for t in texts]
    out = ms.generate(learner_target, prompts, rigged, max_new_tokens=20, eos=())
    assert [t.tolist() for t in out.tokens] == [t.answer for t in texts]
    assert out.trace.n_alpha[0] == pytest.approx(float(log["alpha_1"].iloc[-1]), abs=0.15)


# The commands.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "draft", "--out", "x", "--corpus", "no/such.npz"], "there is no corpus"),
        (["corpus", "write", "--out", "x", "--worker", "2/2"], "worker is I/N"),
        (["corpus", "write", "--out", "x", "--batches", "0"], "at least 1"),
        (["corpus", "write", "--out", "x", "--model", "no/such/model"], "cannot load"),
    ],
)
def test_commands_refuse_with_one_line(arguments, message, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from minispec.cli import app

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir()), "work began"


def test_a_run_is_not_taken_up_with_another_loss(learner_target, tmp_path):
    data = TextData(some_texts(20), learner_target, width=64)
    recipe = Recipe(steps=2, rows=1)
    fit(draft_of(learner_target), data, recipe, tmp_path, facts={"loss": "forward kl"}, cpu=True)
    with pytest.raises(ValueError, match=r"another run \(loss differ"):
        fit(draft_of(learner_target), data, recipe, tmp_path, facts={"loss": "tvd"}, cpu=True)
    slower = Recipe(steps=2, rows=1, lr=1e-4)
    with pytest.raises(ValueError, match=r"another run \(loss, lr differ"):
        fit(draft_of(learner_target), data, slower, tmp_path, cpu=True)


def test_without_a_greedy_answer_held_out_nothing_is_trained(learner_target, tmp_path):
    from minispec.training.run import data_of, draft_learner, train

    texts = [Text("x", 1.0, [*t.prompt, i % 7], t.answer)
             for i, t in enumerate(some_texts(60) * 3)]  # fmt: skip
    learner = draft_learner(learner_target, texts, vocab=40, width=16, layers=1)
    data = data_of(learner_target, texts, width=64)
    with pytest.raises(ValueError, match="no greedy answer is held out"):
        train(learner, data, Recipe(steps=3, rows=2), tmp_path / "work", tmp_path, {}, cpu=True)
    assert not (tmp_path / "work").exists()


def test_train_writes_a_draft_that_loads_and_a_card(learner_target, tmp_path):
    from minispec.training.run import data_of, draft_learner, train

    texts = [Text("x", t.temperature, [*t.prompt, i % 7], t.answer)
             for i, t in enumerate(some_texts(60) * 3)]  # fmt: skip
    learner = draft_learner(learner_target, texts, vocab=40, width=16, layers=1)
    data = data_of(learner_target, texts, width=64)
    recipe = Recipe(steps=3, rows=2, validate_every=1)
    train(learner, data, recipe, tmp_path / "work", tmp_path / "out", {"kind": "draft"}, cpu=True)
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["recipe"]["steps"] == 3
    assert card["validation"]["tau"] >= 1
    draft = ms.load_target(tmp_path / "out", dtype=torch.float32)
    out = ms.generate(learner_target, prompts_of(4), ms.DraftModel(draft, 3), max_new_tokens=8)
    plain = ms.generate(learner_target, prompts_of(4), max_new_tokens=8)
    assert out.tokens[0].tolist() == plain.tokens[0].tolist()
