"""The trained drafts that come with the project, each with the tree that pays on this machine.

``data/heads/<name>/`` holds the weights and ``card.json``: how they were trained, how well they
draft, and for which target (its hash). A static tree is a bargain between what a path is worth,
which was counted once and stands in the card, and what the machine takes for it, which is measured
when the head is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .checkpoints import load_eagle, load_medusa
from .costs import CostModel, time_pass
from .drafters import Drafter, Eagle, Grow, Medusa, Merged, PromptLookup, TreeDraft
from .fetch import sha256
from .generate import generate
from .models import LanguageModel, load_target
from .prompts import Prompt, data_dir
from .shapes import Plan, Shape, best_of, from_paths
from .trace import Trace, pooled

KINDS = ("draft", "medusa", "eagle", "eagle3")
NAMES = {"distilled draft": "draft", "medusa": "medusa", "eagle": "eagle", "eagle-3": "eagle3"}
HOPED = 1.5  # the speed-up by which a node's worth is judged; a wrong guess matters little


def shipped() -> dict[str, Path]:
    """The folders of the heads that are there, by the name that tables and figures use."""
    found = {name: data_dir() / "heads" / folder for name, folder in NAMES.items()}
    return {name: path for name, path in found.items() if (path / "card.json").is_file()}


def card(name: str | Path) -> dict[str, Any]:
    """The card of a shipped head (by name) or of a folder that ``minispec train`` wrote.

    Raises FileNotFoundError where there is none, ValueError for one that cannot be used.
    """
    path = _folder(name) / "card.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(facts, dict) or facts.get("kind") not in KINDS:
        raise ValueError(f"{path} names no kind of head: one of {', '.join(KINDS)}")
    return facts


def _folder(name: str | Path) -> Path:
    """Where a head lies: NAMES are found in data/heads, all else is a folder."""
    if str(name) in NAMES:
        known = shipped()
        if str(name) not in known:
            raise FileNotFoundError(
                f"no head {str(name)!r} in {data_dir() / 'heads'}: there are "
                f"{', '.join(known) or 'none'}"
            )
        return known[str(name)]
    if not (Path(name) / "card.json").is_file():
        raise FileNotFoundError(
            f"no head {str(name)!r}: neither one of {', '.join(NAMES)} nor a folder that minispec "
            "train wrote"
        )
    return Path(name)


Tree = Shape | Grow
WITH_LOOKUP = " + lookup"
# Beside a trained drafter a look-up need not guess: long chains, and only where two tokens match.
LOOKUP = {"num_tokens": 10, "max_ngram": 4, "min_ngram": 2}


def trained() -> list[str]:
    """What ``load_trained`` knows: the shipped heads, and each with prompt lookup in its tree."""
    return [name + more for name in shipped() for more in ("", WITH_LOOKUP)]


def load_trained(name: str, target: LanguageModel, tree: Tree | None = None) -> Drafter:
    """A shipped head by name, or ("medusa + lookup", ...) merged with ``PromptLookup``."""
    head = load_head(name.removesuffix(WITH_LOOKUP), target, tree)
    if not name.endswith(WITH_LOOKUP):
        return head
    return Merged(head, PromptLookup(**LOOKUP))


def load_head(name: str | Path, target: LanguageModel, tree: Tree | None = None) -> Drafter:
    """A trained draft or head for its target, as a drafter.

    name: of a shipped one ("distilled draft", "medusa", ...), or a folder. tree: what it drafts;
    None: the tree that pays best here, see ``tree_for``, which times the machine for a
    second or two. Raises ValueError if it was trained for another target.
    """
    folder = _folder(name)
    facts = card(folder)
    check_target(facts, target, folder.name)
    make = maker(facts["kind"], folder, target)
    return make(tree if tree is not None else tree_for(target, facts, make))


def tree_for(target: LanguageModel, facts: dict[str, Any], make: Callable[[Any], Drafter]) -> Tree:
    """The kind of tree that suits the kind of draft, fitted to this machine."""
    if facts["kind"] == "medusa":
        return best_tree(target, facts, make).shape
    return best_growth(target, make)


def check_target(facts: dict[str, Any], target: LanguageModel, name: str) -> None:
    """Raises ValueError unless ``target`` is the one that the card names."""
    weights = Path(str(target.config.name_or_path)) / "model.safetensors"
    wanted, theirs = facts.get("target sha256"), facts.get("target", "another target")
    if wanted is None:
        return
    if not weights.is_file():
        raise ValueError(f"{name} was trained for {theirs}, and this target is not that")
    if _hash(weights, weights.stat().st_mtime_ns) != wanted:
        raise ValueError(f"{name} was trained for {theirs}, not for these weights")


_hashes: dict[tuple[Path, int], str] = {}


def _hash(path: Path, changed: int) -> str:
    if (path, changed) not in _hashes:
        _hashes[path, changed] = sha256(path)
    return _hashes[path, changed]


def maker(kind: str, folder: Path, target: LanguageModel) -> Callable[[Any], Drafter]:
    """Reads the weights once: what makes a drafter of a tree."""
    if kind == "draft":
        draft = load_target(str(folder), dtype=target.dtype, device=target.device)
        return lambda tree: TreeDraft(draft, tree)
    if kind == "medusa":
        heads = load_medusa(folder).to(target.device, target.dtype)
        return lambda tree: Medusa(heads, tree)
    head = load_eagle(folder, target.num_layers).to(target.device, target.dtype)
    return lambda tree: Eagle(head, tree)


# Which tree.

_timed: WeakKeyDictionary[nn.Module, CostModel] = WeakKeyDictionary()


def pass_times(target: LanguageModel) -> CostModel:
    """t(n) of this target here, measured once a process (about a second)."""
    if target.model not in _timed:
        room = min(256, target.context_limit or 256)
        tokens = [n for n in (1, 2, 4, 8, 16, 32, 64) if 2 * n <= room]
        times = time_pass(target, tokens, context=(room // 2,), repeats=5)
        _timed[target.model] = CostModel(times["tokens"].tolist(), times["seconds"].tolist())
    return _timed[target.model]


def path_values(facts: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """A card's counted paths of ranks, the likeliest first: see ``shapes.path_values``."""
    if not facts.get("path values"):
        raise ValueError("the card has no path values: give the tree to draft")
    return {tuple(map(int, p.split())): float(v) for p, v in facts["path values"].items()}


