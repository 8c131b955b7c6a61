"""The loop: draft, verify, keep, again. Plain decoding is the same loop with an empty tree.

prefill the prompts; the pass emits each row's first token
until every row has stopped:
    tree    = drafter.propose(rows)                    B trees hanging on the last tokens
    logits  = target.forward(root + nodes)             one pass reads the whole tree
    verdict = verify(tree, law, rng)                   walk it, keep what the target would say
    cache.keep(verdict.path)                           forget the rest
    drafter.observe(rows, kept)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from .drafters import DraftModel, Eagle, EarlyExit, Medusa, Oracle, PromptLookup, TreeDraft
from .drafters.base import Drafter, Kept, Rows
from .models import CHUNK as PREFILL_CHUNK
from .models import LanguageModel, is_whole
from .sampling import Certain, Law, Random, Sampling
from .show import Detokenizer, Piece, html_legend, html_text, pieces, rich_text
from .trace import Round, Trace
from .tree import TokenTree
from .verify import VERIFIERS, Verdict, Verifier

FINISH = ("running", "eos", "length", "context", "stop")
# Tested: one look a call into their trees is enough.
OWN_DRAFTERS = (DraftModel, TreeDraft, EarlyExit, Medusa, Eagle, Oracle, PromptLookup)

REFUSED = {
    "repetition_penalty": "inside a verified window every position would need its own prefix",
    "no_repeat_ngram_size": "inside a verified window every position would need its own prefix",
    "logits_processor": "an unknown processor may depend on the prefix, which differs by node",
    "num_beams": "speculative decoding samples; it does not search",
    "do_sample": "say sampling=Sampling(temperature=...); temperature 0 is greedy",
    "temperature": "say sampling=Sampling(temperature=...)",
    "top_k": "say sampling=Sampling(top_k=...)",
    "top_p": "say sampling=Sampling(top_p=...)",
}


@dataclass
class Generation:
    """What was generated, row by row.

    text, finish and tokens are lists with one entry a prompt: the new text, why it ended ("eos",
    "length", "context" or "stop"), and the new tokens alone (LongTensor, on the CPU). accepted
    marks the tokens that were drafted; the others are the target's own.
    """

    text: list[str]
    tokens: list[Tensor]
    finish: list[str]
    accepted: list[Tensor]
    trace: Trace
    tokenizer: Any = None
    prompts: list[list[int]] = field(default_factory=list)  # as token ids

    def pieces(self) -> list[list[Piece]]:
        """Each row's tokens as coloured pieces of text."""
        rows = zip(self.tokens, self.accepted, strict=True)
        return [pieces(self.tokenizer, i, t.tolist(), a.tolist()) for i, (t, a) in enumerate(rows)]

    def _repr_html_(self) -> str:
        rows = "<hr>".join(html_text(row) for row in self.pieces())
        body = f"<div style='line-height:1.7'>{rows}</div>"
        return f"{body}<p>{html_legend()}<br>{self._summary()}</p>"

    def __rich__(self) -> Group:
        return Group(*(rich_text(row) for row in self.pieces()), Text(self._summary(), "dim"))

    def __repr__(self) -> str:
        return f"<Generation of {len(self.text)} row(s): {self._summary()}>"

    def _summary(self) -> str:
        t = self.trace
        alpha = "no drafts" if t.alpha != t.alpha else f"α {t.alpha:.2f}"
        return f"{t.tokens} tokens, {t.passes} target passes, τ {t.tau:.2f}, {alpha}"


def generate(
    target: LanguageModel,
    prompts: Any,
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int | Random = 0,
    verifier: str | Verifier = "speculative",
    eos: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    stream: Callable[[Piece], None] | None = None,
    **unsupported: Any,
) -> Generation:
    """Generates a continuation of each prompt, drafting with ``drafter``.

    prompts: one or many of: a string (taken as it is), a list of chat messages (the tokenizer's
    template), a list or tensor of token ids. max_new_tokens: at most this many a row, at least 1.
    sampling: the law to keep; None is greedy. seed: of this call's own generator; the same seed
    gives the same tokens, and torch's global generator is left alone; or a Random. eos: ids that
    end a row; None: the model's own; () none. stop: strings that end a row once its text has one.
    stream: called with each Piece as it is committed. drafter None is plain decoding.

    Raises ValueError or TypeError for what cannot be done, before any work; FloatingPointError
    if the target's logits hold a NaN or an infinity.
    """
    if stream is not None and not callable(stream):
        raise TypeError("stream must be a function of a Piece; ms.stream() is the iterator")
    run = _Run(
        target, prompts, drafter, max_new_tokens, sampling, seed, verifier, eos, stop, **unsupported
    )
    if stream is None:
        for _ in run.rounds():
            pass
    else:
        for piece in run.pieces():
            stream(piece)
    return run.result()


