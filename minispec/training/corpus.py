"""The target writes its own training text: first the question, then the answer to it.

A draft is right when it says what *this* target would say, so the text to learn from is the
target's own (the practice of Medusa, EAGLE and others; here the questions are its own too). Given
the opening of a user's turn, a chat model goes on with a question; given the question, it answers.
Leads ("Translate to French: ", "Summarize ...") steer the questions over the six kinds of
``data/prompts.jsonl``.

One batch is one file, written whole or not at all, and a function of (seed, batch number) alone:
a killed run goes on where it stopped, and several processes share the work by taking turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import KVCache
from ..fetch import sha256
from ..models import CHUNK, LanguageModel
from ..sampling import Random, Sampling

QUESTION = Sampling(temperature=0.9, min_p=0.02)  # a top-p would sort: half the time of a pass
TEMPERATURES = (0.7, 1.0)  # of the second answer to a question, by turns; the first is greedy
MAX_ANSWER = 256


@dataclass(frozen=True)
class Kind:
    """How a kind's questions begin, and how many tokens they may have."""

    leads: tuple[str, ...]
    longest: int = 80


# First words of passages: without them the model writes lists and not prose.
PASSAGES = (
    *("The", "A", "In", "When", "Last year", "On Monday", "For many years", "Dr.", "Every"),
    *("After", "The town of", "Scientists", "The company", "At the end of", "The museum"),
    *("Researchers have", "The river", "Once", "Two", "Maria", "The first", "During the"),
)


def _with_passage(*instructions: str) -> tuple[str, ...]:
    return tuple(f"{i}\n\n{p}" for i in instructions for p in PASSAGES)


KINDS = {
    "conversation": Kind(
        (
            *("", "How can I", "How do I", "I need", "Give me", "Help me", "Can you", "Tell me"),
            *("Write a short story about", "Write a poem about", "Write an email to", "My"),
            *("What should I", "I want to", "Suggest", "Explain", "Imagine", "Describe"),
            *("What are some good", "Write a letter", "Write a short", "Plan a", "Why does my"),
            *("I have been", "Give me ten ideas for", "Should I", "Give me some tips"),
        )
    ),
    "translation": Kind(
        (
            *("Translate to French: The", "Translate to Spanish: I", "Translate into German:"),
            *("Translate this sentence into Italian: We", "Please put this into Spanish:"),
            *("How do you say", "Translate the following sentence into French.\n\nThe"),
            *("Translate from Spanish to English:", "Translate from French to English:"),
            *("Put this into German: My", "Translate into Portuguese: The", "Say this in French:"),
            *("What is the Spanish for", "Translate to Dutch: She", "Please translate to Italian:"),
        )
    ),
    "summarisation": Kind(
        _with_passage(
            *("Summarize the following passage:", "Summarize this article in one sentence."),
            *("Please condense the text below.", "Give a short summary of this text:"),
            *("Summarize the text below in two sentences.", "What is the main point?"),
            *("In one sentence, what is this passage about?", "Shorten this article:"),
            *("Summarise the following report for a busy reader.", "Summarize:"),
        ),
        longest=260,
    ),
    "question_answering": Kind(
        (
            *("What is", "What is the", "Who was", "Who", "When did", "When was", "Why do"),
            *("Why is", "How many", "How does", "Which", "Where is", "What causes", "Name"),
            *("What are the", "What does", "In which", "How long", "What gas", "What animal"),
            *("Who invented", "Who wrote", "What year", "Which country", "What language"),
        )
    ),
    "mathematics": Kind(
        (
            *("A school", "A farmer", "A train", "If a", "Solve", "Calculate", "What is 15% of"),
            *("How many", "A shop sells", "Tom has", "Maria", "A rectangle", "Find the", "The sum"),
            *("What is the average of", "A recipe", "There are", "A car", "Simplify", "If 3"),
            *("A box contains", "The price of", "Anna saves", "Three friends", "A class of"),
        )
    ),
    "retrieval": Kind(
        (
            *_with_passage(
                *("Read the passage and answer the question.", "Use the passage to answer."),
                *("Read the text. Where does this happen?", "Based on the text, who is it about?"),
                *("Answer from the text: when was this?", "According to the text below, why?"),
                *("Read the passage below. How many people took part?", "What happened here?"),
            ),
            *("Here is a text:\n\nThe", "Passage:\n\nThe", "Context:\n\nIn"),
        ),
        longest=260,
    ),
}