def best_tree(target: LanguageModel, facts: dict[str, Any], make: Callable[[Any], Drafter]) -> Plan:
    """The static tree with the largest speed-up here, at batch 1: see ``shapes.best_of``.

    facts: a card with "path values". A first tree, chosen as if drafting were free, is run on
    random text for a few rounds, to see what a level costs to draft and a round beside its pass.
    """
    values = path_values(facts)
    passes = pass_times(target)
    trial = _some(best_of(values, passes.t, 0.0), values).shape
    draft, rest = _draft_and_rest(target, make(trial))

    def t(n: int) -> float:
        return float(passes.t(n)) + rest  # plain decoding has its share of it, too

    if facts["kind"] == "medusa":  # all levels at once
        return _some(best_of(values, t, 0.0, round_s=draft), values)
    return _some(best_of(values, t, draft / trial.depth), values)


def node_floor(target: LanguageModel) -> float:
    """How likely to be accepted a node must be, to save more time than it takes.

    A token takes t(1) / HOPED seconds: a node of value v saves v times that, and costs the slope
    of t.
    """
    t = pass_times(target).t
    slope = max(0.0, float(t(17) - t(5)) / 12)
    return min(1.0, slope * HOPED / float(t(1)))


def best_growth(
    target: LanguageModel,
    make: Callable[[Any], Drafter],
    *,
    top_k: int = 3,
    max_nodes: int = 24,
    max_depth: int = 8,
) -> Grow:
    """How a tree should grow here: see ``node_floor``.

    A level costs a draft step, and saves what its nodes are worth times the chance that one of
    their children is right, less what those cost in turn: about a third.
    """
    trial = Grow(8, top_k, 3)
    draft, _ = _draft_and_rest(target, make(trial))
    gain = 3 * draft / trial.depth * HOPED / float(pass_times(target).t(1))
    return Grow(max_nodes, top_k, max_depth, node_floor(target), min(gain, 1.0))


def _draft_and_rest(target: LanguageModel, drafter: Drafter) -> tuple[float, float]:
    """Seconds of a round in the drafter, and beside both passes: medians over a few rounds.

    On random text: what is drafted there is worth little and takes as long.
    """
    chance = torch.Generator().manual_seed(0)
    room = min(128, target.context_limit or 128)
    prompt = torch.randint(target.vocab_size, (1, room // 2), generator=chance)
    every = generate(target, prompt, drafter, max_new_tokens=min(12, room // 4), eos=()).trace
    rounds = every.rounds[1:] or every.rounds
    t = pass_times(target).t
    passing = [r.target_s or float(t(int(r.drafted.max()) + 1)) for r in rounds]  # not on a GPU
    draft = [r.draft_s or max(0.0, r.total_s - s) for r, s in zip(rounds, passing, strict=True)]
    rest = [max(0.0, r.total_s - d - s) for r, d, s in zip(rounds, draft, passing, strict=True)]
    return median(draft), median(rest)


def _some(plan: Plan, values: dict[tuple[int, ...], float]) -> Plan:
    """A drafter drafts: where nothing pays, its likeliest token."""
    if plan.shape.size:
        return plan
    first = next(iter(values))
    return Plan(from_paths([first]), 1 + values[first], plan.speedup)


def note_tau(folder: Path, target: LanguageModel, prompts: Sequence[Prompt]) -> None:
    """Adds to a head's card what it is worth on ``prompts``, and with which tree."""
    facts, drafter = card(folder), load_head(folder, target)
    tree = drafter.tree  # type: ignore[attr-defined]
    facts["tree"] = [list(p) for p in tree.paths] if isinstance(tree, Shape) else asdict(tree)
    facts["tau by kind"] = tau_by_kind(target, drafter, prompts)
    (folder / "card.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def tau_by_kind(
    target: LanguageModel, drafter: Drafter, prompts: Iterable[Prompt], max_new_tokens: int = 96
) -> dict[str, float]:
    """tau of greedy answers by kind of prompt, and over "all" of them: for a card."""
    traces: dict[str, list[Trace]] = {}
    for prompt in prompts:
        out = generate(target, [prompt.ids(target)], drafter, max_new_tokens=max_new_tokens)
        traces.setdefault(prompt.kind, []).append(out.trace)
        traces.setdefault("all", []).append(out.trace)
    return {kind: round(pooled(some).tau, 3) for kind, some in traces.items()}
