"""The command line: minispec demo | generate | bench | corpus | train | fetch | exactness."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .training.cli import corpus_app, err, fail, train

app = typer.Typer(
    help="Speculative decoding, compact, exact and readable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(corpus_app, name="corpus")
app.command()(train)
out = Console(highlight=False)


class DrafterName(StrEnum):
    none = "none"
    lookup = "lookup"
    early_exit = "early-exit"
    draft = "draft"
    medusa = "medusa"
    eagle = "eagle"
    eagle3 = "eagle3"
    oracle = "oracle"


@app.command()
def fetch(
    force: Annotated[bool, typer.Option(help="Fetch anew, also if it is there.")] = False,
) -> None:
    """Gets SmolLM2-135M-Instruct into the cache directory (93 MB, once)."""
    from .fetch import FetchError, smollm2_folder

    try:
        err.print(f"[dim]{smollm2_folder(force=force)}[/]")
    except FetchError as error:
        raise fail(error) from error


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="smollm2, a hub id, or a folder.")] = "smollm2",
    drafter: Annotated[DrafterName, typer.Option(help="Who drafts.")] = DrafterName.lookup,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model that drafts.")] = None,
    head: Annotated[Path | None, typer.Option(help="A folder of `minispec train`.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens drafted a round (no head).")] = 8,
    layer: Annotated[int, typer.Option(help="Where early exit leaves the target.")] = 24,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    raw: Annotated[bool, typer.Option(help="The prompt as it is, no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no colours.")] = False,
) -> None:
    """Answers one prompt, accepted drafts in one colour, the target's own tokens in another."""
    from . import drafters
    from .generate import _Run
    from .heads import NAMES, load_head
    from .models import load_target
    from .sampling import Sampling
    from .show import ACCEPTED_STYLE, OWN_STYLE

    try:
        target = load_target(model, dtype=dtype, device=device)
        untrained: dict[str, Callable[[], drafters.Drafter | None]] = {
            "none": lambda: None,
            "lookup": lambda: drafters.PromptLookup(num_tokens),
            "early-exit": lambda: drafters.EarlyExit(layer, num_tokens),
            "oracle": lambda: drafters.Oracle(0.8, num_tokens),
        }
        chosen: drafters.Drafter | None
        heads = {folder: name for name, folder in NAMES.items()}
        if head is not None or drafter.value in heads:
            chosen = load_head(head or heads[drafter.value], target)
        else:
            chosen = untrained[drafter.value]()
        if draft_model is not None:
            chosen = drafters.DraftModel(
                load_target(draft_model, dtype=dtype, device=device), num_tokens
            )
        text = prompt if raw else [{"role": "user", "content": prompt}]
        law = Sampling(temperature, top_k, top_p)
        run = _Run(target, text, chosen, max_new_tokens, law, seed)
        for piece in run.pieces():
            if not as_json:
                style = ACCEPTED_STYLE if piece.accepted else OWN_STYLE
                out.print(escape(piece.text), style=style, end="", soft_wrap=True)
    except (ValueError, TypeError, OSError, FloatingPointError, RuntimeError) as error:
        raise fail(error) from error
    result = run.result()
    if as_json:
        trace = result.trace
        facts = {
            "text": result.text[0],
            "tokens": result.tokens[0].tolist(),
            "finish": result.finish[0],
            "tau": trace.tau,
            "alpha": None if trace.alpha != trace.alpha else trace.alpha,
            "target_passes": trace.passes,
            "seconds": trace.seconds,
        }
        print(json.dumps(facts, ensure_ascii=False))
    else:
        out.print()
        err.print(f"[dim]{result._summary()}, {result.finish[0]}[/]")


