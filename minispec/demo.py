"""The same prompts by plain decoding and by every drafter there is, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .drafters import Drafter, EarlyExit, Oracle, PromptLookup
from .generate import Generation, generate, stream
from .heads import load_trained, trained
from .models import LanguageModel
from .prompts import Prompt, data_dir, load_prompts
from .show import ACCEPTED_STYLE, OWN_STYLE
from .trace import pooled

DEMO_PROMPTS = ("conversation-01", "summarisation-01", "mathematics-01", "retrieval-01")
STREAMED = "prompt lookup"


__all__ = ["Prompt", "data_dir", "load_prompts"]


def all_methods() -> dict[str, Drafter | None]:
    """Every drafter that needs no training, under the name that tables and figures use."""
    return {
        "plain": None,
        "prompt lookup": PromptLookup(num_tokens=8),
        "early exit": EarlyExit(layer=24, num_tokens=2),
        "oracle": Oracle(alpha=0.8, num_tokens=6),
    }


def demo_methods(
    target: LanguageModel, like: dict[str, Drafter | None] | None = None
) -> dict[str, Drafter | None]:
    """Those, and every head that comes with the project; a distilled draft replaces early exit.

    like: the methods of the same target in another dtype, whose trees are drafted again.
    """
    found = all_methods()
    for name in trained():
        tree = like[name] if like else None
        while isinstance(tree, Drafter):  # of a merged one: its head's
            tree = tree.tree  # type: ignore[attr-defined]
        found[name] = load_trained(name, target, tree)
    if "distilled draft" in found:
        del found["early exit"]
    oracle = {"oracle": found.pop("oracle")}
    return found | oracle


@dataclass
class Runs:
    """One method's generations over all prompts."""

    outs: list[Generation] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the rounds alone: prefill, and what an oracle does beforehand, are left out."""
        return sum(o.trace.rounds_s for o in self.outs)

    @property
    def tokens_per_second(self) -> float:
        emitted = sum(int(r.emitted.sum()) for o in self.outs for r in o.trace.rounds)
        return emitted / self.seconds

    def identical(self, others: Runs) -> int:
        """In how many of the prompts the tokens are the same."""
        pairs = zip(self.outs, others.outs, strict=True)
        return sum(torch.equal(a.tokens[0], b.tokens[0]) for a, b in pairs)


def run_demo(
    target: LanguageModel,
    prompts: Sequence[Prompt],
    console: Console,
    max_new_tokens: int = 96,
    exact: LanguageModel | None = None,
) -> dict[str, Runs]:
    """Streams an answer to each prompt, runs every method on it in turn, prints the table.

    exact: the same model in float32, on which the texts are compared once more (half as long).
    """
    methods = demo_methods(target)
    console.print(f"[{ACCEPTED_STYLE}]drafted and accepted[/]  [{OWN_STYLE}]the target's own[/]")
    for prompt in prompts:
        console.rule(f"{prompt.id}", align="left")
        console.print(escape(_shortened(prompt.text)), style="italic dim")
        _stream(target, prompt, methods[STREAMED], console, max_new_tokens)
    console.rule("side by side", align="left")
    runs = run_all(target, methods, prompts, console, max_new_tokens)
    checks = None
    if exact is not None:
        again = demo_methods(exact, like=methods)
        checks = run_all(exact, again, prompts, console, max_new_tokens // 2)
    console.print(table(target, runs, checks))
    return runs


def run_all(
    target: LanguageModel,
    methods: dict[str, Drafter | None],
    prompts: Sequence[Prompt],
    console: Console,
    max_new_tokens: int,
) -> dict[str, Runs]:
    """Every method on every prompt, prompt by prompt, so that drift hits all methods alike."""
    for drafter in methods.values():  # warm-up: the first passes of a process are slow
        generate(target, [list(range(2, 18))], drafter, max_new_tokens=6, eos=())
    runs = {name: Runs() for name in methods}
    for prompt in prompts:
        for name, drafter in methods.items():
            with console.status(f"{_dtype(target)}: {prompt.id}, {name} ..."):
                out = generate(target, prompt.chat(), drafter, max_new_tokens=max_new_tokens)
            runs[name].outs.append(out)
    return runs


def _stream(
    target: LanguageModel, prompt: Prompt, drafter: Drafter | None, console: Console, limit: int
) -> None:
    for piece in stream(target, prompt.chat(), drafter, max_new_tokens=limit):
        style = ACCEPTED_STYLE if piece.accepted else OWN_STYLE
        console.print(escape(piece.text), style=style, end="", highlight=False, soft_wrap=True)
    console.print()


def _shortened(text: str, width: int = 200) -> str:
    return text if len(text) <= width else f"{text[:width].rsplit(' ', 1)[0]} ..."


def _dtype(target: LanguageModel) -> str:
    return str(target.dtype).removeprefix("torch.")


def table(
    target: LanguageModel, runs: dict[str, Runs], checks: dict[str, Runs] | None = None
) -> Table:
    """Method by method: speed, what the drafts were worth, and whether the text is the same."""
    plain = runs["plain"]
    where = f"{_dtype(target)}, {target.device}, greedy, {len(plain.outs)} prompts"
    out = Table(title=f"{type(target.model).__name__} ({where})", box=SIMPLE, pad_edge=False)
    out.title_justify, out.padding = "left", (0, 1, 0, 0)
    compared = {_dtype(target): runs} | ({"float32": checks} if checks else {})
    names = [f"identical\n{name}" for name in compared]
    for column in ("method", "tokens/s", "speed-up", "τ", "α", "target\npasses", *names):
        named = column == "method"  # may take two lines; numbers are never cut
        out.add_column(column, justify="left" if named else "right", no_wrap=not named)
    for name, run in runs.items():
        trace = pooled(o.trace for o in run.outs)
        out.add_row(
            name,
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}x",
            f"{trace.tau:.2f}",
            "-" if trace.alpha != trace.alpha else f"{trace.alpha:.2f}",
            str(sum(o.trace.passes for o in run.outs)),
            *(_identical(by_name[name], by_name["plain"]) for by_name in compared.values()),
        )
    out.caption = notes(runs, target.dtype)
    out.caption_justify = "left"
    return out


def _identical(run: Runs, plain: Runs) -> str:
    same, total = run.identical(plain), len(plain.outs)
    return "yes" if same == total else f"no: {same} of {total}"


def notes(runs: dict[str, Runs], dtype: torch.dtype) -> str:
    """What a reader of the table must know."""
    lines = [
        "Times are of the rounds alone, without the prompt's pass. Identical: is the text that of "
        "plain decoding, token for token?"
    ]
    if "oracle" in runs:
        lines.append(
            "The oracle is no method: it has asked the target beforehand and spoils a fifth of "
            "the answer, to show what a drafter that costs nothing would give at α 0.8."
        )
    plain = runs["plain"]
    if dtype in (torch.bfloat16, torch.float16) and any(
        r.identical(plain) < len(plain.outs) for r in runs.values()
    ):
        lines.append(
            "In 16 bits a pass over several tokens rounds differently from a pass over one; where "
            "two tokens nearly tie, the other may win, and the text goes another way."
        )
    return "\n".join(lines)


def machine() -> str:
    """The machine in one line, for tables that are kept."""
    cpu = "unknown CPU"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names: Iterable[str] = (
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        )
        cpu = next(iter(names), cpu)
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}"
