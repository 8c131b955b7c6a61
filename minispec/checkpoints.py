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
from collections.abc import Sequence
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


def load_eagle(
    source: str | Path,
    num_target_layers: int | None = None,
    taps: Sequence[int] | None = None,
) -> EagleHead:
    """An EAGLE head (version 1 or 3, told by its tensors) from a folder with config and weights.

    EAGLE-1: fc, layers.0.*, no input norm, no LM head. EAGLE-3: fc over three taps, midlayer.*,
    norm, lm_head, with d2t where it drafts over fewer tokens: target id = draft id + d2t[draft
    id], an offset. The layers whose inputs are tapped: ``taps``, else what the config says
    ("tap_layer_inputs", written by ``save_eagle``), else the authors' rule for
    ``num_target_layers``.

    The head comes in the file's dtype on the CPU: ``.to(target.device, target.dtype)``. Raises
    CheckpointError for whatever would need another forward than ``EagleHead``'s.
    """
    folder = Path(source)
    path = _find(folder, EAGLE_FILES)
    facts = _config(path.parent / "config.json")
    tensors = {_eagle_name(k): v for k, v in read_tensors(path).items()}
    version = 3 if {"lm_head.weight", "layer.hidden_norm.weight"} & tensors.keys() else 1
    embed = tensors.pop("embed_tokens.weight", None)
    fc, query, key = (_need(tensors, n, path) for n in EAGLE_SHAPES)
    width = fc.shape[0]
    heads = int(facts["num_attention_heads"])
    head_dim = int(facts.get("head_dim") or query.shape[0] // heads)
    size = facts.get("vocab_size") or (None if embed is None else embed.shape[0])
    vocab, token_map = _vocabulary(version, tensors, size, path)
    if version == 3:
        chosen = _taps(facts, taps, num_target_layers, path.parent)
        target_width, rest = divmod(fc.shape[1], len(chosen))
        if rest or target_width != (facts.get("target_hidden_size") or target_width):
            raise CheckpointError(f"{path}: fc.weight is {tuple(fc.shape)}: not for taps {chosen}")
    else:
        chosen, target_width = (), fc.shape[1] - width
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
        taps=chosen,
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
    key = key.removeprefix("model.")
    for prefix in LAYER_NAMES:
        if key.startswith(prefix):
            return "layer." + key.removeprefix(prefix)
    return key


def _need(tensors: dict[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"{path}: {name} is missing")
    return tensors[name]


OTHER_FORWARDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _config(path: Path) -> dict[str, Any]:
    """The head's config. What would need another forward is refused by name: no tensor shows it."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        facts = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if facts.get("speculators_model_type"):
        raise CheckpointError(f"{path}: files of the library speculators are not supported")
    for name in OTHER_FORWARDS:
        if facts.get(name) or (facts.get("eagle_config") or {}).get(name):
            raise CheckpointError(f"{path}: heads with {name} are not supported")
    for rope in (facts.get("rope_parameters") or {}, facts.get("rope_scaling") or {}):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise CheckpointError(f"{path}: RoPE of the kind {kind!r} is not supported")
    if facts.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act {facts['hidden_act']!r} is not supported")
    if facts.get("sliding_window") and facts.get("use_sliding_window", True):
        raise CheckpointError(f"{path}: heads with a sliding window are not supported")
    if "num_attention_heads" not in facts:
        raise CheckpointError(f"{path} does not say num_attention_heads")
    return facts


def _taps(
    facts: dict[str, Any], given: Sequence[int] | None, num_layers: int | None, folder: Path
) -> tuple[int, ...]:
    """The layers whose inputs are tapped, low to high: see ``load_eagle``."""
    if given or facts.get("tap_layer_inputs"):
        return tuple(given or facts["tap_layer_inputs"])
    name = "eagle_aux_hidden_state_layer_ids"
    ids = facts.get(name) or (facts.get("eagle_config") or {}).get(name)
    if ids:  # some trainers count the layers' outputs, some their inputs: nothing here says which
        raise CheckpointError(
            f"{folder} names the layers {ids} that it taps: give taps={tuple(ids)} if their inputs "
            f"are meant, taps={tuple(i + 1 for i in ids)} if their outputs"
        )
    if num_layers is None:
        raise CheckpointError(
            f"{folder} does not say which layers it taps: give num_target_layers, or taps"
        )
    return default_taps(num_layers)


def _vocabulary(
    version: int, tensors: dict[str, Tensor], size: int | None, path: Path
) -> tuple[int, Tensor | None]:
    """How many tokens are drafted, and which ids they are (None: all ``size`` of the config)."""
    if version == 3:
        vocab = _need(tensors, "lm_head.weight", path).shape[0]
        return vocab, _offsets(tensors, path, vocab, size)
    token_map = _offsets(tensors, path, None, size)
    drafted = size if token_map is None else len(token_map)
    if drafted is None:
        raise CheckpointError(f"{path.parent} does not say vocab_size")
    return int(drafted), token_map


def _offsets(
    tensors: dict[str, Tensor], path: Path, drafted: int | None, size: int | None
) -> Tensor | None:
    """d2t [V_d], offsets, to the target's ids; t2d [V], which ids are drafted, must agree.

    drafted: V_d where an LM head tells it; size: V by the config.
    """
    offsets, inside = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = size if inside is None else len(inside)
    unset = offsets is None or not bool(offsets.any())
    if unset and drafted is not None and drafted == size:
        return None  # of the whole vocabulary, whatever t2d was left as
    if offsets is None:
        if inside is not None or (drafted is not None and size is not None):
            raise CheckpointError(
                f"{path}: d2t is missing: which {drafted} of {size} ids are these?"
            )
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if drafted is not None and drafted != len(ids):
        raise CheckpointError(f"{path}: d2t names {len(ids)} ids, the LM head {drafted}")
    if inside is not None and int(inside.sum()) != len(ids):
        raise CheckpointError(f"{path}: t2d marks {int(inside.sum())} ids, d2t {len(ids)}")
    if unset and size is not None and len(ids) < size:
        raise CheckpointError(f"{path}: d2t is all zero for a reduced vocabulary")
    if size is not None and int(ids.max()) >= size:
        raise CheckpointError(f"{path}: d2t names different ids than there are (it holds offsets)")
    if inside is not None and not bool(inside[ids].all()):
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
    if not source.exists():
        raise FileNotFoundError(f"there is no folder {source}; a hub's must be downloaded first")
    raise FileNotFoundError(f"{source} holds none of {', '.join(names)}, each in one piece")


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