def write(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    rng: Random,
    max_new: int,
) -> list[tuple[list[int], bool]]:
    """Plain decoding of many rows; each row's new tokens, and whether an end-of-text closed them.

    The end-of-text token is not among them. Rows that have ended leave the batch as it goes: a
    large batch is bound by computation, and an idle row would cost as much as a live one.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    rows = torch.arange(len(prompts))  # [live] which prompt each row of the cache belongs to
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    cache = target.new_cache(len(prompts), int(lengths.max()) + max_new + 1)
    with torch.inference_mode():
        logits = _read_prompts(target, cache, tokens.to(target.device), lengths)  # [B, V]
        for step in range(max_new):
            law = sampling.probs(logits)
            token = law.argmax(-1) if sampling.greedy else rng.draw(law)
            for row, t in zip(rows.tolist(), token.tolist(), strict=True):
                if t in target.eos_ids:
                    ended[row] = True
                elif not ended[row]:
                    texts[row].append(t)
            live = (~ended[rows]).nonzero().flatten()
            if not len(live) or step == max_new - 1:
                break
            if len(live) < 0.8 * len(rows):  # not at once: dropping rows copies the cache
                rows, token, cache = rows[live], token[live.to(token.device)], cache.rows(live)
            logits = target.forward(cache, token.unsqueeze(1)).logits[:, 0]
            cache.advance()
    return list(zip(texts, ended.tolist(), strict=True))


def _read_prompts(target: LanguageModel, cache: KVCache, tokens: Tensor, lengths: Tensor) -> Tensor:
    """[B, V] the logits after each row's last prompt token; tokens [B, longest], lengths [B]."""
    logits: Tensor | None = None
    for start in range(0, tokens.shape[1], CHUNK):
        chunk = tokens[:, start : start + CHUNK]
        last = (lengths - 1 - start).to(tokens.device).unsqueeze(1)  # [B, 1] within this chunk
        out = target.forward(cache, chunk, read=last.clamp(0, chunk.shape[1] - 1)).logits[:, 0]
        logits = out if logits is None else torch.where(last >= 0, out, logits)
        cache.set_lengths(lengths.clamp(max=start + chunk.shape[1]))
    assert logits is not None
    return logits


def opening(target: LanguageModel, lead: str) -> list[int]:
    """Token ids of a chat up to and with the first words of the user's turn."""
    mark = "\u2603"  # stands where the user's turn would go on
    chat = [{"role": "user", "content": lead + mark}]
    text = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(target.tokenizer(text[: text.index(mark)], add_special_tokens=False)["input_ids"])


@dataclass
class Text:
    """A question with its answer, as token ids; the answer ends with its end-of-text, if it did."""

    kind: str
    temperature: float
    prompt: list[int]
    answer: list[int]


def write_batch(
    target: LanguageModel,
    index: int,
    *,
    seed: int = 0,
    size: int = 192,
    max_answer: int = MAX_ANSWER,
) -> list[Text]:
    """Batch number ``index``: up to ``size`` questions of one kind, each answered twice.

    Once greedily and once at a temperature: the two answers share the cost of the question.
    """
    kind = list(KINDS)[index % len(KINDS)]
    hot = TEMPERATURES[index // len(KINDS) % len(TEMPERATURES)]
    rng = Random(seed * 1_000_003 + index)
    spec = KINDS[kind]
    leads = [spec.leads[int(u * len(spec.leads))] for u in rng.uniform(size)]
    openings = {lead: opening(target, lead) for lead in leads}
    asked = write(target, [openings[lead] for lead in leads], QUESTION, rng, spec.longest)
    prompts = []
    for lead, (ids, complete) in zip(leads, asked, strict=True):
        question = (lead + target.decode(ids)).strip()
        if complete and len(ids) >= 3:  # a turn that did not end by itself is a fragment
            prompts.append(target.encode([{"role": "user", "content": question}]))
    texts = []
    for temperature in (0.0, hot):
        law = Sampling(temperature=temperature)
        answers = write(target, prompts, law, rng, max_answer) if prompts else []
        for prompt, (ids, complete) in zip(prompts, answers, strict=True):
            if ids:
                answer = ids + [target.eos_ids[0]] * complete
                texts.append(Text(kind, temperature, prompt, answer))
    return texts


def save_batch(path: Path, texts: Sequence[Text]) -> None:
    """One batch as one compressed file: token ids in 16 bits where they fit. Whole or not at all.

    tokens: prompt, answer, prompt, answer, ... end to end; lengths [texts, 2] of each; kinds and
    temperatures [texts].
    """
    flat = [t for text in texts for t in (*text.prompt, *text.answer)]
    dtype = np.uint16 if max(flat, default=0) < 2**16 else np.uint32
    temporary = path.with_suffix(f".{os.getpid()}.part")
    with temporary.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.array(flat, dtype),
            lengths=np.array([(len(t.prompt), len(t.answer)) for t in texts], np.int32),
            kinds=np.array([t.kind for t in texts], "U24"),
            temperatures=np.array([t.temperature for t in texts], np.float32),
        )
    os.replace(temporary, path)


