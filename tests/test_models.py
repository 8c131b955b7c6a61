"""Loading, and what cannot work: refused by name, before any work."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from conftest import COMMON, CONFIGS, GQA, SIZE, VOCAB, prompts_of, tiny, tiny_transformer
from tokenizers import Tokenizer, models, pre_tokenizers

import minispec as ms
from minispec.cache import KVCache
from minispec.models import TESTED, tree_error


def save(folder, name="llama", **changes) -> None:
    tiny_transformer(name, torch.float32, 0, **changes).save_pretrained(folder)
    words(VOCAB).save_pretrained(folder)


def words(num: int, swap: tuple[int, int] | None = None) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of ``num`` words, two of which may have changed places."""
    ids = list(range(num))
    if swap:
        ids[swap[0]], ids[swap[1]] = ids[swap[1]], ids[swap[0]]
    model = models.WordLevel({f"w{i}": ids[i] for i in range(num)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_folder_loads_in_the_asked_dtype(tmp_path):
    save(tmp_path)
    target = ms.load_target(tmp_path, dtype="float64", device="cpu")
    assert (target.dtype, target.device.type) == (torch.float64, "cpu")
    assert target.encode("w5 w7") == [5, 7]
    out = ms.generate(target, "w5 w7", max_new_tokens=3, eos=())
    assert len(out.text[0].split()) == 3


def test_a_model_in_hand_is_taken_as_it_is():
    model = tiny_transformer("llama", torch.float64, 0)
    target = ms.load_target(model)
    assert target.model is model
    assert target.tokenizer is None
    assert ms.load_target(target) is target


def test_chat_messages_go_through_the_template(tmp_path):
    tokenizer = words(VOCAB)
    tokenizer.chat_template = (
        "{% for m in messages %}w2 {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}w3{% endif %}"
    )
    target = ms.load_target(tiny_transformer("llama", torch.float32, 0), tokenizer=tokenizer)
    chat = [{"role": "user", "content": "w9"}]
    assert target.encode(chat) == [2, 9, 3]
    one = ms.generate(target, chat, max_new_tokens=3, eos=()).tokens
    many = ms.generate(target, [chat, "w5"], max_new_tokens=3, eos=()).tokens
    assert one[0].tolist() == many[0].tolist()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        target.encode(chat)


REFUSED = {
    "ALiBi": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "mpt uses ALiBi": lambda: tf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4),
    "falcon uses ALiBi": lambda: tf.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "mamba has recurrent layers": lambda: tf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    "qwen3_next has recurrent layers": lambda: tf.Qwen3NextConfig(
        **COMMON,
        **SIZE,
        **GQA,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "attention sinks": lambda: tf.GptOssConfig(
        **COMMON, **SIZE, **GQA, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
    ),
}


@pytest.mark.parametrize("reason", sorted(REFUSED))
def test_what_cannot_work_is_refused_by_name(reason):  # pitfall 18
    model = tf.AutoModelForCausalLM.from_config(REFUSED[reason]())
    with pytest.raises(ms.UnsupportedModelError, match=reason):
        ms.load_target(model)


def test_a_model_that_ignores_positions_is_refused_by_trying():
    """BART's decoder alone counts its own positions: wrong in a tree, and no name says so."""
    config = tf.BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, encoder_layers=1,
        decoder_ffn_dim=48, is_decoder=True, is_encoder_decoder=False, init_std=0.3,
    )  # fmt: skip
    model = tf.BartForCausalLM(config)
    model.generation_config.forced_eos_token_id = None
    with pytest.raises(ms.UnsupportedModelError, match=r"bart .*token tree"):
        ms.load_target(model)


def test_longrope_ends_where_it_would_change_its_frequencies():
    config = tf.Phi3Config(
        **COMMON,
        **SIZE,
        num_key_value_heads=2,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0, 3.0, 2.0, 5.0],
            "original_max_position_embeddings": 16,
        },
    )
    target = ms.load_target(tf.AutoModelForCausalLM.from_config(config).double())
    assert target.context_limit == 16
    out = ms.generate(target, prompts_of(5, 9), max_new_tokens=40, eos=())
    assert [len(t) for t in out.tokens] == [11, 7]
    assert out.finish == ["context", "context"]


def test_local_attention_that_counts_slots_is_refused():
    config = tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    )
    with pytest.raises(ms.UnsupportedModelError, match="local attention"):
        ms.load_target(tf.AutoModelForCausalLM.from_config(config))


def test_the_wrapper_itself_tries_too():
    config = tf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.5,
    )
    with pytest.raises(ms.UnsupportedModelError, match=r"bert .*token tree"):
        ms.LanguageModel(tf.BertLMHeadModel(config))  # it looks ahead


def test_settings_that_are_not_applied_are_named():
    model = tiny_transformer("llama", torch.float32, 0)
    model.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match="repetition_penalty"):
        ms.load_target(model)


def test_an_unknown_device_is_refused(tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match="unknown device 'nonsense'"):
        ms.load_target(tmp_path, device="nonsense")


def test_a_model_that_changes_its_dtype_is_seen():
    target = tiny("llama", torch.float32)
    ms.generate(target, prompts_of(3), max_new_tokens=3)
    target.model.double()
    assert len(ms.generate(target, prompts_of(3, 5), max_new_tokens=3, eos=()).tokens[0]) == 3


