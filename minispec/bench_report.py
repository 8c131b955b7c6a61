"""What a benchmark's rows amount to: ratios with their intervals, and tables that show them.

The rows are bench.py's, one a call (see ``bench.Row``). Every figure is a ratio of sums over
prompts, and its interval comes from drawing the prompts again, each with all of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from scipy import stats

from .sampling import Sampling

OURS, THEIRS = "minispec", "transformers"
RESAMPLES = 2000
CELL = ["temperature", "engine", "method"]
NAN = float("nan")


def ratio(
    seconds: Any, tokens: Any, base_seconds: Any, base_tokens: Any, seed: int = 0
) -> tuple[float, float, float]:
    """How many times faster than the base, of sums over paired units, with a 95 % interval.

    Each argument [U], one number a unit. The interval is the percentile bootstrap's: units are
    drawn again together with all of their numbers. nan bounds for fewer than three units.
    """
    given = (base_seconds, base_tokens, seconds, tokens)
    data: list[Any] = [np.asarray(d, dtype=float) for d in given]

    def faster(bs: Any, bt: Any, s: Any, t: Any, axis: int = -1) -> Any:
        with np.errstate(all="ignore"):
            return (bs.sum(axis) / bt.sum(axis)) / (s.sum(axis) / t.sum(axis))

    value = float(faster(*data))
    if len(data[0]) < 3 or not np.isfinite(value):
        return value, NAN, NAN
    found = stats.bootstrap(
        data,
        faster,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return value, float(found.low), float(found.high)


SUMS = ["tokens", "whole_s", "rounds_s", "draft_s", "target_s", "rounds", "emitted", "live"]


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One line per temperature, kind ("all": over every prompt), engine and method."""
    kinds = frame["kind"].unique().tolist()
    pools = [("all", frame)]
    pools += [(kind, frame[frame["kind"] == kind]) for kind in kinds if len(kinds) > 1]
    lines = []
    for kind, pool in pools:
        sums = {cell: _by_unit(rows) for cell, rows in _cells(pool)}
        for cell, rows in _cells(pool):
            t, engine, method = cell
            line = {"temperature": t, "kind": kind, "engine": engine, "method": method}
            base, ours = sums[t, OURS, "plain"], sums.get((t, OURS, method))
            lines.append(line | _line(rows, sums[cell], base, ours))
    return pd.DataFrame(lines)


def _cells(frame: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    """Temperature by temperature, ours first, otherwise in the order in which they were given."""
    frame = frame.sort_values(["temperature", "engine"], kind="stable")
    return list(frame.groupby(CELL, sort=False))


def _by_unit(rows: pd.DataFrame) -> pd.DataFrame:
    """[U lines] what did not fail. A unit's repeats do the same work: the median of them counts."""
    return rows[rows["error"] == ""].groupby("unit")[SUMS].median()


def disturbed(frame: pd.DataFrame) -> int:
    """Calls of ours whose rounds took over 1.5 times what that method's usually take."""
    ours = frame[(frame["engine"] == OURS) & (frame["rounds"] > 0)]
    pace = ours["rounds_s"] / ours["rounds"]
    usual = pace.groupby([ours[name] for name in CELL]).transform("median")
    return int((pace > 1.5 * usual).sum())


def _line(
    rows: pd.DataFrame, sums: pd.DataFrame, base: pd.DataFrame, ours: pd.DataFrame | None
) -> dict[str, Any]:
    """One method over one pool of prompts, against plain on those prompts that both finished."""
    good = rows[rows["error"] == ""]
    base = base[base.index.isin(sums.index)]
    sums = sums[sums.index.isin(base.index)]
    total, plain = sums.sum(), base.sum()
    with np.errstate(all="ignore"):
        step = (total["rounds_s"] / total["rounds"]) / (plain["rounds_s"] / plain["rounds"])
        parts = {part: total[f"{part}_s"] / total["rounds_s"] for part in ("draft", "target")}
        speed = total["tokens"] / total["whole_s"]
        rounds_speed = total["emitted"] / total["rounds_s"]
        tau = total["emitted"] / total["live"]
    tried, accepted = (_add_up(good[name]) for name in ("tried_at", "accepted_at"))
    faster, whole, engine = (NAN,) * 3, (NAN,) * 3, (NAN,) * 3
    if len(sums):
        whole = ratio(sums["whole_s"], sums["tokens"], base["whole_s"], base["tokens"])
    if len(sums) and sums["rounds_s"].notna().any():
        faster = ratio(sums["rounds_s"], sums["emitted"], base["rounds_s"], base["emitted"])
    both = sums.index.intersection(ours.index if ours is not None else [])
    if rows["engine"].iloc[0] == THEIRS and len(both) and ours is not None:
        one, other = ours.loc[both], sums.loc[both]
        engine = ratio(one["whole_s"], one["tokens"], other["whole_s"], other["tokens"])
    return {
        "prompts": int(good["rows"].sum()),
        **_named("speedup", faster),
        **_named("whole", whole),
        **_named("ours", engine),  # how many times faster ours is than this peer, whole call
        "tau": tau,
        "alpha": sum(accepted) / sum(tried) if sum(tried) else NAN,
        "n_alpha": [a / t for a, t in zip(accepted, tried, strict=True)],
        "overhead": step,
        **parts,
        "rest": 1 - parts["draft"] - parts["target"],
        "memory": good["memory"].max(),
        "tokens_per_s": rounds_speed,
        "whole_tokens_per_s": speed,
        "identical": int(good["identical"].sum()),
        "near_ties": int(good["near_ties"].sum()),
        "faults": int(good["faults"].sum()),
        "failed": len(rows) - len(good),
        "calls": len(rows),
        "error": next((e for e in rows["error"] if e), ""),
    }


def _named(name: str, value: Sequence[float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), value, strict=True))