@app.command()
def demo(
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    max_new_tokens: Annotated[int, typer.Option()] = 96,
) -> None:
    """The same prompts by plain decoding and by every drafter there is, on SmolLM2-135M."""
    from .demo import DEMO_PROMPTS, load_prompts, machine, run_demo
    from .models import load_target

    try:
        prompts = [p for p in load_prompts() if p.id in DEMO_PROMPTS]
        target = load_target("smollm2", dtype=dtype, device=device)
        exact = load_target("smollm2", dtype="float32", device=device)
        run_demo(
            target, prompts, out, max_new_tokens, exact if target.dtype != exact.dtype else None
        )
    except (ValueError, OSError) as error:
        raise fail(error) from error
    out.print(f"[dim]{machine()}[/]")


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="smollm2, a hub id, or a folder.")] = "smollm2",
    draft_model: Annotated[str | None, typer.Option(help="A smaller model of the tokens.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names, comma between; default all.")] = None,
    split: Annotated[str, typer.Option(help="dev, test or all prompts.")] = "test",
    kind: Annotated[list[str] | None, typer.Option(help="A kind of prompt; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each kind.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; default 0.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts of a kind at once, 1 to 16 or so.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(help="Default 128, quick 24.")] = None,
    peers: Annotated[bool, typer.Option(help="transformers' own methods beside ours.")] = True,
    repeats: Annotated[int, typer.Option(help="Turns a prompt, medians of times.")] = 1,
    judge: Annotated[bool, typer.Option(help="Near-tie or fault, where texts part?")] = False,
    quick: Annotated[bool, typer.Option(help="Two prompts of each kind, 24 tokens.")] = False,
    threads: Annotated[int | None, typer.Option(help="torch's threads.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Everything measured.")] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for figures.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(help="llama-8b, ...: a GPU's passes by random weights instead.")
    ] = None,
) -> None:
    """Every method on the same prompts, in turn: ratios to plain with intervals, and peers."""
    import torch

    from . import bench as side_by_side
    from .models import load_target

    if synthetic is not None:
        return _bench_synthetic(synthetic, device, seed, json_file)
    before = torch.get_num_threads()
    try:
        if quick:
            limit = 2 if limit is None else limit
            max_new_tokens = 24 if max_new_tokens is None else max_new_tokens
        temperatures = temperature or [0.0]
        prompts = side_by_side.pick_prompts(split, kind or (), limit)
        side_by_side.check_options(
            prompts,
            temperatures,
            batch=batch,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            threads=threads,
        )
        there = side_by_side.names(draft_model is not None)
        chosen = side_by_side.choose(there, methods.split(",")) if methods else there
        side_by_side.check_outputs(json_file, png)
        if threads is not None:
            torch.set_num_threads(threads)
        target = load_target(model, dtype=dtype, device=device)
        draft = load_target(draft_model, dtype=dtype, device=device) if draft_model else None
        ways = side_by_side.methods(target, draft, chosen)
        with err.status("...") as status:
            result = side_by_side.run_bench(
                target,
                side_by_side.with_peers(ways) if peers else ways,
                prompts,
                temperatures=temperatures,
                batch=batch,
                max_new_tokens=max_new_tokens or 128,
                seed=seed,
                repeats=repeats,
                judge=judge,
                progress=lambda step: status.update(escape(step)),
            )
        result.facts["command"] = shlex.join(["minispec", *sys.argv[1:]])
        if json_file is not None:
            err.print(f"[dim]{escape(str(result.to_json(json_file)))}[/]")
        Console(highlight=False, width=max(100, out.width)).print(result)
        for path in result.figures(png) if png is not None else ():
            err.print(f"[dim]{escape(str(path))}[/]")
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise fail(error) from error
    finally:
        torch.set_num_threads(before)


def _bench_synthetic(name: str, device: str, seed: int, json_file: Path | None) -> None:
    """``bench --synthetic``: the other options are for models that have something to say."""
    from .bench import check_outputs
    from .synthetic import run_synthetic

    try:
        check_outputs(json_file, None)
        with err.status("...") as status:
            result = run_synthetic(
                name, device, seed=seed, progress=lambda step: status.update(escape(step))
            )
        if json_file is not None:
            err.print(f"[dim]{escape(str(result.to_json(json_file)))}[/]")
        out.print(result)
    except (ValueError, OSError, RuntimeError) as error:
        raise fail(error) from error


@app.command()
def exactness(
    threads: Annotated[int, typer.Option(help="The models are tiny: one is fastest.")] = 1,
) -> None:
    """Enumerates emitted laws, and shows that the checks catch every registered fault."""
    import torch

    from .mutants import report, tables

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with err.status("...") as status:
            found = report(lambda step: status.update(step))
    finally:
        torch.set_num_threads(before)
    Console(highlight=False, width=max(100, out.width)).print(tables(found))
    if found.problems():
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
