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

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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