def _add_up(lists: Iterable[Sequence[int]]) -> list[int]:
    """Place by place; shorter lists end in zeros."""
    lists = list(lists)
    width = max(map(len, lists), default=0)
    return [sum(x[n] for x in lists if n < len(x)) for n in range(width)]


# Tables.


def tables(frame: pd.DataFrame, facts: dict[str, Any]) -> Group:
    """For the screen, within 100 columns: per temperature ours, by kind, and the peers."""
    summary = summarise(frame)
    out: list[Table | None] = []
    for t in sorted(set(summary["temperature"])):
        lines = summary[summary["temperature"] == t]
        out += [_main_table(t, lines, facts), _kind_table(lines), _n_alpha_table(lines)]
        out.append(_peer_table(lines, facts))
    shown = [part for part in out if part is not None]
    return Group(*shown, Text(notes(summary, facts, disturbed(frame))))


def _main_table(temperature: float, lines: pd.DataFrame, facts: dict[str, Any]) -> Table:
    plain = _of(lines, OURS, "all")[0]
    title = (
        f"{facts.get('target')} ({facts.get('dtype')}, {facts.get('device')}, "
        f"{facts.get('threads')} threads), temperature {temperature:g}, batch "
        f"{facts.get('batch')}, {plain.prompts} texts of {facts.get('max_new_tokens')}"
    )
    out = _bare_table(title)
    heads = ["method", "speed-up", "whole call", "τ", "α", "over-\nhead"]
    heads += ["% draft/\ntarget/\nrest", "mem.\nMB", "tok/s", "same\ntext"]
    _columns(out, heads)
    for line in _of(lines, OURS, "all"):
        if line.failed == line.calls:
            out.add_row(line.method, "failed", *["-"] * (len(heads) - 2))
            continue
        shares = "/".join(_number(100 * x, 0) for x in (line.draft, line.target, line.rest))
        out.add_row(
            line.method + ("*" if line.method == "oracle" else ""),
            _interval(line.speedup, line.speedup_low, line.speedup_high),
            _interval(line.whole, line.whole_low, line.whole_high),
            *(_number(x, 2) for x in (line.tau, line.alpha, line.overhead)),
            shares if "nan" not in shares else "-",
            _number(line.memory / 1e6, 0),
            _number(line.tokens_per_s, 1),
            f"{line.identical}/{line.prompts}" if Sampling(temperature).greedy else "-",
        )
    return out


def _peer_table(lines: pd.DataFrame, facts: dict[str, Any]) -> Table | None:
    theirs = _of(lines, THEIRS, "all")
    if not theirs:
        return None
    number = facts.get("versions", {}).get(THEIRS, "")
    out = _bare_table(f"{THEIRS} {number} in the same turns, whole calls")
    heads = ["its method", "against\nour plain", "ours of that name\nagainst it"]
    _columns(out, [*heads, "whole\ntok/s", "same\ntext"])
    for line in theirs:
        if line.failed == line.calls:
            out.add_row(line.method, "failed", "-", "-", "-")
            continue
        greedy = Sampling(line.temperature).greedy
        out.add_row(
            line.method,
            _interval(line.whole, line.whole_low, line.whole_high),
            _interval(line.ours, line.ours_low, line.ours_high),
            _number(line.whole_tokens_per_s, 1),
            f"{line.identical}/{line.prompts}" if greedy else "-",
        )
    return out


