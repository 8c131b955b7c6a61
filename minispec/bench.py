"""Methods side by side: the same prompts by every method, in turn, in one process.

A machine's speed drifts by more than many methods gain. So for each prompt every method runs once,
in an order drawn anew, and what is reported are ratios to plain decoding *on the same prompts*,
each with a bootstrap interval over the prompts:

    speed-up   (plain seconds / plain tokens) / (seconds / tokens), sums over the prompts, of the
               rounds alone: decoding, without the prompt's pass and the drafter's preparation
    whole      the same of the whole call, which is all that can be seen of a peer
    overhead   time of a round / time of a plain step; speed-up = tau / overhead at batch 1

tau, alpha and n-alpha are trace.py's, summed over prompts. transformers' own methods (peers.py) run
in the same turns, on the same weights; a method that fails stays in the table with its reason.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from rich.console import Group
from torch import Tensor, nn

from . import plots
from .bench_report import NAN, OURS, THEIRS, summarise, tables
from .demo import all_methods, machine
from .drafters import Drafter, DraftModel, Oracle
from .exactness import first_divergence
from .generate import Generation, _Run
from .heads import load_trained, trained
from .models import LanguageModel, is_whole
from .peers import has_peer, peer_generate
from .prompts import Prompt, load_prompts
from .sampling import Sampling
from .trace import Trace

# What is measured.


@dataclass(frozen=True)
class Method:
    """One way to generate: a drafter in our loop, or its counterpart in transformers'.

    missing: why it cannot run here at all (weights that are not there): reported, not hidden.
    """

    name: str
    drafter: Drafter | None = None
    engine: str = OURS
    missing: str = ""


def methods(
    target: LanguageModel,
    draft_model: LanguageModel | None = None,
    only: Iterable[str] | None = None,
) -> list[Method]:
    """Every method of ours for this target.

    draft_model: a smaller model of the same tokens, if one is at hand. only: some of ``names``;
    a head that is not among them is not loaded.
    """
    found = [Method(name, drafter) for name, drafter in all_methods().items()]
    if draft_model is not None:
        found.append(Method("draft model", DraftModel(draft_model)))
    for name in trained():
        try:
            if only is None or name in only:
                found.append(Method(name, load_trained(name, target)))
        except (OSError, ValueError) as error:
            found.append(Method(name, missing=str(error)))
    return [method for method in found if only is None or method.name in only]


def with_peers(ours: Iterable[Method]) -> list[Method]:
    """The methods, and behind them transformers' counterparts of those that have one."""
    ours = list(ours)
    able = [m for m in ours if has_peer(m.drafter) and not m.missing]
    return ours + [replace(m, engine=THEIRS) for m in able]


def names(draft_model: bool = False) -> list[str]:
    """What ``methods`` will find, weights or not, before a target is loaded."""
    return [*all_methods(), *(["draft model"] if draft_model else []), *trained()]


def choose(there: Sequence[str], asked: Iterable[str]) -> list[str]:
    """Those asked for (hyphens may stand for spaces), and plain, which all are compared with.

    Raises ValueError for a name that is not there.
    """
    known = {name.replace("-", " "): name for name in there}
    spelt = [name.strip().replace("-", " ") for name in asked]
    for name in spelt:
        if name not in known:
            raise ValueError(f"no method {name!r}: there are {', '.join(there)}")
    return [name for name in there if name == "plain" or name.replace("-", " ") in spelt]