def load_batch(path: Path) -> list[Text]:
    """What ``save_batch`` wrote."""
    with np.load(path, allow_pickle=False) as held:
        cuts = np.cumsum(held["lengths"].reshape(-1))[:-1]
        parts = [part.tolist() for part in np.split(held["tokens"], cuts)]
        kinds, temperatures = held["kinds"].tolist(), held["temperatures"].tolist()
    pairs = zip(parts[0::2], parts[1::2], strict=True)
    return [
        Text(kind, round(temperature, 4), prompt, answer)
        for kind, temperature, (prompt, answer) in zip(kinds, temperatures, pairs, strict=True)
    ]


def merge(folder: Path, avoid: Iterable[str], target: LanguageModel) -> tuple[list[Text], Counts]:
    """All batches of a folder as one list of texts, and what was dropped on the way.

    Dropped: a question that was asked before (its answers too), and one that holds a text of
    ``avoid`` or is held by it (the prompts that we measure with).
    """
    taboo = [_plain(text) for text in avoid]
    texts: list[Text] = []
    asked: dict[tuple[int, ...], str] = {}  # question -> the batch that asked it first
    counts = Counts()
    verdicts: dict[tuple[int, ...], bool] = {}
    for path in sorted(folder.glob("batch-*.npz")):
        seen: set[tuple[tuple[int, ...], float]] = set()
        for text in load_batch(path):
            key = tuple(text.prompt)
            if asked.setdefault(key, path.name) != path.name or (key, text.temperature) in seen:
                counts.duplicates += 1
                continue
            seen.add((key, text.temperature))
            if key not in verdicts:
                question = _plain(_question(target, text.prompt))
                verdicts[key] = any(t in question or question in t for t in taboo)
            if verdicts[key]:
                counts.avoided += 1
                continue
            texts.append(text)
    for text in texts:
        name = (text.kind, text.temperature)
        counts.answers[name] = counts.answers.get(name, 0) + 1
        counts.tokens[name] = counts.tokens.get(name, 0) + len(text.answer)
    return texts, counts


@dataclass
class Counts:
    """What a corpus holds, by (kind, temperature), and how many answers were dropped and why."""

    answers: dict[tuple[str, float], int] = field(default_factory=dict)
    tokens: dict[tuple[str, float], int] = field(default_factory=dict)
    duplicates: int = 0
    avoided: int = 0


def target_facts(target: LanguageModel) -> dict[str, str]:
    """The target's name and the hash of its weights, for a card."""
    found = {"target": str(target.config.name_or_path or type(target.model).__name__)}
    weights = Path(found["target"]) / "model.safetensors"
    if weights.is_file():
        found = {"target": weights.parent.name, "target sha256": sha256(weights)}
    return found


def card(counts: Counts, target: LanguageModel, seed: int, batches: int) -> dict[str, Any]:
    """What a packed corpus is, in plain numbers."""
    return target_facts(target) | {
        "seed": seed,
        "batches": batches,
        "question sampling": asdict(QUESTION),
        "answer temperatures": [0.0, *TEMPERATURES],
        "longest answer": MAX_ANSWER,
        "answers": sum(counts.answers.values()),
        "answer tokens": sum(counts.tokens.values()),
        "answer tokens by kind and temperature": {
            kind: {str(t): n for (k, t), n in sorted(counts.tokens.items()) if k == kind}
            for kind in KINDS
        },
        "duplicates dropped": counts.duplicates,
        "answers dropped for the measuring prompts": counts.avoided,
    }


def _question(target: LanguageModel, prompt: Sequence[int]) -> str:
    """What stands between the opening of the user's turn and the opening of the answer."""
    begin = opening(target, "")
    empty = target.encode([{"role": "user", "content": ""}])
    tail = len(empty) - len(begin)
    return target.decode(prompt[len(begin) : len(prompt) - tail])


def _plain(text: str) -> str:
    """Text without case, marks and spaces."""
    return "".join(c for c in text.lower() if c.isalnum())


def write_corpus(
    target: LanguageModel,
    folder: Path,
    batches: Sequence[int],
    *,
    seed: int = 0,
    size: int = 192,
    tell: Callable[[int, int, float], None] | None = None,
) -> None:
    """Writes those of ``batches`` that are not in ``folder`` yet; a killed run goes on there.

    tell: called after each batch with its number, its answer tokens and its seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index in batches:
        path = folder / f"batch-{index:05d}.npz"
        if path.exists():
            continue
        began = time.perf_counter()
        texts = write_batch(target, index, seed=seed, size=size)
        save_batch(path, texts)
        if tell is not None:
            tell(index, sum(len(t.answer) for t in texts), time.perf_counter() - began)