def test_an_untested_architecture_that_reads_trees_is_welcome():
    config = tf.StableLmConfig(**COMMON, **SIZE, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = ms.load_target(tf.AutoModelForCausalLM.from_config(config).double())
    assert tree_error(target) < 1e-9
    plain = ms.generate(target, prompts_of(3, 5), max_new_tokens=12, eos=())
    out = ms.generate(target, prompts_of(3, 5), ms.Oracle(0.7, 3), max_new_tokens=12, eos=())
    assert [t.tolist() for t in out.tokens] == [t.tolist() for t in plain.tokens]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_tested_architectures_read_trees(name):
    assert tree_error(tiny(name)) < 1e-6  # Gemma-2's own softmax is fp32
    assert tiny(name).config.model_type in TESTED


def test_the_trial_sees_a_leaking_mask(llama, monkeypatch):
    whole = KVCache.mask

    def leaking(self, depth, visible, *rest):
        return whole(self, depth, torch.ones_like(visible).tril(), *rest)

    monkeypatch.setattr(KVCache, "mask", leaking)
    assert tree_error(llama) > 0.1


def test_encoder_decoders_are_refused_before_their_weights_are_read(tmp_path):
    tf.T5Config(vocab_size=VOCAB, d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ms.UnsupportedModelError, match="t5 is an encoder-decoder"):
        ms.load_target(tmp_path)


def test_missing_and_damaged_weights_are_clear_errors(tmp_path):
    with pytest.raises(ms.ModelLoadError, match=r"cannot load .*nowhere"):
        ms.load_target(tmp_path / "nowhere")
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ms.ModelLoadError, match="cannot load"):
        ms.load_target(tmp_path)
    weights.unlink()
    with pytest.raises(ms.ModelLoadError, match="cannot load"):
        ms.load_target(tmp_path)


def test_a_hub_that_cannot_be_reached_is_a_clear_error():
    with pytest.raises(ms.ModelLoadError, match=r"cannot load 'someone/some-model'[\s\S]*hub id"):
        ms.load_target("someone/some-model")


@pytest.mark.parametrize("dtype", ["int8", "magic", 3])
def test_an_unknown_dtype_is_refused(dtype, tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match="unknown dtype"):
        ms.load_target(tmp_path, dtype=dtype)


def test_what_is_no_model_is_refused():
    for thing in (
        torch.nn.Linear(2, 2),
        tf.AutoModel.from_config(tf.LlamaConfig(**COMMON, **SIZE)),
    ):
        with pytest.raises((TypeError, ms.UnsupportedModelError)):
            ms.load_target(thing)


def test_tokenizers_that_differ_are_refused_with_the_first_token_named():  # pitfall 22
    target = ms.load_target(tiny_transformer("llama", torch.float32, 0), tokenizer=words(VOCAB))
    twin = ms.load_target(
        tiny_transformer("llama", torch.float32, 1), tokenizer=words(VOCAB, swap=(7, 12))
    )
    with pytest.raises(ValueError, match="id 7 is 'w12' there and 'w7' here"):
        ms.generate(target, "w3", ms.DraftModel(twin), max_new_tokens=3)


def test_a_draft_of_another_size_without_tokenizers_is_refused(llama):
    other = tiny("llama", vocab_size=50)
    with pytest.raises(ValueError, match="draft's vocabulary has 50 tokens, the target's 61"):
        ms.generate(llama, prompts_of(3), ms.DraftModel(other), max_new_tokens=3)


def test_a_draft_whose_vocabulary_is_padded_is_welcome():
    target = ms.load_target(tiny_transformer("llama", torch.float64, 0), tokenizer=words(VOCAB))
    padded = ms.load_target(
        tiny_transformer("llama", torch.float64, 1, vocab_size=64), tokenizer=words(VOCAB)
    )
    expected = ms.generate(target, "w3", max_new_tokens=9, eos=()).tokens[0]
    for a, b in ((target, padded), (padded, target)):
        for sampling in (ms.Sampling(), ms.Sampling(1.0)):
            out = ms.generate(
                a, "w3", ms.DraftModel(b, 3), max_new_tokens=9, eos=(), sampling=sampling
            )
            assert len(out.tokens[0]) == 9
            if a is target and sampling.greedy:
                assert torch.equal(out.tokens[0], expected)


def test_a_draft_that_reads_less_than_the_text_is_refused(llama):
    short = tiny("llama", max_position_embeddings=16)
    with pytest.raises(ValueError, match="draft model reads at most 16 tokens"):
        ms.generate(llama, prompts_of(10), ms.DraftModel(short), max_new_tokens=10)


def test_the_models_own_attention_setting_comes_back(llama):
    before = llama.config._attn_implementation
    ms.generate(llama, prompts_of(3), ms.EarlyExit(1, 2), max_new_tokens=3)
    assert llama.config._attn_implementation == before
    with pytest.raises(ValueError, match="cache holds"):
        llama.forward(llama.new_cache(1, 1), torch.zeros(1, 2, dtype=torch.long))
    assert llama.config._attn_implementation == before
    assert not llama.model.lm_head._forward_pre_hooks  # and no hook is left behind


def test_hidden_states_are_where_they_should_be(llama):
    ids = torch.tensor(prompts_of(6))
    with torch.no_grad():
        out = llama.forward(llama.new_cache(1, 6), ids, taps=(0, 2))
        states = llama.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(out.taps[0], states[0])
    torch.testing.assert_close(out.taps[2], states[2])
    torch.testing.assert_close(out.hidden, states[-1])  # after the final norm


def test_only_the_logits_that_are_read_are_made(llama):
    ids = torch.tensor(prompts_of(6, 6))
    with torch.no_grad():
        whole = llama.forward(llama.new_cache(2, 6), ids).logits
        some = llama.forward(llama.new_cache(2, 6), ids, read=torch.tensor([[5], [2]])).logits
    assert some.shape == (2, 1, VOCAB)
    torch.testing.assert_close(some[:, 0], torch.stack([whole[0, 5], whole[1, 2]]))
