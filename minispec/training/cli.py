"""minispec corpus write | pack, and minispec train draft | medusa | eagle | eagle3."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

corpus_app = typer.Typer(help="The target writes the text that drafts learn from.")
err = Console(stderr=True, highlight=False)
Model = Annotated[str, typer.Option(help="The target: smollm2, a hub id, or a folder.")]


class What(StrEnum):
    draft = "draft"
    medusa = "medusa"
    eagle = "eagle"
    eagle3 = "eagle3"


def fail(error: Exception) -> typer.Exit:
    """One clear line on stderr, exit status 1."""
    err.print(f"[red]error:[/] {escape(str(error))}")
    return typer.Exit(1)


@corpus_app.command()
def write(
    out: Annotated[Path, typer.Option(help="A folder; what is there already is kept.")],
    batches: Annotated[int, typer.Option(help="Batches 0 .. N-1 of the seed.")] = 60,
    size: Annotated[int, typer.Option(help="Questions a batch, each answered twice.")] = 192,
    seed: Annotated[int, typer.Option()] = 0,
    worker: Annotated[str, typer.Option(help="I/N: this process takes every N-th batch.")] = "0/1",
    threads: Annotated[int | None, typer.Option(help="Of this process.")] = None,
    model: Model = "smollm2",
) -> None:
    """Writes questions and answers, a file a batch; run it again to go on after a stop.

    Two processes of one thread each (--worker 0/2 and 1/2) are faster than one of two. glibc's
    allocator returns large blocks at once: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000
    in the environment made a step 1.7 times as fast.
    """
    import torch
    from rich.progress import Progress

    from ..models import load_target
    from .corpus import write_corpus

    try:
        mine, of = (int(part) for part in worker.split("/"))
        if not 0 <= mine < of or batches < 1 or size < 1:
            raise ValueError("worker is I/N with 0 <= I < N; batches and size are at least 1")
        torch.set_num_threads(threads or torch.get_num_threads())
        target = load_target(model)
    except (ValueError, OSError) as error:
        raise fail(error) from error
    numbers = range(mine, batches, of)
    with Progress(console=err) as progress:
        task = progress.add_task("batches", total=len(numbers))
        done = [i for i in numbers if (out / f"batch-{i:05d}.npz").exists()]
        progress.advance(task, len(done))

        def tell(index: int, tokens: int, seconds: float) -> None:
            text = f"batch {index}: {tokens} answer tokens, {tokens / seconds:.0f}/s"
            progress.update(task, advance=1, description=text)

        write_corpus(target, out, numbers, seed=seed, size=size, tell=tell)


@corpus_app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="What `corpus write` filled.")],
    out: Annotated[Path, typer.Option(help="The .npz file; its card goes beside it.")],
    seed: Annotated[int, typer.Option(help="The seed that was used, for the card.")] = 0,
    model: Model = "smollm2",
) -> None:
    """Joins the batches into one file without duplicates and without the measuring prompts."""
    from ..models import load_target
    from ..prompts import load_prompts
    from .corpus import card, merge, save_batch

    try:
        target = load_target(model)
        texts, counts = merge(folder, [p.text for p in load_prompts()], target)
        if not texts:
            raise ValueError(f"{folder} holds no batches")
    except (ValueError, OSError) as error:
        raise fail(error) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    save_batch(out, texts)
    facts = card(counts, target, seed, len(list(folder.glob("batch-*.npz"))))
    out.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")
    err.print(f"{len(texts)} answers, {facts['answer tokens']} tokens in {escape(str(out))}")


def train(
    what: Annotated[What, typer.Argument(help="What to train.")],
    out: Annotated[Path, typer.Option(help="The folder of the trained head.")],
    corpus: Annotated[Path | None, typer.Option(help="A packed corpus; default: ours.")] = None,
    work: Annotated[Path | None, typer.Option(help="Checkpoints, log; default OUT/work.")] = None,
    features: Annotated[Path | None, typer.Option(help="Keep target features here.")] = None,
    model: Model = "smollm2",
    passes: Annotated[float, typer.Option(help="Passes over the corpus.")] = 6.0,
    steps: Annotated[int | None, typer.Option(help="Updates, in the place of passes.")] = None,
    rows: Annotated[int, typer.Option(help="Packed rows an update.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens a packed row.")] = 640,
    accumulate: Annotated[int, typer.Option(help="Parts an update is computed in.")] = 1,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    precision: Annotated[str, typer.Option(help="bf16, no, or auto.")] = "auto",
    seed: Annotated[int, typer.Option()] = 0,
    limit: Annotated[int | None, typer.Option(help="Use the first texts alone.")] = None,
    vocab: Annotated[int, typer.Option(help="Size of the draft's vocabulary.")] = 8192,
    width: Annotated[int, typer.Option(help="draft: hidden width.")] = 256,
    layers: Annotated[int, typer.Option(help="draft: layers; medusa: blocks a head.")] = 4,
    heads: Annotated[int, typer.Option(help="medusa: heads.")] = 4,
    loss: Annotated[str, typer.Option(help="draft: forward kl, reverse kl, tvd.")] = "forward kl",
    labels: Annotated[str, typer.Option(help="medusa: soft or hard.")] = "soft",
    unroll: Annotated[int | None, typer.Option(help="eagle: steps; default 1, eagle3 5.")] = None,
    single: Annotated[int, typer.Option(help="eagle3: first updates with one step.")] = 0,
    dev: Annotated[bool, typer.Option(help="Note tau by kind on the dev prompts.")] = True,
    threads: Annotated[int | None, typer.Option(help="Of this process.")] = None,
    cpu: Annotated[bool, typer.Option(help="Train on the CPU.")] = False,
) -> None:
    """Trains a draft or heads on the target's own words; run it again to go on after a stop.

    On many devices: accelerate launch -m minispec train ...
    """
    import torch

    from ..heads import note_tau
    from ..models import load_target
    from ..prompts import load_prompts
    from .corpus import target_facts
    from .eagle import EagleLearner
    from .run import (
        data_of,
        draft_learner,
        eagle_learner,
        load_corpus,
        medusa_learner,
        split,
    )
    from .run import train as run_training

    try:
        torch.set_num_threads(threads or torch.get_num_threads())
        torch.manual_seed(seed)
        texts, named = load_corpus(corpus)
        texts = texts[:limit]
        target = load_target(model, device="cpu" if cpu else "auto")
        known, _ = split(texts)  # held-out texts have no say in which tokens are drafted
        options: dict[str, Any] = {"vocab": vocab}
        if what is What.medusa:
            options |= {"num_heads": heads, "num_layers": layers, "labels": labels}
            learner: Any = medusa_learner(target, known, **options)
        elif what in (What.eagle, What.eagle3):
            options |= {"version": 3 if what is What.eagle3 else 1, "steps": unroll}
            if single:
                options["single"] = single
            learner = eagle_learner(target, known, **options)
        else:
            options |= {"width": width, "layers": layers, "loss": loss, "seed": seed}
            learner = draft_learner(target, known, **options)
        taps = learner.head.config.taps if isinstance(learner, EagleLearner) else ()
        data = data_of(target, texts, width=length, taps=taps, features=features)
        from .fit import Recipe

        count = steps or max(1, round(passes * len(data[0]) / rows))
        recipe = Recipe(
            steps=count,
            rows=rows,
            accumulate=accumulate,
            lr=lr,
            precision=precision,
            seed=seed,
            validate_every=max(1, count // 20),
            save_every=max(1, count // 20),
        )
        facts = {"kind": what.value, "options": options, "corpus": named} | target_facts(target)
        log = run_training(learner, data, recipe, work or out / "work", out, facts, cpu=cpu)
        if dev and int(os.environ.get("RANK", "0")) == 0:
            note_tau(out, target, load_prompts("dev"))
    except (ValueError, OSError, RuntimeError) as error:
        raise fail(error) from error
    last = log.iloc[-1].to_dict()
    print(json.dumps({k: round(v, 4) for k, v in last.items()}), file=sys.stdout)