def pick_prompts(
    split: str = "test", kinds: Sequence[str] = (), limit: int | None = None
) -> list[Prompt]:
    """The project's prompts of a split ("dev", "test" or "all"), at most ``limit`` of each kind.

    Raises ValueError for a split, kind or limit that is not there.
    """
    if split not in ("dev", "test", "all"):
        raise ValueError(f"split must be dev, test or all, not {split!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    found = load_prompts(None if split == "all" else split)
    there = list(dict.fromkeys(p.kind for p in found))
    for kind in kinds:
        if kind not in there:
            raise ValueError(f"no kind {kind!r}: there are {', '.join(there)}")
    return [p for k in there if k in (kinds or there) for p in _of_kind(found, k)[:limit]]


def _of_kind(prompts: Iterable[Prompt], kind: str) -> list[Prompt]:
    return [p for p in prompts if p.kind == kind]


def batches(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Prompts of one kind by ``batch``; the last of a kind is filled up with its first again."""
    out = []
    for kind in dict.fromkeys(p.kind for p in prompts):
        rows = _of_kind(prompts, kind)
        for start in range(0, len(rows), batch):
            out.append(list(islice(cycle(rows), start, start + batch)))
    return out


def check_options(
    prompts: Sequence[Prompt], temperatures: Sequence[float], **counts: int | None
) -> list[Sampling]:
    """The laws of these temperatures. Raises ValueError for what cannot be; None is not given."""
    laws = [Sampling(float(t)) for t in dict.fromkeys(temperatures)]
    if not prompts or not laws:
        raise ValueError(f"there are no {'temperatures' if prompts else 'prompts'}")
    for name, value in counts.items():
        if value is not None and (not is_whole(value) or value < 1):
            raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
    return laws


def check_outputs(json_file: Path | None, folder: Path | None) -> None:
    """Raises OSError, before any work, if what is measured could not be written there."""
    if json_file is not None:
        if not json_file.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {str(json_file.parent)!r} for the JSON")
        if json_file.is_dir():
            raise IsADirectoryError(f"{str(json_file)!r} is a folder; name a file for the JSON")
        if not os.access(json_file.parent, os.W_OK):
            raise PermissionError(f"the folder {str(json_file.parent)!r} cannot be written to")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)


@dataclass
class Row:
    """One call: one method on one batch of prompts. Times in seconds, nan where not to be seen."""

    unit: int  # which batch of prompts: what pairs the methods
    prompt: str  # its prompts' names, joined by +
    kind: str
    rows: int  # prompts in it
    repeat: int
    order: int  # place in the turn
    temperature: float
    engine: str
    method: str
    error: str = ""  # why it failed, "" if it did not
    tokens: int = 0  # emitted in the whole call, over all rows
    whole_s: float = NAN  # seconds of the whole call
    prefill_s: float = NAN
    start_s: float = NAN  # seconds of the drafter's preparation
    rounds_s: float = NAN
    draft_s: float = NAN  # of rounds_s: in the drafter; on a GPU nan, where launches return early
    target_s: float = NAN  # of rounds_s: in the target's pass; the same
    rounds: int = 0
    emitted: int = 0  # tokens emitted in the rounds
    live: int = 0  # rounds times rows that were still running: emitted / live = tau
    tried_at: list[int] = field(default_factory=list)  # times that draft position 1, 2, ... stood
    accepted_at: list[int] = field(default_factory=list)  # to be accepted, and was
    memory: float = NAN  # bytes, see ``held_bytes``; on CUDA the allocator's peak
    identical: int = 0  # rows whose tokens are those of our plain decoding; at temperature 0
    near_ties: int = 0  # of the others, those that part at a near-tie, where it was asked
    faults: int = 0  # and those for which there is no such excuse


FLOATS = [f.name for f in fields(Row) if f.type == "float"]


def run_bench(
    target: LanguageModel,
    methods: Sequence[Method] | Mapping[str, Drafter | None],
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    batch: int = 1,
    max_new_tokens: int = 128,
    seed: int = 0,
    repeats: int = 1,
    judge: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Runs every method once on every batch of prompts, in an order drawn anew for each.

    methods: from ``methods()`` and ``with_peers()``, or drafters by name; plain is added if it is
    not among them. repeats: whole turns over each batch, the median of which counts. judge: asks
    ``first_divergence`` about every greedy text that is not plain's (slow: it reads the text again
    in several ways). progress: told what is being done. Raises ValueError for options that cannot
    be, before any work; RuntimeError if plain decoding itself fails.
    """
    ways = _ways(methods)
    laws = check_options(
        prompts, temperatures, batch=batch, max_new_tokens=max_new_tokens, repeats=repeats
    )
    cells = [(law, way) for law in laws for way in ways]
    units = [(group, [p.ids(target) for p in group]) for group in batches(prompts, batch)]
    say = progress or (lambda text: None)
    broken: dict[int, str] = {}  # cells that fail on the warm-up are not tried again
    for i, (law, way) in enumerate(cells):  # the first passes of a process are slow
        say(f"warm-up: {_title(way)}")
        error = _call(target, way, units[0][1], law, min(8, max_new_tokens), seed)[0].error
        if error and way == Method("plain"):
            raise RuntimeError(f"plain decoding itself fails: {error}")
        if error:
            broken[i] = error
    shuffle, rows = random.Random(seed), []
    for unit, (group, ids) in enumerate(units):
        for repeat in range(repeats):
            outs: dict[int, tuple[Row, list[Tensor]]] = {}
            for order, i in enumerate(shuffle.sample(range(len(cells)), len(cells))):
                law, way = cells[i]
                say(f"{group[0].id} ({unit + 1} of {len(units)}): {_title(way)}")
                row, tokens = _blank(law, way, broken.get(i, "")), list[Tensor]()
                if i not in broken:
                    way = _seeded(way, seed + unit)
                    row, tokens = _call(target, way, ids, law, max_new_tokens, seed + unit)
                row.unit, row.repeat, row.order, row.rows = unit, repeat, order, len(group)
                row.prompt, row.kind = "+".join(p.id for p in group), group[0].kind
                outs[i] = row, tokens
            _compare(target, ids, list(outs.values()), judge)
            rows += [outs[i][0] for i in range(len(cells))]
    settings = dict(batch=batch, max_new_tokens=max_new_tokens, seed=seed, repeats=repeats)
    return BenchResult(pd.DataFrame([asdict(row) for row in rows]), _facts(target, settings))


def _ways(given: Sequence[Method] | Mapping[str, Drafter | None]) -> list[Method]:
    ways = [Method(*pair) for pair in given.items()] if isinstance(given, Mapping) else list(given)
    plain = Method("plain")
    ways = ways if plain in ways else [plain, *ways]
    if len({(way.engine, way.name) for way in ways}) < len(ways):
        raise ValueError("two methods have one name")
    return ways


def _title(way: Method) -> str:
    return way.name if way.engine == OURS else f"{way.name}, {way.engine}"


def _seeded(way: Method, seed: int) -> Method:
    """An oracle spoils the same places in every call of one seed: each prompt gets its own."""
    if not isinstance(way.drafter, Oracle):
        return way
    drafter = copy.copy(way.drafter)
    drafter.seed = seed
    return replace(way, drafter=drafter)


def _blank(law: Sampling, way: Method, error: str = "") -> Row:
    return Row(0, "", "", 0, 0, 0, law.temperature, way.engine, way.name, error)


def _call(
    target: LanguageModel,
    way: Method,
    ids: list[list[int]],
    law: Sampling,
    max_new_tokens: int,
    seed: int,
) -> tuple[Row, list[Tensor]]:
    """One timed call, and its tokens. Whatever goes wrong is written into the row."""
    row = _blank(law, way, way.missing)
    if way.missing:
        return row, []
    cuda = target.device.type == "cuda"
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats(target.device)
        began = time.perf_counter()
        if way.engine == THEIRS:
            tokens = peer_generate(
                target, ids, way.drafter, max_new_tokens=max_new_tokens, sampling=law, seed=seed
            )
            row.whole_s = time.perf_counter() - began
        else:
            run = _Run(target, ids, way.drafter, max_new_tokens, law, seed)
            for _ in run.rounds():
                pass
            tokens = run.result().tokens
            row.whole_s = time.perf_counter() - began
            _note_trace(row, run.trace, timed_parts=not cuda)
            row.memory = held_bytes(run)
        if cuda:
            row.memory = torch.cuda.max_memory_allocated(target.device)
    except Exception as error:  # a method of anybody's: it is reported, and the others go on
        return _blank(law, way, f"{type(error).__name__}: {error}".strip()), []
    row.tokens = sum(map(len, tokens))
    return row, tokens


def _note_trace(row: Row, trace: Trace, timed_parts: bool) -> None:
    row.prefill_s, row.start_s, row.rounds_s = trace.prefill_s, trace.start_s, trace.rounds_s
    if timed_parts:
        row.draft_s = sum(r.draft_s for r in trace.rounds)
        row.target_s = sum(r.target_s for r in trace.rounds)
    row.rounds = len(trace.rounds)
    if trace.rounds:
        each = trace.to_frame()  # a line per row and round in which the row was still running
        row.emitted, row.live = int(each["emitted"].sum()), len(each)
        depths = range(1, int(each["tried"].max()) + 1)
        row.tried_at = [int((each["tried"] >= n).sum()) for n in depths]
        row.accepted_at = [int((each["accepted"] >= n).sum()) for n in depths]


def held_bytes(run: _Run) -> int:
    """Bytes that a run holds beside the target's weights, counted and not sampled.

    KV caches, the target's and the drafter's, and the drafter's own weights and buffers, each
    storage once. Activations, which come and go within a pass, are not counted.
    """
    own = {_storage(p) for p in run.target.model.parameters()}
    found: dict[int, int] = {}

    def walk(thing: Any, depth: int) -> None:
        if isinstance(thing, LanguageModel):
            walk(thing.model, depth)
        elif isinstance(thing, nn.Module):
            for tensor in (*thing.parameters(), *thing.buffers()):
                walk(tensor, depth)
        elif isinstance(thing, Tensor):
            if _storage(thing) not in own:
                found[_storage(thing)] = thing.untyped_storage().nbytes()
        elif depth:
            inside = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {})
            for part in inside.values() if isinstance(inside, dict) else inside:
                walk(part, depth - 1)

    walk(run.cache, 4)
    walk(run.drafter, 4)
    return sum(found.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compare(
    target: LanguageModel, ids: list[list[int]], outs: list[tuple[Row, list[Tensor]]], judge: bool
) -> None:
    """Notes how many of each greedy call's texts are plain's, and why the others are not."""
    plain = {row.temperature: t for row, t in outs if (row.engine, row.method) == (OURS, "plain")}
    for row, tokens in outs:
        expected = plain[row.temperature]
        if row.error or not expected or not Sampling(row.temperature).greedy:
            continue
        same = [torch.equal(a, b) for a, b in zip(tokens, expected, strict=True)]
        row.identical = sum(same)
        if judge and not all(same):
            pair = [_bare(ids, texts) for texts in (expected, tokens)]
            verdicts = [d.verdict for d in first_divergence(pair[0], pair[1], target)]
            row.faults = verdicts.count("fault")
            row.near_ties = len(verdicts) - row.faults


def _bare(ids: list[list[int]], tokens: list[Tensor]) -> Generation:
    return Generation([], tokens, [], [], Trace(), None, ids)


def _facts(target: LanguageModel, settings: dict[str, Any]) -> dict[str, Any]:
    """What a kept table must say about where it comes from."""
    return {
        "machine": machine(),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("minispec", "torch", "transformers")},
        "threads": torch.get_num_threads(),
        "target": type(target.model).__name__,
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
        **settings,
    }


@dataclass
class BenchResult:
    """What was measured (frame: one line a call, see ``Row``), and where (facts)."""

    frame: pd.DataFrame
    facts: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> pd.DataFrame:
        """One line per temperature, kind, engine and method: ratios with their intervals.

        Columns: speedup (of the rounds), whole (of the whole call) and, for peers, ours (this
        package's call against theirs), each with _low and _high; tau, alpha, n_alpha, overhead;
        draft, target, rest (shares of the rounds' time); memory in bytes; tokens_per_s; identical
        of prompts; failed of calls, and the first error.
        """
        return summarise(self.frame)

    def to_json(self, path: str | Path) -> Path:
        """Everything measured, row by row, and the summary; written whole or not at all."""
        rows, lines = (_plain_records(f) for f in (self.frame, self.summary()))
        text = json.dumps(
            {"facts": self.facts, "summary": lines, "rows": rows}, allow_nan=False, indent=1
        )
        path = Path(path)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Reads what ``to_json`` wrote."""
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        frame = pd.DataFrame(found["rows"], columns=[f.name for f in fields(Row)])
        return cls(frame.astype(dict.fromkeys(FLOATS, float)), found["facts"])

    def table(self) -> Group:
        """For the screen, within 100 columns: per temperature ours, by kind, and the peers."""
        return tables(self.frame, self.facts)

    def __rich__(self) -> Group:
        return self.table()

    def figures(self, folder: str | Path) -> list[Path]:
        """Three PNGs a temperature: speed-ups, speed-ups by kind, shares of a round."""
        folder, made = Path(folder), []
        folder.mkdir(parents=True, exist_ok=True)
        summary = self.summary()
        with plt.rc_context(plots.STYLE):  # type: ignore[arg-type]
            for t in sorted(set(summary["temperature"])):
                lines = summary[summary["temperature"] == t]
                ours = lines[lines["engine"] == OURS]
                drawn = {
                    "speedup": plots.speedup_bars(lines[lines["kind"] == "all"]),
                    "kinds": plots.kind_bars(ours),
                    "shares": plots.share_bars(ours[ours["kind"] == "all"]),
                }
                for name, figure in drawn.items():
                    made.append(folder / f"{name}-t{t:g}.png")
                    figure.savefig(made[-1])
                    plt.close(figure)
        return made


def _plain_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Records in which nan is None: JSON has no nan."""
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in record.items()} for record in records]
