"""Tiny random models of many architectures, and drafters that behave badly on purpose."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a hub
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Sequence
from functools import cache

import pytest
import torch
import transformers as tf
from torch import Tensor

import minispec as ms
from minispec.drafters import Rows

torch.set_num_threads(1)  # tiny models: threads only get in each other's way


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that in two processes the others run beside it."""
    items.sort(key=lambda item: item.path.stem != "test_smollm2")


VOCAB = 61
COMMON = dict(
    vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=0, initializer_range=0.3
)
SIZE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
)
GQA = dict(num_key_value_heads=2, head_dim=8)

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**COMMON, **SIZE, **GQA),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, **SIZE, num_key_value_heads=2),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, **SIZE, **GQA),
    "mistral": lambda: tf.MistralConfig(**COMMON, **SIZE, **GQA, sliding_window=8),
    "phi": lambda: tf.PhiConfig(**COMMON, **SIZE),
    "phi3": lambda: tf.Phi3Config(
        **COMMON, **SIZE, num_key_value_heads=2, sliding_window=8
    ),
    "gemma2": lambda: tf.Gemma2Config(
        **COMMON, **SIZE, **GQA, sliding_window=8, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **COMMON,
        **{**SIZE, "num_hidden_layers": 4},
        **GQA,
        sliding_window=8,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=3, n_head=4,
        bos_token_id=0, eos_token_id=1, initializer_range=0.3,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**COMMON, **SIZE),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32,
        pad_token_id=0, bos_token_id=0, eos_token_id=1, init_std=0.3,
    ),
}  # fmt: skip


def tiny(name: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    """A tiny random model, its weights large enough for its text to wander."""
    return ms.load_target(tiny_transformer(name, dtype, seed, **changes))


def tiny_transformer(name: str, dtype: torch.dtype, seed: int, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = CONFIGS[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        return tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@cache
def _shared(name: str) -> ms.LanguageModel:
    return tiny(name)


@pytest.fixture
def llama() -> ms.LanguageModel:
    return _shared("llama")


@pytest.fixture(params=sorted(CONFIGS))
def any_target(request: pytest.FixtureRequest) -> ms.LanguageModel:
    return _shared(request.param)


def cache_holds(model: ms.LanguageModel, cache, row: int, text: torch.Tensor) -> None:
    """A row of a cache equals one that the model computes afresh from the text [n]."""
    fresh = model.new_cache(1, len(text))
    with torch.no_grad():
        model.forward(fresh, text[None])
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[row, :, : len(text)], b[0, :, : len(text)])


def prompts_of(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of these lengths, without the end-of-text token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]


class Scripted(ms.Drafter):
    """Proposes fixed tokens [K] and laws [K, V], the same in every row and round."""

    def __init__(self, tokens: Sequence[int], q: Tensor | None = None) -> None:
        self.script = torch.tensor(tokens)
        self.q = q
        self.max_nodes = len(tokens)

    def propose(self, rows: Rows) -> ms.TokenTree:
        q = None if self.q is None else self.q.expand(rows.batch, *self.q.shape)
        return ms.TokenTree.chain(self.script.expand(rows.batch, -1), q)


class AlwaysWrong(ms.Drafter):
    """Proposes what the target is sure not to say: the greedy token plus one."""

    def __init__(self, num_tokens: int = 3) -> None:
        self.inner = ms.Oracle(alpha=0.0, num_tokens=num_tokens)
        self.max_nodes = num_tokens

    def start(self, *args) -> None:  # type: ignore[no-untyped-def]
        self.inner.start(*args)

    def propose(self, rows: Rows) -> ms.TokenTree:
        return self.inner.propose(rows)


class RandomTree(ms.Drafter):
    """A tree of random shape whose nodes are often right: for tests of masks and cache moves.

    Each node is the greedy continuation of its path (asked of the target without a cache) with
    probability alpha, else a random token; parents are random.
    """

    def __init__(self, num_nodes: int = 9, alpha: float = 0.6, seed: int = 0) -> None:
        self.max_nodes, self.alpha, self.seed = num_nodes, alpha, seed

    def start(self, target, rows, cache, prompt) -> None:  # type: ignore[no-untyped-def]
        self.target = target
        self.chance = torch.Generator().manual_seed(self.seed)

    def propose(self, rows: Rows) -> ms.TokenTree:
        num = self.max_nodes
        tokens = torch.zeros(rows.batch, num, dtype=torch.long)
        parents = torch.zeros(rows.batch, num, dtype=torch.long)
        for b in range(rows.batch):
            text = rows.tokens[b, : rows.host[b]].tolist()
            paths: list[list[int]] = []
            for i in range(num):
                parent = int(torch.randint(-1, i, (1,), generator=self.chance)) if i else -1
                above = paths[parent] if parent >= 0 else []
                context = torch.tensor([text + above])
                best = int(self.target.model(context, use_cache=False).logits[0, -1].argmax())
                other = int(torch.randint(0, self.target.vocab_size, (1,), generator=self.chance))
                right = float(torch.rand(1, generator=self.chance)) < self.alpha
                token = best if right else other
                parents[b, i], tokens[b, i] = parent, token
                paths.append([*above, token])
        return ms.TokenTree(tokens, parents)