def stream(
    target: LanguageModel, prompts: Any, drafter: Drafter | None = None, **options: Any
) -> Iterator[Piece]:
    """``generate`` as an iterator of Pieces; the options are the same."""
    return _Run(target, prompts, drafter, **options).pieces()


class _Run:
    """One call of generate: its rows, its cache, its trace."""

    def __init__(
        self,
        target: LanguageModel,
        prompts: Any,
        drafter: Drafter | None = None,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        seed: int | Random = 0,
        verifier: str | Verifier = "speculative",
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        **unsupported: Any,
    ) -> None:
        _refuse(target, drafter, max_new_tokens, sampling, seed, verifier, unsupported)
        self.target, self.drafter = target, copy.copy(drafter)
        self.verify: Verifier = VERIFIERS[verifier] if isinstance(verifier, str) else verifier
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if not all(isinstance(s, str) for s in self.stop):
            raise TypeError(f"stop must be a string or several, not {stop!r}")
        if any(not s for s in self.stop):
            raise ValueError("an empty stop string would stop every text at once")
        if self.stop and target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        ends = target.eos_ids if eos is None else (eos,) if isinstance(eos, Integral) else eos
        if not isinstance(ends, Sequence) or not all(is_whole(i) for i in ends):
            raise TypeError(f"eos must be a token id or several, not {eos!r}")
        self.eos = torch.tensor([int(i) for i in ends], dtype=torch.long, device=target.device)

        ids = [self._ids(i, p) for i, p in enumerate(as_prompts(prompts))]
        max_new_tokens = int(max_new_tokens)
        lengths = torch.tensor([len(i) for i in ids])
        self.limit_host = lengths + max_new_tokens
        if target.context_limit is not None:
            self.limit_host = self.limit_host.clamp(max=target.context_limit)
        self.max_nodes = drafter.max_nodes if drafter is not None else 0
        width = int(self.limit_host.max())
        if drafter is not None:
            drafter.check(target, width)
        tokens = torch.zeros(len(ids), width + self.max_nodes + 1, dtype=torch.long)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        device = target.device
        self.prompt_lengths, self.max_new_tokens = lengths, max_new_tokens
        self.rows = Rows(
            tokens.to(device),
            lengths.to(device),
            lengths,
            self.limit_host.to(device),
            torch.zeros(len(ids), dtype=torch.bool, device=device),
            sampling or Sampling(),
            seed if isinstance(seed, Random) else Random(int(seed), device),
        )
        self.rng = Certain(device) if self.rows.sampling.greedy else self.rows.rng
        self.finish = torch.zeros(len(ids), dtype=torch.long)  # [B] index into FINISH
        self.history: list[tuple[Tensor, Tensor]] = []  # per pass [B]: drafts kept, tokens emitted
        self.trace = Trace()
        self.checked = False

    def _ids(self, row: int, prompt: Any) -> list[int]:
        ids = self.target.encode(prompt)
        if not ids:
            raise ValueError(f"prompt {row} is empty: give at least one token")
        limit = self.target.context_limit
        if limit is not None and len(ids) >= limit:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens and the model's context holds {limit}: "
                "there is no room for a new one"
            )
        return ids

    # The loop.

    def pieces(self) -> Iterator[Piece]:
        """Runs to the end, giving out each token as soon as it is committed."""
        texts = [Detokenizer(self.target.tokenizer) for _ in range(self.rows.batch)]
        for emitted, accepted, count in self.rounds():
            for row in count.nonzero().flatten().tolist():
                num, drafted = int(count[row]), int(accepted[row])
                for i, token in enumerate(emitted[row, :num].tolist()):
                    text = texts[row].push(token)
                    if self.finish[row] and i == num - 1:
                        text += texts[row].flush()
                    yield Piece(row, text, token, i < drafted)

    def rounds(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Per pass, on the CPU: tokens [B, N+1], how many of them were drafted, how many count."""
        yield self._guarded(self.prefill)
        while not self.finish.all():
            yield self._guarded(self.round)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        # Autocast would have keys of another dtype than the cache's.
        with torch.inference_mode(), torch.autocast(self.target.device.type, enabled=False):
            return step()

    def prefill(self) -> tuple[Tensor, Tensor, Tensor]:
        """Reads the prompts and emits each row's first token: a round with an empty tree."""
        began = time.perf_counter()
        rows, target = self.rows, self.target
        self.cache = target.new_cache(rows.batch, rows.tokens.shape[1])
        longest = int(rows.host.max())
        wants = self.drafter is not None and self.drafter.wants_features
        taps = self.drafter.taps if self.drafter is not None else ()
        seen: list[Any] = []
        logits: Tensor | None = None
        for start in range(0, longest, PREFILL_CHUNK):
            chunk = rows.tokens[:, start : min(start + PREFILL_CHUNK, longest)]
            last = rows.lengths - 1 - start  # [B] the prompt's last token, counted in this chunk
            read = last.clamp(0, chunk.shape[1] - 1).unsqueeze(1)
            out = target.forward(self.cache, chunk, read=read, taps=taps)
            inside = (last >= 0)[:, None, None]
            logits = out.logits if logits is None else torch.where(inside, out.logits, logits)
            self.cache.set_lengths((rows.host).clamp(max=start + chunk.shape[1]))
            if wants:
                seen.append(out)
        assert logits is not None
        tree = TokenTree.empty(rows.batch, logits.device)
        law = Law(logits, rows.sampling)
        result = self.commit(tree, self.verify(tree, law, self.rng), law)
        self.cache.set_lengths(self.rows.host - 1)
        self.trace.prefill_s = time.perf_counter() - began
        if self.drafter is not None and not self.finish.all():
            prompt = None
            if wants:
                hidden = torch.cat([o.hidden for o in seen], 1)
                caught = {i: torch.cat([o.taps[i] for o in seen], 1) for i in taps}
                prompt = Kept(tree.parents, rows.lengths - 1, hidden, caught)  # before the root
            self.drafter.start(target, rows, self.cache, prompt)
            self.trace.start_s = time.perf_counter() - began - self.trace.prefill_s
        self.trace.prefill_emitted = result[2]
        self.trace.rounds.clear()  # the prefill is a pass, not a round
        return result

    def round(self) -> tuple[Tensor, Tensor, Tensor]:
        """One draft, one target pass, one walk."""
        began = time.perf_counter()
        rows = self.rows
        tree = self.propose()
        depth, visible = tree.with_root()
        tokens = torch.cat([rows.root(), tree.tokens], 1)  # [B, N+1]
        taps = self.drafter.taps if self.drafter is not None else ()
        drafted = time.perf_counter()
        out = self.target.forward(self.cache, tokens, depth, visible, taps=taps)
        passed = time.perf_counter()
        law = Law(out.logits, rows.sampling)
        verdict = self.verify(tree, law, self.rng)
        result = self.commit(tree, verdict, law)
        count = result[2]
        if tree.is_chain:  # an accepted chain lies where it belongs already
            self.cache.set_lengths(self.cache.lengths_host + count)
        else:
            self.cache.keep(verdict.path, count)
        if self.drafter is not None:
            emitted = count.to(rows.lengths.device, non_blocking=True)
            self.drafter.observe(rows, Kept(verdict.path, emitted, out.hidden, out.taps))
        ended = time.perf_counter()
        record = self.trace.rounds[-1]
        off_clock = self.drafter.off_clock if self.drafter is not None else 0.0
        record.total_s = ended - began - off_clock
        if rows.tokens.device.type == "cpu":  # elsewhere a launch returns before the work is done
            record.draft_s, record.target_s = drafted - began - off_clock, passed - drafted
        return result

    def propose(self) -> TokenTree:
        """The drafter's tree, checked, and cut where a row has no room for its deeper nodes."""
        rows = self.rows
        if self.drafter is None:
            return TokenTree.empty(rows.batch, rows.tokens.device)
        tree = self.drafter.propose(rows)
        if not isinstance(tree, TokenTree):
            raise TypeError(f"{type(self.drafter).__name__}.propose must return a TokenTree")
        tree = tree.tidy()
        if tree.batch != rows.batch or tree.num_nodes > self.max_nodes:
            raise ValueError(
                f"{type(self.drafter).__name__} proposed a tree of shape "
                f"{tuple(tree.tokens.shape)}; there are {rows.batch} rows and max_nodes is "
                f"{self.max_nodes}"
            )
        if not self.checked:  # looking into the tensors costs a wait on a GPU: there, once a call
            tree.check(self.target.vocab_size)
            self.checked = rows.tokens.device.type != "cpu" or type(self.drafter) in OWN_DRAFTERS
        # A round emits depth + 1 tokens; what would not fit is not worth reading.
        room = (self.limit_host - rows.host)[self.finish == 0]
        if int(room.min()) <= tree.num_nodes:
            tree = tree.cut(rows.limit - rows.lengths - 1)
        if rows.tokens.device.type == "cpu":  # elsewhere to look costs a wait, and shapes stay
            tree = tree.trim()
        return tree

    def commit(self, tree: TokenTree, verdict: Verdict, law: Law) -> tuple[Tensor, Tensor, Tensor]:
        """Appends what the walk emits, up to an end-of-text token, and decides what ends here.

        The one wait for the device in a round is here: everything the host wants to know comes in
        one transfer.
        """
        rows = self.rows
        drafts = tree.tokens.gather(1, verdict.path.clamp(min=0)) if tree.num_nodes else tree.tokens
        emitted = torch.cat([drafts, verdict.next_token.unsqueeze(1)], 1)  # [B, N+1]
        emitted.scatter_(1, verdict.accepted.unsqueeze(1), verdict.next_token.unsqueeze(1))
        column = torch.arange(emitted.shape[1], device=emitted.device)
        ends = torch.isin(emitted, self.eos)
        past = torch.where(ends, column, emitted.shape[1]).amin(1)  # place of the first eos
        # The budget needs no cut here: propose() leaves no node that could overrun it.
        count = torch.minimum(verdict.accepted, past) + 1
        count = count.masked_fill(rows.stopped, 0)
        # What lies beyond the count is overwritten by the next round.
        rows.tokens.scatter_(1, rows.lengths.unsqueeze(1) + column, emitted)
        facts = [emitted, count, verdict.accepted, verdict.tried, past < count, law.faulty]
        facts = [f.unsqueeze(1) if f.dim() == 1 else f for f in facts]
        packed = torch.cat([*facts, tree.is_valid.sum(1, keepdim=True)], 1).cpu()  # the one wait

        width = emitted.shape[1]
        tokens, (count, accepted, tried, eos, faulty, drafted) = (
            packed[:, :width],
            packed[:, width:].unbind(1),
        )
        live = count > 0
        if bool((faulty.bool() & live).any()):
            row = int((faulty.bool() & live).nonzero()[0])
            raise FloatingPointError(
                f"the target's logits for row {row} hold NaN or infinity: the model overflowed "
                f"in {self.target.dtype}, or its weights are damaged. Try float32 or bfloat16."
            )
        count = self._stop_strings(tokens, count) if self.stop else count
        whole = count > accepted  # nothing that the walk accepted was cut off
        kept = torch.minimum(accepted, count)
        self.history.append((kept, count))
        rows.host = rows.host + count
        self._finish(live, eos.bool())
        rows.lengths = rows.host.to(rows.lengths.device, non_blocking=True)
        rows.stopped = (self.finish > 0).to(rows.lengths.device, non_blocking=True)
        tried = torch.where(whole, tried, kept).masked_fill(~live, 0)
        self.trace.rounds.append(Round(drafted.masked_fill(~live, 0), tried, kept, count))
        return tokens, kept, count

    def _finish(self, live: Tensor, eos: Tensor) -> None:
        """Notes why rows end. An end-of-text token wins over the budget that it used up."""
        full = self.rows.host >= self.limit_host
        asked = self.limit_host == self.prompt_lengths + self.max_new_tokens
        why = torch.where(asked, FINISH.index("length"), FINISH.index("context"))
        why = torch.where(eos, FINISH.index("eos"), why)
        now = live & (self.finish == 0) & (eos | full)
        self.finish = torch.where(now, why, self.finish)

    def _stop_strings(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Cuts each row after the token that completes a stop string."""
        count = count.clone()
        for row in (count > 0).nonzero().flatten().tolist():
            begin, end = int(self.prompt_lengths[row]), int(self.rows.host[row])
            before = self.rows.tokens[row, begin:end].tolist()
            for i in range(int(count[row])):
                text = self.target.decode(before + tokens[row, : i + 1].tolist())
                if any(s in text for s in self.stop):
                    count[row] = i + 1
                    self.finish[row] = FINISH.index("stop")
                    break
        return count

    def result(self) -> Generation:
        """The rows as the user gets them."""
        spans = zip(self.prompt_lengths.tolist(), self.rows.host.tolist(), strict=True)
        rows = [(text, *span) for text, span in zip(self.rows.tokens.cpu(), spans, strict=True)]
        tokens = [text[prompt:end].clone() for text, prompt, end in rows]
        # Each pass emitted first what was drafted, then the target's own token.
        kept, count = (torch.stack(column, 1) for column in zip(*self.history, strict=True))
        place = torch.arange(int(count.max()))  # within a pass
        accepted = place < kept.unsqueeze(2)  # [B, passes, width]
        emitted = place < count.unsqueeze(2)
        return Generation(
            [self.target.decode(t) for t in tokens],
            tokens,
            [FINISH[f] for f in self.finish.tolist()],
            [a[e] for a, e in zip(accepted, emitted, strict=True)],
            self.trace,
            self.target.tokenizer,
            [text[:prompt].tolist() for text, prompt, _ in rows],
        )


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, in any form, to a list of prompts."""
    if isinstance(prompts, Tensor):
        prompts = list(prompts) if prompts.dim() == 2 else [prompts]
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError("prompts are strings, chat messages or token ids, one or many")
    if not prompts:
        raise ValueError("there are no prompts")
    single = all(isinstance(p, dict) for p in prompts) or all(is_whole(p) for p in prompts)
    return [prompts] if single else list(prompts)


def _refuse(
    target: Any,
    drafter: Any,
    max_new_tokens: Any,
    sampling: Any,
    seed: Any,
    verifier: Any,
    unsupported: dict[str, Any],
) -> None:
    """Every complaint about arguments, before any work."""
    for name in unsupported:
        reason = REFUSED.get(name, "generate() has no such argument")
        raise TypeError(f"{name} is not supported: {reason}")
    if not isinstance(target, LanguageModel):
        raise TypeError("target must come from load_target()")
    if drafter is not None and not isinstance(drafter, Drafter):
        known = "DraftModel, TreeDraft, Medusa, Eagle, PromptLookup, EarlyExit, Oracle"
        raise TypeError(f"drafter must be a Drafter ({known}, or your own), not {drafter!r}")
    if not is_whole(max_new_tokens):
        raise TypeError(f"max_new_tokens must be a whole number, not {max_new_tokens!r}")
    if not 1 <= max_new_tokens < 2**31:
        raise ValueError(f"max_new_tokens must be at least 1 (and fit), not {max_new_tokens}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, not {sampling!r}")
    if not isinstance(seed, Random) and not is_whole(seed):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if not isinstance(seed, Random) and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit in 64 bits, not {seed}")
    if not callable(verifier) and verifier not in VERIFIERS:
        raise ValueError(f"unknown verifier {verifier!r}: there are {', '.join(VERIFIERS)}")
    if target.model.training:
        raise ValueError("the model is in training mode, where dropout is at work: call .eval()")
    layers = range(target.num_layers)
    if drafter is not None and any(tap not in layers for tap in drafter.taps):
        raise ValueError(f"taps {drafter.taps} are not all layers of 0..{target.num_layers - 1}")


__all__ = ["Generation", "generate", "stream"]
