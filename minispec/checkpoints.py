"""Published formats of heads and drafts, in and out.

A file is judged by the tensors in it, not by what its config says: heads are counted by their
keys, every tensor must be used and none may be missing, and what is not known is refused by name.
Weights are safetensors, or pickles read with ``weights_only=True`` and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .drafters.eagle import EagleConfig, EagleHead
from .drafters.medusa import MedusaHeads
from .models import LanguageModel

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")


class CheckpointError(ValueError):
    """This file is no head that minispec knows; the message says what is wrong with it."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors or a pickled file, on the CPU."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has errors of its own for a damaged file
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
        raise CheckpointError(f"{path} holds something else than named tensors")
    return held


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a .safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary)
    os.replace(temporary, path)


# Medusa.


def load_medusa(source: str | Path) -> MedusaHeads:
    """Medusa heads from a file or a folder.

    Known: the authors' ``{head}.{layer}.linear.weight|bias`` with ``{head}.{layers}.weight``
    (version 1, own projections) or without (version 2, the target's LM head), and the layout of
    serving engines, ``blocks.{head}.layers.{layer}.weight|bias`` with ``lm_heads.{head}.weight``;
    either with an optional ``token_map`` of target ids.
    """
    path = _find(Path(source), MEDUSA_FILES)
    tensors = _medusa_names(read_tensors(path))
    token_map = tensors.pop("token_map", None)
    found = [re.fullmatch(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)", k) for k in tensors]
    blocks = {(int(m[1]), int(m[2])) for m in found if m and m[3]}
    if not blocks:
        raise CheckpointError(f"{path} holds no Medusa heads")
    num_heads, num_layers = max(h for h, _ in blocks) + 1, max(n for _, n in blocks) + 1
    first = tensors["0.0.linear.weight"]
    own = tensors.get(f"0.{num_layers}.weight")
    heads = MedusaHeads(
        first.shape[0],
        num_heads,
        num_layers,
        None if own is None else own.shape[0],
        None if token_map is None else token_map.long(),
    ).to(first.dtype)
    _load_strictly(heads, tensors, path)
    return heads.eval()


def _medusa_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A serving engine's names to the authors'; the projection stands behind the last block."""
    found = {}
    layers = [int(m[1]) for k in tensors if (m := re.match(r"blocks\.\d+\.layers\.(\d+)\.", k))]
    for key, value in tensors.items():
        if m := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", key):
            key = f"{m[1]}.{m[2]}.linear.{m[3]}"
        elif m := re.fullmatch(r"lm_heads\.(\d+)\.weight", key):
            key = f"{m[1]}.{max(layers, default=-1) + 1}.weight"
        found[key.removeprefix("medusa_head.")] = value
    return found


def save_medusa(heads: MedusaHeads, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes heads in the authors' layout, ``medusa_lm_head.safetensors``, with a config."""
    tensors = {k: v.to(dtype) for k, v in heads.state_dict().items()}
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map.int()
    write_tensors(tensors, folder / MEDUSA_FILES[0])
    config = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# EAGLE.

EAGLE_FILES = ("model.safetensors", "pytorch_model.bin")
LAYER_NAMES = ("layers.0.", "midlayer.")  # EAGLE-1's and EAGLE-3's; here: layer.


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs the authors of EAGLE-3 fuse: 2, L/2 and L - 3."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 <= taps[0] < taps[1] < taps[2]:
        raise ValueError(f"a target of {num_layers} layers is too shallow for taps {taps}")
    return taps


def load_eagle(source: str | Path, num_target_layers: int | None = None) -> EagleHead:
    """An EAGLE head (version 1 or 3, told by its tensors) from a folder with config and weights.

    EAGLE-1: fc, layers.0.*, no input norm, no LM head. EAGLE-3: fc over three taps, midlayer.*,
    norm, lm_head, with d2t where it drafts over fewer tokens: target id = draft id + d2t[draft
    id], an offset. The layers that are tapped are taken from the config ("tap_layer_inputs"), else
    from ``num_target_layers`` by the authors' rule.
    """
    folder = Path(source)
    path = _find(folder, EAGLE_FILES)
    facts = _config(path.parent / "config.json")
    tensors = {_eagle_name(k): v for k, v in read_tensors(path).items()}
    version = 3 if "layer.hidden_norm.weight" in tensors else 1
    embed = tensors.pop("embed_tokens.weight", None)
    token_map = _offsets(tensors, path)
    fc, query, key = (_need(tensors, n, path) for n in EAGLE_SHAPES)
    width = fc.shape[0]
    heads = int(facts["num_attention_heads"])
    head_dim = int(facts.get("head_dim") or query.shape[0] // heads)
    if version == 3:
        taps = tuple(facts.get("tap_layer_inputs") or ())
        if not taps and num_target_layers is None:
            raise CheckpointError(
                f"{path.parent} does not say which layers it taps: give num_target_layers"
            )
        taps = taps or default_taps(num_target_layers or 0)
        vocab, target_width = _need(tensors, "lm_head.weight", path).shape[0], fc.shape[1] // 3
    else:
        taps, target_width = (), fc.shape[1] - width
        vocab = len(token_map) if token_map is not None else int(facts["vocab_size"])
    rope = facts.get("rope_parameters") or {}
    config = EagleConfig(
        version=version,
        width=width,
        heads=heads,
        kv_heads=key.shape[0] // head_dim,
        head_dim=head_dim,
        intermediate=_need(tensors, "layer.mlp.gate_proj.weight", path).shape[0],
        vocab=vocab,
        target_width=target_width,
        taps=taps,
        rope_theta=float(facts.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        eps=float(facts.get("rms_norm_eps", 1e-6)),
        fc_bias="fc.bias" in tensors,
        qkv_bias="layer.self_attn.q_proj.bias" in tensors,
    )
    head = EagleHead(config, token_map, embed).to(fc.dtype)
    _load_strictly(head, tensors, path)
    return head.eval()


EAGLE_SHAPES = ("fc.weight", "layer.self_attn.q_proj.weight", "layer.self_attn.k_proj.weight")


def _eagle_name(key: str) -> str:
    for prefix in LAYER_NAMES:
        if key.startswith(prefix):
            return "layer." + key.removeprefix(prefix)
    return key


def _need(tensors: dict[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"{path}: {name} is missing")
    return tensors[name]


def _config(path: Path) -> dict[str, Any]:
    """The head's config. Variants that would need another forward are refused by name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    facts = json.loads(path.read_text())
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if facts.get(name):
            raise CheckpointError(f"{path}: heads with {name} are not supported")
    if "num_attention_heads" not in facts:
        raise CheckpointError(f"{path} does not say num_attention_heads")
    return facts


def _offsets(tensors: dict[str, Tensor], path: Path) -> Tensor | None:
    """d2t [V_d], offsets, to the target's ids; t2d [V], which ids are drafted, must agree."""
    offsets, inside = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if inside is not None:
        if int(inside.sum()) != len(ids):
            raise CheckpointError(f"{path}: t2d marks {int(inside.sum())} ids, d2t {len(ids)}")
        if len(ids) < len(inside) and not bool(offsets.any()):
            raise CheckpointError(f"{path}: d2t is all zero for a reduced vocabulary")
        if int(ids.max()) >= len(inside) or not bool(inside[ids].all()):
            raise CheckpointError(f"{path}: d2t and t2d name different ids (d2t holds offsets)")
    if len(ids.unique()) != len(ids) or int(ids.min()) < 0:
        raise CheckpointError(f"{path}: d2t names an id twice, or a negative one")
    return ids


def save_eagle(
    head: EagleHead, folder: Path, vocab_size: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a head in the authors' layout, model.safetensors and config.json."""
    c = head.config
    name = LAYER_NAMES[c.version == 3]
    tensors = {k.replace("layer.", name, 1): v.to(dtype) for k, v in head.state_dict().items()}
    if head.token_map is not None:
        ids = head.token_map.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if head.embed is not None:
        tensors["embed_tokens.weight"] = head.embed.to(dtype)
    write_tensors(tensors, folder / EAGLE_FILES[0])
    facts = {
        "architectures": ["LlamaForCausalLMEagle3" if c.version == 3 else "LlamaForCausalLMEagle"],
        "hidden_size": c.width,
        "target_hidden_size": c.target_width,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate,
        "vocab_size": vocab_size,
        "draft_vocab_size": c.vocab,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.eps,
        "tap_layer_inputs": list(c.taps),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


# Draft models with a reduced vocabulary.


def save_draft(draft: LanguageModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """An ordinary transformers model, with its token maps beside it.

    ``token_map.safetensors``: token_map [V_d], the target id of each draft id; read_map [V], the
    draft id as which each target id is read.
    """
    copy.deepcopy(draft.model).to(dtype).save_pretrained(folder, safe_serialization=True)
    if draft.token_map is not None and draft.read_map is not None:
        maps = {"token_map": draft.token_map.int(), "read_map": draft.read_map.int()}
        write_tensors(maps, folder / "token_map.safetensors")


# Shared.


def _find(source: Path, names: tuple[str, ...]) -> Path:
    """``source`` if it is a file, else the first of ``names`` in it."""
    if source.is_file():
        return source
    for name in names:
        if (source / name).is_file():
            return source / name
    raise FileNotFoundError(f"{source} holds none of {', '.join(names)}")


def _load_strictly(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Every tensor used, none missing, every shape right, all numbers finite: or an error."""
    wanted = {k: v.shape for k, v in module.state_dict().items()}
    problems = [f"{k} is missing" for k in sorted(wanted.keys() - tensors.keys())]
    problems += [f"{k} is not known" for k in sorted(tensors.keys() - wanted.keys())]
    for key in sorted(wanted.keys() & tensors.keys()):
        if tensors[key].shape != wanted[key]:
            problems.append(f"{key} is {tuple(tensors[key].shape)}, not {tuple(wanted[key])}")
        elif not bool(tensors[key].isfinite().all()):
            problems.append(f"{key} holds NaN or infinity")
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems[:5]))
    module.load_state_dict(tensors, strict=True)
