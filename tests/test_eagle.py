"""EAGLE heads: the published forward, true features put back, trees that grow and stay trees."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, prompts_of, tiny
from torch import Tensor

import minispec as ms
from minispec.checkpoints import CheckpointError, load_eagle, save_eagle, write_tensors
from minispec.drafters.eagle import Eagle, EagleConfig, EagleHead, copy_gain
from minispec.drafters.grow import Grow, rerank
from minispec.head_checks import by_hand
from minispec.shapes import chain, from_paths

STATIC = from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
TREES = {"chain": chain(3), "static": STATIC, "grown": Grow(num_nodes=9, top_k=3, depth=3)}


def random_head(version: int, seed: int = 0, width: int = 32, **changes) -> EagleHead:
    options = dict(
        version=version, width=width, heads=4, kv_heads=2, head_dim=8, intermediate=48,
        vocab=VOCAB, target_width=32, taps=(0, 1, 2) if version == 3 else (),
    )  # fmt: skip
    token_map = changes.pop("token_map", None)
    head = EagleHead(EagleConfig(**{**options, **changes}), token_map).double()  # type: ignore
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return head


# The forward.


@pytest.mark.parametrize("version", [1, 3])
def test_the_forward_is_the_papers(version):
    head = random_head(version, rope_theta=500.0)
    generator = torch.Generator().manual_seed(1)
    embed, feature = torch.randn(2, 7, 32, generator=generator, dtype=torch.float64)
    position = torch.arange(7)
    mask = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    mask.masked_fill_(~torch.ones(7, 7).tril().bool(), torch.finfo(torch.float64).min)
    with torch.no_grad():
        ours = head.step(embed[None], feature[None], position[None], mask)[0]
        slow = by_hand(head, embed, feature)
        torch.testing.assert_close(ours, slow, atol=1e-5, rtol=1e-5)  # angles are fp32


@pytest.mark.parametrize("version", [1, 3])
def test_logits_read_the_norm_once(version):
    """EAGLE-3's LM head reads the normed feature, EAGLE-1's the feature itself."""
    head = random_head(version)
    f = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = torch.randn(VOCAB, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if version == 1:
        torch.testing.assert_close(head.logits(f, rows), f @ rows.T)
    else:
        w = head.state_dict()
        normed = f / (f.pow(2).mean(-1, keepdim=True) + head.config.eps).sqrt() * w["norm.weight"]
        torch.testing.assert_close(head.logits(f), normed @ w["lm_head.weight"].T)


# The drafter.


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_tokens_are_the_targets(any_target, version, tree):
    prompts = prompts_of(2, 5, 9)
    plain = ms.generate(any_target, prompts, max_new_tokens=20)
    for token_map in (None, torch.arange(0, VOCAB, 3)):
        vocab = VOCAB if token_map is None else len(token_map)
        top = any_target.num_layers - 1
        taps = (0, 1, top) if version == 3 else ()
        head = random_head(version, token_map=token_map, vocab=vocab, taps=taps)
        out = ms.generate(any_target, prompts, Eagle(head, TREES[tree]), max_new_tokens=20)
        assert [t.tolist() for t in out.tokens] == [t.tolist() for t in plain.tokens]


class Watched(Eagle):
    """Compares the draft's cache and its proposal with what a head without a cache computes."""

    def start(self, target, rows, cache, prompt):
        super().start(target, rows, cache, prompt)
        self.target = target
        self.__class__.rounds = 0

    def propose(self, rows):
        tree = super().propose(rows)
        for row in range(rows.batch):
            if not rows.stopped[row]:
                self.compare(rows.tokens[row, : rows.host[row]], tree, row)
        self.__class__.rounds += 1
        return tree

    def compare(self, text: Tensor, tree, row: int) -> None:
        with torch.no_grad():
            out = self.target.forward(
                self.target.new_cache(1, len(text)), text[None], taps=self.taps
            )
        feature = self.head.first(out.hidden, out.taps)[0, :-1]
        num = len(text) - 1
        assert self.cache.lengths_host[row] == num
        embed = self.true_table()[text[1:]]
        keys, values = self.true_keys(embed, feature)
        torch.testing.assert_close(self.cache.layers[0][0][row, :, :num], keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(self.cache.layers[0][1][row, :, :num], values, atol=1e-5, rtol=0)
        # Every node's candidates follow from its own path alone.
        for i in range(tree.num_nodes):
            path, j = [], i
            while j >= 0:
                path.insert(0, j)
                j = int(tree.parents[row, j])
            e, f = embed, feature
            for node in path[:-1]:
                last = by_hand(self.head, e, f)[-1:]
                e = torch.cat([e, self.true_table()[tree.tokens[row, node]][None]])
                f = torch.cat([f, last])
            last = by_hand(self.head, e, f)[-1]
            logits = self.head.logits(last, self.rows_of_head)
            best = self.named(logits.topk(3).indices).tolist()
            rank = sum(int(tree.parents[row, k]) == int(tree.parents[row, i]) for k in range(i))
            assert int(tree.tokens[row, i]) == best[rank]

    def true_table(self) -> Tensor:
        return self.target.model.get_input_embeddings().weight

    def true_keys(self, embed: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        head, layer = self.head, self.head.layer
        if head.config.version == 1:
            x = head.fc(torch.cat([embed, feature], -1))
        else:
            x = torch.cat([layer.input_layernorm(embed), layer.hidden_norm(feature)], -1)
        _, k, v = layer.self_attn.project(x[None], torch.arange(len(x))[None])
        return k[0], v[0]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_true_features_are_put_back_whatever_was_accepted(llama, version, tree):  # pitfall 26
    """A head that shares the target's embedding direction gets some of its drafts accepted."""
    prompts = prompts_of(3, 6, 10)
    with torch.no_grad():
        drafter = Watched(random_head(version, seed=4), TREES[tree])
        ms.generate(llama, prompts, drafter, max_new_tokens=12, eos=())
    assert Watched.rounds > 3


class Cheat(Eagle):
    """Some of the proposals are the truth, so that every accept pattern occurs."""

    def propose(self, rows):
        tree = super().propose(rows)
        tokens = tree.tokens.clone()
        for row in range(rows.batch):
            place = int(rows.host[row])
            right = self.answers[row][place : place + (place * 7 + row) % 3]
            node = -1
            for token in right:
                children = [i for i in range(tree.num_nodes) if int(tree.parents[row, i]) == node]
                if not children:
                    break
                tokens[row, children[0]] = token
                node = children[0]
        return type(tree)(tokens, tree.parents, is_chain=tree.is_chain)


class WatchedCheat(Cheat, Watched):
    def compare(self, text, tree, row):
        """The cache alone: the proposals were tampered with."""
        super().compare(text, type(tree)(tree.tokens[:, :0], tree.parents[:, :0]), row)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_the_draft_cache_is_true_after_any_accept_pattern(llama, version, tree):  # pitfall 26
    prompts = prompts_of(3, 6, 10)
    plain = ms.generate(llama, prompts, max_new_tokens=50, eos=())
    drafter = WatchedCheat(random_head(version), TREES[tree])
    drafter.answers = [p + t.tolist() for p, t in zip(prompts, plain.tokens, strict=True)]
    with torch.no_grad():
        out = ms.generate(llama, prompts, drafter, max_new_tokens=44, eos=())
    assert [t.tolist() for t in out.tokens] == [t.tolist()[:44] for t in plain.tokens]
    accepted = {int(a) for r in out.trace.rounds for a in r.accepted}
    assert {0, 1, 2} <= accepted, "the case does not test what it should"


# The tree that grows.


def test_rerank_keeps_the_best_and_stays_connected():  # pitfall 14
    #           0     1     2 (of 0) 3 (of 0) 4 (of 2)
    values = torch.tensor([[-0.5, -2.0, -0.5, -3.0, -0.5]])  # a path of probability 1
    parents = torch.tensor([[-1, -1, 0, 0, 2]])
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    for num, kept in ((1, [10]), (2, [10, 12]), (3, [10, 12, 14]), (4, [10, 11, 12, 14])):
        tree, _ = rerank(tokens, values, parents, num)
        assert tree.tokens[0].tolist() == kept
        tree.check(VOCAB)
    assert rerank(tokens, values, parents, 4)[0].parents[0].tolist() == [-1, -1, 0, 2]


def test_a_grown_tree_is_the_most_valuable_one(llama):
    """With every node expanded, the tree holds the num_nodes most probable paths of all."""
    spec, k = Grow(num_nodes=8, top_k=4, depth=2), 4
    head = random_head(1, seed=2)
    seen: list = []

    class Spy(Eagle):
        def propose(self, rows):
            tree = super().propose(rows)
            seen.append((rows.tokens[0, : rows.host[0]].clone(), tree))
            return tree

    with torch.no_grad():
        ms.generate(llama, prompts_of(5), Spy(head, spec), max_new_tokens=2, eos=())
        text, tree = seen[0]
        out = llama.forward(llama.new_cache(1, len(text)), text[None])
        embed, rows = llama.model.get_input_embeddings().weight, head.shared_rows(llama)
        e, f = embed[text[1:]], out.hidden[0, :-1]

        def law(e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
            last = by_hand(head, e, f)[-1]
            return last, (rows @ last).softmax(-1)

        last, first = law(e, f)
        paths = {}
        for token in first.topk(k).indices.tolist():
            paths[(token,)] = float(first[token])
            _, second = law(torch.cat([e, embed[token][None]]), torch.cat([f, last[None]]))
            for other in second.topk(k).indices.tolist():
                paths[token, other] = float(first[token] * second[other])
    best = sorted(paths, key=lambda p: -paths[p])[:8]
    ours = set()
    for i in range(8):
        parent = int(tree.parents[0, i])
        above = (int(tree.tokens[0, parent]),) if parent >= 0 else ()
        ours.add((*above, int(tree.tokens[0, i])))
    assert ours == set(best)


def test_what_does_not_fit_is_refused(llama):
    with pytest.raises(ValueError, match="name a layer twice"):  # pitfall 28
        random_head(3, taps=(1, 1, 2))
    with pytest.raises(ValueError, match="taps"):
        random_head(1, taps=(1,))
    with pytest.raises(ValueError, match="not all layers"):
        ms.generate(llama, prompts_of(3), Eagle(random_head(3, taps=(0, 1, 3)), chain(2)))
    with pytest.raises(ValueError, match="width 16"):
        ms.generate(llama, prompts_of(3), Eagle(random_head(3, target_width=16), chain(2)))
    with pytest.raises(ValueError, match="as wide as its target"):
        random_head(1, target_width=16)
    with pytest.raises(ValueError, match=r"say head.to\(target.device, target.dtype\)"):
        ms.generate(llama, prompts_of(3), Eagle(random_head(1).float(), chain(2)))
    with pytest.raises(ValueError, match="without saying which"):
        ms.generate(llama, prompts_of(3), Eagle(random_head(3, vocab=VOCAB - 1), chain(2)))
    with pytest.raises(ValueError, match="embed_tokens"):
        ms.generate(llama, prompts_of(3), Eagle(random_head(3, width=16), chain(2)))
    few = random_head(1, token_map=torch.arange(3), vocab=3)
    with pytest.raises(ValueError, match="candidates"):  # pitfall 24
        ms.generate(llama, prompts_of(3), Eagle(few, Grow(top_k=5)))
    with pytest.raises(ValueError, match="drawn"):
        Eagle(random_head(1), Grow(), choose="draw")
    other = random_head(1, token_map=torch.tensor([1, VOCAB]), vocab=2)
    with pytest.raises(ValueError, match="does not have"):
        ms.generate(tiny(), prompts_of(3), Eagle(other, chain(1)))


# Published files.


def published(
    version: int,
    drafted: Tensor | None,
    width: int = 32,
    head_dim: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    table: bool = False,
    biases: bool = False,
) -> tuple[dict[str, Tensor], dict]:
    """A head for a target 32 wide and 9 layers deep, in the authors' layout, and its config."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    name, wide = ("midlayer", 2 * width) if version == 3 else ("layers.0", width)
    found = {
        "fc.weight": new(width, 96 if version == 3 else 64),
        f"{name}.self_attn.q_proj.weight": new(heads * head_dim, wide),
        f"{name}.self_attn.k_proj.weight": new(kv_heads * head_dim, wide),
        f"{name}.self_attn.v_proj.weight": new(kv_heads * head_dim, wide),
        f"{name}.self_attn.o_proj.weight": new(width, heads * head_dim),
        f"{name}.mlp.gate_proj.weight": new(48, width),
        f"{name}.mlp.up_proj.weight": new(48, width),
        f"{name}.mlp.down_proj.weight": new(width, 48),
        f"{name}.post_attention_layernorm.weight": new(width),
    }
    if version == 3:
        size = VOCAB if drafted is None else len(drafted)
        found |= {
            "midlayer.input_layernorm.weight": new(width),
            "midlayer.hidden_norm.weight": new(width),
            "norm.weight": new(width),
            "lm_head.weight": new(size, width),
        }
    if version == 1 or table:
        found["embed_tokens.weight"] = new(VOCAB, width)
    if biases:
        found |= {
            f"{name}.self_attn.{n}_proj.bias": new(size * head_dim)
            for n, size in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        found["fc.bias"] = new(width)
    if drafted is not None:
        found["d2t"] = drafted - torch.arange(len(drafted))
        found["t2d"] = torch.zeros(VOCAB).bool().index_fill_(0, drafted, True)
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "hidden_size": width,
    }
    return found, config | ({"head_dim": head_dim} if width != 32 else {})


def write_folder(folder, tensors, config, form="safetensors"):
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        write_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


DRAFTED = torch.tensor([1, 4, 5, 9, 20, 33, 60])


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize(("version", "drafted"), [(1, None), (3, None), (3, DRAFTED)])
def test_published_heads_load(tmp_path, version, drafted, form):
    tensors, config = published(version, drafted)
    write_folder(tmp_path, tensors, config, form)
    head = load_eagle(tmp_path, num_target_layers=9)
    c = head.config
    assert (c.version, c.heads, c.kv_heads, c.head_dim, c.eps) == (version, 4, 2, 8, 1e-5)
    assert c.taps == ((2, 4, 6) if version == 3 else ())
    assert c.rope_theta == 10000.0, "the draft's own, whatever the target's"
    state = {k.replace("layer.", "midlayer." if version == 3 else "layers.0.", 1): v
             for k, v in head.state_dict().items()}  # fmt: skip
    kept = {k for k in tensors if k not in ("d2t", "t2d", "embed_tokens.weight")}
    assert state.keys() == kept
    assert all(torch.equal(state[k], tensors[k]) for k in kept)
    if drafted is not None:
        assert torch.equal(head.token_map, drafted)
    if version == 1:
        assert torch.equal(head.embed, tensors["embed_tokens.weight"])
    target = tiny(dtype=torch.float32, num_hidden_layers=9)
    plain = ms.generate(target, prompts_of(3, 6), max_new_tokens=12)
    out = ms.generate(target, prompts_of(3, 6), Eagle(head, Grow(6, 3, 3)), max_new_tokens=12)
    assert [t.tolist() for t in out.tokens] == [t.tolist() for t in plain.tokens]


OTHER = {"width": 24, "head_dim": 16, "heads": 2, "kv_heads": 1, "table": True, "biases": True}


@pytest.mark.parametrize("shape", [{}, OTHER], ids=["as wide", "another width"])
def test_a_published_head_drafts_what_its_file_says(tmp_path, monkeypatch, shape):
    """Own embeddings, biases, another width and head size, RoPE of its own; prompts in parts."""
    drafted = DRAFTED if not shape else torch.arange(0, VOCAB, 2)
    tensors, config = published(3, drafted, **shape)
    config |= {"rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}}
    write_folder(tmp_path, tensors, config)
    head = load_eagle(tmp_path, num_target_layers=9).double()
    assert head.config.rope_theta == 300.0
    target = tiny(num_hidden_layers=9)

    class FromFile(Watched):
        def true_table(self):
            own = tensors.get("embed_tokens.weight")
            return own.double() if own is not None else super().true_table()

    monkeypatch.setattr("minispec.drafters.eagle.CHUNK", 4)
    with torch.no_grad():
        ms.generate(target, prompts_of(3, 6, 10), FromFile(head, STATIC), max_new_tokens=8, eos=())
    assert FromFile.rounds > 3
    save_eagle(head, tmp_path / "again", VOCAB, torch.float32)
    again = load_eagle(tmp_path / "again")
    assert again.config == head.config
    assert (again.embed is None) == (head.embed is None)
    if head.embed is not None:
        assert torch.equal(again.embed, tensors["embed_tokens.weight"])


BROKEN = {
    "fc.weight is missing": lambda t: t.pop("fc.weight"),
    "hidden_norm.weight is missing": lambda t: t.pop("midlayer.hidden_norm.weight"),
    "d2t is missing": lambda t: t.pop("d2t"),
    "which 7 of 61": lambda t: t.pop("d2t") is None or t.pop("t2d"),
    "for a reduced vocabulary": lambda t: t.pop("t2d") is None or t["d2t"].zero_(),
    "than there are": lambda t: t.pop("t2d") is None or t["d2t"].__setitem__(-1, VOCAB),
    "norm.weight is missing": lambda t: t.pop("norm.weight"),
    "is not known": lambda t: t.update({"midlayer.extra.weight": torch.ones(3)}),
    "all zero": lambda t: t["d2t"].zero_(),
    "different ids": lambda t: t.update(d2t=DRAFTED.clone()),  # ids in the place of offsets
    "NaN": lambda t: t["norm.weight"].fill_(float("nan")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_heads_are_refused(tmp_path, message):  # pitfall 28
    tensors, config = published(3, DRAFTED)
    BROKEN[message](tensors)
    write_folder(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=message):
        load_eagle(tmp_path, num_target_layers=9)


IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_CONFIGS = [
    ({"norm_before_residual": True}, "norm_before_residual"),
    ({"eagle_config": {"norm_output": True}}, "norm_output"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE of the kind 'llama3'"),
    ({"rope_parameters": {"type": "yarn"}}, "RoPE of the kind 'yarn'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"sliding_window": 8}, "sliding window"),
    ({"speculators_model_type": "eagle3"}, "speculators"),
    ({"target_hidden_size": 48}, "not for taps"),
    ({IDS: [1, 3, 5]}, r"taps=\(2, 4, 6\) if their outputs"),
    ({"eagle_config": {IDS: [1, 3, 5]}}, r"taps=\(1, 3, 5\) if their inputs"),
]


def test_taps_are_taken_from_whoever_says_them(tmp_path):
    tensors, config = published(3, DRAFTED)
    write_folder(tmp_path, tensors, config | {IDS: [1, 3, 5]})
    assert load_eagle(tmp_path, taps=(2, 4, 6)).config.taps == (2, 4, 6)
    with pytest.raises(CheckpointError, match="not for taps"):  # 96 is 2 x 48 as well
        load_eagle(tmp_path, taps=(2, 4, 5, 6, 7))
    two = random_head(3, taps=(0, 2)).float()
    save_eagle(two, tmp_path / "two", VOCAB)
    assert load_eagle(tmp_path / "two").config == two.config


def test_offsets_that_were_never_set_are_the_whole_vocabulary(tmp_path):
    tensors, config = published(3, None)
    unset = {"d2t": torch.zeros(VOCAB).long(), "t2d": torch.zeros(VOCAB).bool()}
    write_folder(tmp_path, tensors | unset, config)
    assert load_eagle(tmp_path, num_target_layers=9).token_map is None


def test_variants_and_shallow_targets_are_refused(tmp_path):
    tensors, config = published(3, DRAFTED)
    write_folder(tmp_path, tensors, config)
    with pytest.raises(ValueError, match="too shallow"):  # pitfall 28
        load_eagle(tmp_path, num_target_layers=5)
    with pytest.raises(CheckpointError, match="which layers it taps"):
        load_eagle(tmp_path)
    for more, message in OTHER_CONFIGS:
        write_folder(tmp_path, tensors, config | more)
        with pytest.raises(CheckpointError, match=message):
            load_eagle(tmp_path, num_target_layers=9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        load_eagle(tmp_path, num_target_layers=9)
    with pytest.raises(FileNotFoundError, match="must be downloaded first"):
        load_eagle("some-hub/EAGLE3-head", num_target_layers=9)


@pytest.mark.parametrize("version", [1, 3])
def test_our_own_heads_come_back(tmp_path, version):
    options = {"vocab": len(DRAFTED), "token_map": DRAFTED, "rope_theta": 77.0}
    head = random_head(version, **options).float()
    save_eagle(head, tmp_path, VOCAB, torch.float32)
    back = load_eagle(tmp_path)
    assert back.config == head.config
    assert torch.equal(back.token_map, DRAFTED)
    for name, value in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)


def test_a_head_of_eagle_3_can_start_near_the_target():
    llama = tiny("llama", torch.float64)
    with torch.no_grad():  # norms that can be told apart
        for i, p in enumerate(p for n, p in llama.model.named_parameters() if "norm" in n):
            p.fill_(1.5 + i / 8)
    head = random_head(3)
    head.start_from(llama)
    e, f = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(head.fc(torch.cat([e, e, f])), f)
    first, last = llama.layers[0], llama.layers[-1]
    assert torch.equal(head.layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    query = head.layer.self_attn.q_proj.weight[:, -32:]
    assert torch.equal(query, last.self_attn.q_proj.weight)
    assert torch.equal(head.lm_head.weight, llama.model.lm_head.weight)
    assert not head.layer.self_attn.k_proj.weight[:, :32].any()
    pairs = {
        head.norm: llama.model.model.norm,
        head.layer.input_layernorm: first.input_layernorm,
        head.layer.hidden_norm: last.input_layernorm,
        head.layer.post_attention_layernorm: last.post_attention_layernorm,
    }
    for mine, theirs in pairs.items():
        assert mine.weight[0] != 1
        torch.testing.assert_close(mine.weight, theirs.weight, atol=1e-5, rtol=1e-5)


def test_a_norm_is_started_by_what_it_does():
    norm, ones = torch.nn.RMSNorm(4), torch.ones(4)

    class Less(torch.nn.RMSNorm):  # stores its gain less 1, as Gemma does
        def forward(self, x):
            return torch.nn.functional.rms_norm(x, (4,), 1 + self.weight)

    owner = SimpleNamespace(less=Less(4), layer=torch.nn.LayerNorm(4), wide=torch.nn.RMSNorm(8))
    with torch.no_grad():
        owner.less.weight.fill_(0.5)
        for name in ("layer", "wide", "none"):
            copy_gain(norm, owner, name)
            assert torch.equal(norm.weight, ones)
        copy_gain(norm, owner, "less")
    torch.testing.assert_close(norm.weight, 1.5 * ones)


def test_a_head_of_eagle_1_starts_with_the_feature_alone(llama):
    head = random_head(1)
    before = {n: p.clone() for n, p in head.named_parameters()}
    head.start_from(llama)
    for name, p in head.named_parameters():
        if name != "fc.weight":
            assert torch.equal(p, before[name])
    eye = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(head.fc.weight[:, 32:], 0.3 * before["fc.weight"][:, 32:] + eye)