def notes(lines: pd.DataFrame, facts: dict[str, Any], disturbed: int = 0) -> str:
    """What a reader of the tables must know."""
    pooled = lines[lines["kind"] == "all"]
    where = "the allocator's peak, the target's weights included"
    if facts.get("device", "cpu") == "cpu":
        where = "KV caches and drafter weights beside the target's, activations left out"
    out = [
        "Ratios to plain decoding on the same prompts, of sums over the prompts; in brackets "
        "95 % bootstrap intervals over prompts (none for fewer than three). Speed-up: of the "
        "rounds alone, tau / overhead at batch 1. Whole call: with the prompt's pass and the "
        f"drafter's preparation. Memory: {where}. Same text: token for token as plain."
    ]
    if "oracle" in set(lines["method"]):
        out.append(
            "* The oracle is no method: it has asked the target beforehand (above temperature "
            "0 it drafts with the target itself). It shows what a given α would be worth."
        )
    if THEIRS in set(lines["engine"]):
        out.append(
            "transformers' methods run on the same weights and ids, with the draft length of "
            "ours of that name; of its calls only the whole time is to be seen."
        )
    if _texts_part(pooled, facts):
        out.append(
            "In 16 bits a pass over several tokens rounds differently from a pass over one; "
            "where two tokens nearly tie, the other may win, and the text goes another way."
        )
    judged = pooled[(pooled["near_ties"] > 0) | (pooled["faults"] > 0)]
    for line in list[Any](judged.itertuples()):
        out.append(f"{_who(line)} parts: {line.near_ties} at near-ties, {line.faults} by a fault.")
    for line in list[Any](pooled[pooled["failed"] > 0].itertuples()):
        what = f"{_who(line)} at temperature {line.temperature:g}"
        out.append(f"{what} failed on {line.failed} of {line.calls} calls: {line.error}")
    if disturbed:
        out.append(
            f"In {disturbed} calls a round took over 1.5 times what that method's usually take: "
            "the machine was busy with something else. --repeats 3 takes medians."
        )
    return "\n".join([*out, facts.get("machine", "")])


def _who(line: Any) -> str:
    return line.method if line.engine == OURS else f"{line.method}, {line.engine}"


def _texts_part(pooled: pd.DataFrame, facts: dict[str, Any]) -> bool:
    greedy = pooled[pooled["temperature"] == 0]
    short = facts.get("dtype") in ("bfloat16", "float16")
    return short and bool((greedy["identical"] < greedy["prompts"]).any())


def _bare_table(title: str) -> Table:
    out = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left", padding=0)
    return out


def _columns(table: Table, heads: Sequence[str]) -> None:
    for place, head in enumerate(heads):
        # Numbers are never cut; a long name may take two lines.
        table.add_column(head, justify="right" if place else "left", no_wrap=place > 0)


def _of(lines: pd.DataFrame, engine: str, kind: str) -> list[Any]:
    return list(lines[(lines["engine"] == engine) & (lines["kind"] == kind)].itertuples())


def _number(value: float, digits: int) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def _interval(value: float, low: float, high: float, between: str = " ") -> str:
    """1.21 [1.10, 1.33]; without the brackets where there is no interval."""
    if value != value:
        return "-"
    if low != low or low == high:
        return f"{value:.2f}"
    return f"{value:.2f}{between}" + escape(f"[{low:.2f}, {high:.2f}]")


def _kind_table(lines: pd.DataFrame) -> Table | None:
    kinds = [k for k in dict.fromkeys(lines["kind"]) if k != "all"]
    if not kinds:
        return None
    out = _bare_table("speed-up by kind of prompt")
    _columns(out, ["method", *(k.replace("_", "\n") for k in kinds)])
    ours = lines[(lines["engine"] == OURS) & (lines["method"] != "plain")]
    for method in ours["method"].unique():
        own = {line.kind: line for line in ours[ours["method"] == method].itertuples()}
        cells = [(o.speedup, o.speedup_low, o.speedup_high) for o in map(own.get, kinds) if o]
        out.add_row(str(method), *(_interval(*cell, between="\n") for cell in cells))
    return out if out.row_count else None


def _n_alpha_table(lines: pd.DataFrame) -> Table | None:
    shown = [line for line in _of(lines, OURS, "all") if line.n_alpha]
    if not shown:
        return None
    deepest = max(len(line.n_alpha) for line in shown)
    out = _bare_table("n-α by position")
    _columns(out, ["method", *map(str, range(1, deepest + 1))])
    for line in shown:
        out.add_row(line.method, *(f"{a:.2f}" for a in line.n_alpha))
    return out
