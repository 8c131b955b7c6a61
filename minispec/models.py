"""Models: loading them, and the one place that calls into transformers.

Everything else in the package sees a ``LanguageModel``: tokens in, logits and hidden states out,
over a ``KVCache`` of ours. What transformers may change under us (the forward call, the cache
class, mask forms, where hidden states are found, attention functions) is touched here alone.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from .cache import KVCache, LayerShape
from .fetch import FetchError, smollm2_folder

BUNDLED = "smollm2"
TOKEN_MAPS = ("token_map", "read_map")
CHUNK = 512  # tokens of a prompt a pass: bounds the size of masks and scores
_LOCKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class UnsupportedModelError(ValueError):
    """This model cannot be verified in one pass over a tree; the message says why."""


class ModelLoadError(OSError):
    """The weights could not be read; the message says what to do."""


@dataclass
class Pass:
    """What one pass of a model gives back.

    logits [B, m, V] at the positions that were read; hidden [B, n, H] the input of the LM head
    (after the final norm) at every position; taps: the raw inputs [B, n, H] of the decoder layers
    that were asked for, by layer index.
    """

    logits: Tensor
    hidden: Tensor
    taps: dict[int, Tensor]


class LanguageModel:
    """A causal language model with its tokenizer, as the rest of minispec sees it."""

    def __init__(self, model: Any, tokenizer: Any = None, *, trial: bool = True) -> None:
        """trial=False takes the model's word that it can read a token tree."""
        refuse_unsupported(model)
        self.model = model.eval()
        self.tokenizer = tokenizer
        # A draft with a reduced vocabulary: token_map [V_d], the target's id of each of its ids;
        # read_map [V], the id as which it reads each of the target's.
        self.token_map: Tensor | None = None
        self.read_map: Tensor | None = None
        # A pass puts hooks and an attention function into the model for its time; a second thread
        # waits. The head is the key: a model cut by first_layers() shares it.
        warn_of_ignored_settings(model)
        self._lock = _LOCKS.setdefault(model.get_output_embeddings(), threading.RLock())
        self._shapes: dict[tuple[torch.dtype, torch.device], list[LayerShape]] = {}
        if trial:
            try_on_a_tree(self)

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        return f"<{type(self.model).__name__} {size:.1f}M parameters, {self.dtype}, {self.device}>"

    # What the model is.

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where token ids go: the device of the input embedding."""
        return self.model.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @cached_property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def context_limit(self) -> int | None:
        """The most tokens, prompt included, that the model was made for; None: no limit.

        LongRoPE changes its frequencies for the whole pass once any position is beyond the
        original length, so that rows and drafts would disturb each other: it ends there.
        """
        limits = [getattr(self.config, "max_position_embeddings", None)]
        rope = getattr(self.config, "rope_parameters", None) or {}
        for part in (rope, *(v for v in rope.values() if isinstance(v, dict))):
            if part.get("rope_type") == "longrope":
                original = getattr(self.config, "original_max_position_embeddings", None)
                limits.append(part.get("original_max_position_embeddings") or original)
        return min((n for n in limits if n is not None), default=None)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, from the generation config, else the config."""
        for config in (getattr(self.model, "generation_config", None), self.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, Sequence) else (int(ids),)
        return ()

    @cached_property
    def layer_kinds(self) -> list[str]:
        """Each layer's attention: "full_attention" or "sliding_attention"."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            window = getattr(self.config, "sliding_window", None)
            kinds = ["sliding_attention" if window else "full_attention"] * self.num_layers
        return list(kinds)

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: the module list as long as the config says the model is deep."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise UnsupportedModelError(f"no list of {self.num_layers} decoder layers found")

    @cached_property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the LM head."""
        norms = [m for m in self.model.base_model.children() if "Norm" in type(m).__name__]
        return norms[-1] if norms else None

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """What each layer caches for a token, seen once in a pass over one token."""
        key = (self.dtype, self.device)
        if key not in self._shapes:
            self._shapes[key] = self._see_shapes()
        return self._shapes[key]

    def _see_shapes(self) -> list[LayerShape]:
        probe = _ShapeProbe()
        with torch.no_grad(), self._lock:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.model(input_ids=token, use_cache=True, **{self._cache_argument: probe})
        if sorted(probe.shapes) != list(range(self.num_layers)):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not cache keys and values in every layer"
            )
        return [probe.shapes[i] for i in range(self.num_layers)]

    @cached_property
    def grouped(self) -> bool:
        """Whether the model's attention can be replaced by ``grouped_attention``."""
        return bool(getattr(self.model, "_supports_attention_backend", False))

    @cached_property
    def _configs(self) -> list[Any]:
        """Every config object that a module of the model reads (a cut model has two)."""
        found = (getattr(m, "config", None) for m in self.model.modules())
        return list({id(c): c for c in found if hasattr(c, "_attn_implementation")}.values())

    @cached_property
    def groups(self) -> int:
        """Query heads to a key head."""
        heads = getattr(self.config, "num_attention_heads", 1)
        return heads // (getattr(self.config, "num_key_value_heads", None) or heads)

    @cached_property
    def _cache_argument(self) -> str:
        """transformers 5.24 renamed the argument from past_key_values to cache."""
        names = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    # What it does.

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for ``batch`` rows of up to ``capacity`` tokens."""
        return KVCache(self.layer_shapes, batch, capacity)

    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        depth: Tensor | None = None,
        visible: Tensor | None = None,
        read: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Pass:
        """One pass over n new tokens a row, written behind what the cache holds.

        tokens [B, n]; depth [B, n] steps behind the first (default 0, 1, 2, ...: a chain);
        visible [B, n, n] bool, who sees whom (default: each those before it and itself); read
        [B, r] the positions among the n at which logits are wanted (default: all); taps: layer
        indices whose inputs are wanted. The cache's lengths stay as they are: ``keep`` or
        ``advance`` moves them. A tree can be read in several passes: with depth [B, m] and visible
        [B, n, m] the first m - n are the nodes that earlier passes wrote behind the same lengths.
        """
        batch, num = tokens.shape
        cache.begin(num, visible.shape[2] - num if visible is not None else 0)
        if depth is None:
            depth = torch.arange(num, device=tokens.device).expand(batch, num)
        if visible is None:
            visible = torch.ones(num, num, dtype=torch.bool, device=tokens.device).tril()
            visible = visible.expand(batch, num, num)
        # Padding may stand beyond the last position that an absolute position table has.
        positions = (cache.lengths.unsqueeze(1) + depth[:, -num:]).clamp(
            max=(self.context_limit or 2**62) - 1
        )
        catch = _Catch(read)
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            head = self.model.get_output_embeddings()
            stack.callback(head.register_forward_pre_hook(catch.before_head).remove)
            for layer in taps:
                hook = catch.tap(layer)
                handle = self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            if self.grouped:
                stack.enter_context(_grouped_attention(self._configs))
            out = self.model(
                input_ids=tokens,
                attention_mask=self._masks(cache, depth, visible),
                position_ids=positions,
                use_cache=True,
                **{self._cache_argument: _CacheAdapter(cache)},
            )
        return Pass(out.logits, catch.hidden, catch.taps)

    def teacher_forced(self, tokens: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """[B, T, V] logits at every token of given texts, with gradients: for training a draft.

        tokens, position [B, T]; visible [B, T, T] bool, who sees whom. No cache: the passes of
        ``forward`` write theirs in place, which gradients cannot go back through.
        """
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=tokens.device)
        mask = mask.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)
        out = self.model(
            input_ids=tokens, position_ids=position, attention_mask=mask, use_cache=False
        )
        return out.logits

    def _masks(self, cache: KVCache, depth: Tensor, visible: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks: one tensor, or one a layer kind where the model mixes kinds."""
        window = {"full_attention": None, "sliding_attention": self.config_window}
        masks = {}
        for kind in dict.fromkeys(self.layer_kinds):
            mask = cache.mask(depth, visible, self.dtype, window[kind])
            masks[kind] = mask.repeat(1, 1, self.groups, 1) if self.grouped else mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @cached_property
    def config_window(self) -> int | None:
        return getattr(self.config, "sliding_window", None)

    def first_layers(self, num: int) -> LanguageModel:
        """The model cut after its first ``num`` layers: same modules, nothing copied.

        The final norm and the LM head follow layer ``num`` directly (early exit).
        """
        if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num < self.num_layers:
            raise ValueError(
                f"layer must be a whole number in 1..{self.num_layers - 1}, not {num!r}"
            )
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = num
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = self.layer_kinds[:num]
        model = _with_layers(self.model, self.layers, nn.ModuleList(self.layers[:num]), config)
        cut = LanguageModel(model, self.tokenizer, trial=False)
        cut._shapes = {key: shapes[:num] for key, shapes in self._shapes.items()}
        return cut

    # Text to ids and back.

    def encode(self, prompt: Any) -> list[int]:
        """One prompt to ids: a string as it is, chat messages by the template, or ids."""
        if isinstance(prompt, Tensor):
            prompt = prompt.tolist()
        if isinstance(prompt, str) or _is_chat(prompt):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give prompts as token ids")
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt)["input_ids"])
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError("the tokenizer has no chat template: give the prompt as a string")
            ids = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            return list(ids["input_ids"])
        if (
            not isinstance(prompt, Sequence | np.ndarray)
            or isinstance(prompt, bytes)
            or not all(is_whole(i) for i in prompt)
        ):
            raise TypeError("a prompt is a string, a list of chat messages, or a list of token ids")
        for i in prompt:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
        return [int(i) for i in prompt]

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Ids to text, special tokens left out; without a tokenizer the ids themselves."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special_tokens=True)


# Loading.


def new_llama(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **numbers: Any,
) -> nn.Module:
    """A Llama with random weights, made on the device itself and in its dtype from the start.

    numbers go to transformers' LlamaConfig.
    """
    config = transformers.LlamaConfig(**numbers)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def load_target(
    source: str | Path | nn.Module | LanguageModel = BUNDLED,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    **kwargs: Any,
) -> LanguageModel:
    """Loads a target (or a draft model; they are the same kind of thing).

    source: "smollm2" (fetched once, see ``minispec fetch``), a hub id, a folder, or a transformers
    model. dtype "auto": bfloat16 where the machine computes in it, else float32. device "auto":
    the accelerator if there is one; "balanced" spreads the layers over all GPUs by accelerate.
    Other arguments go to ``from_pretrained``.

    Raises ModelLoadError for missing or damaged weights, UnsupportedModelError for a model whose
    state cannot be rolled back or whose attention cannot take a tree mask.
    """
    if isinstance(source, LanguageModel):
        return source
    if not isinstance(source, str | Path | nn.Module):
        raise TypeError("load_target takes a name, a folder or a transformers causal LM")
    if isinstance(source, nn.Module):
        move: dict[str, Any] = {}
        if dtype != "auto":
            move["dtype"] = pick_dtype(dtype, torch.device("cpu"))
        if device != "auto":
            move["device"] = pick_device(device)
        return LanguageModel(source.to(**move) if move else source, tokenizer)
    name = str(source)
    try:
        folder = str(smollm2_folder()) if name == BUNDLED else name
    except FetchError as error:
        raise ModelLoadError(str(error)) from error
    spread = str(device) in ("balanced", "balanced_low_0", "sequential")
    place = pick_device("auto" if spread else device)
    kwargs["dtype"] = pick_dtype(dtype, place)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        refuse_unsupported_config(config)
        if spread:
            kwargs["device_map"] = str(device)
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
            maps = _token_maps(Path(folder))
            if tokenizer is None and maps is None:  # a reduced vocabulary has no text of its own
                tokenizer = AutoTokenizer.from_pretrained(folder)
    except UnsupportedModelError:
        raise
    except Exception as error:
        hint = (
            "`minispec fetch --force` gets it again"
            if name == BUNDLED
            else "give a folder that holds config.json and safetensors weights, or a hub id that "
            "can be reached from here or is in the hub's cache already"
        )
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(f"cannot load {name!r}: {reason[0]}\n{hint}.") from error
    loaded = LanguageModel(model if spread else model.to(place), tokenizer)
    if maps is not None:
        loaded.token_map, loaded.read_map = (maps[n].to(loaded.device).long() for n in TOKEN_MAPS)
    return loaded


def _token_maps(folder: Path) -> dict[str, Tensor] | None:
    """The maps of a draft with a reduced vocabulary, as ``checkpoints.save_draft`` writes them."""
    path = folder / "token_map.safetensors"
    if not path.is_file():
        return None
    maps = load_file(path)
    if missing := [n for n in TOKEN_MAPS if n not in maps]:
        raise ValueError(f"{path} holds no {' and no '.join(missing)}")
    return maps


def pick_device(device: str | torch.device) -> torch.device:
    """'auto' to what accelerate finds, anything else to what it says."""
    if str(device) != "auto":
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"unknown device {str(device)!r}: try cpu, cuda or auto") from error
    from accelerate import PartialState

    return PartialState().device


def computes_in_bf16(device: torch.device) -> bool:
    """False for a processor that only imitates bfloat16: there it is many times as slow."""
    if device.type != "cpu":
        return True
    mkldnn = torch.backends.mkldnn.is_available()
    return bool(mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """'auto' to bfloat16 where the device computes in it, else float32. Raises ValueError."""
    if isinstance(dtype, str):
        if dtype == "auto":
            return torch.bfloat16 if computes_in_bf16(device) else torch.float32
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
        dtype = getattr(torch, short.get(dtype, dtype), dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r}: try bfloat16, float16, float32 or float64")
    return dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading a model prints no bars: they mean nothing for a second's work."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


# What cannot work: by name, and, for architectures that no test knows, by trying.

TESTED = {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "phi3"}
TESTED |= {"qwen2", "qwen3", "table"}  # the last is exactness.TableLM

RECURRENT_KINDS = ("linear", "mamba", "recurrent", "conv", "ssm")


def refuse_unsupported_config(config: Any) -> None:
    """Raises UnsupportedModelError if a model of this config could not be verified exactly."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; minispec serves decoders")
    if kind in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{kind} uses ALiBi: its position bias counts slots and would be wrong in a tree"
        )
    if not hasattr(config, "vocab_size"):
        raise UnsupportedModelError(f"{kind} is made of several models; give its text model")
    if "local" in getattr(config, "attention_layers", ()):
        raise UnsupportedModelError(f"{kind} has local attention that counts slots, not positions")
    types = set(getattr(config, "layer_types", None) or ())
    if any(word in name for name in types for word in RECURRENT_KINDS):
        raise UnsupportedModelError(
            f"{kind} has recurrent layers: their state cannot be rolled back after a rejection"
        )
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"{kind} has layers of kind {', '.join(sorted(unknown))}")


def refuse_unsupported(model: Any) -> None:
    """The same for a model at hand, which also shows whether it is recurrent."""
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise TypeError("load_target takes a name, a folder or a transformers causal LM")
    refuse_unsupported_config(model.config)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{model.config.model_type} is recurrent: its state cannot be rolled back after a "
            "rejection"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head")
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise UnsupportedModelError(f"{model.config.model_type} uses attention sinks")


def try_on_a_tree(model: LanguageModel) -> None:
    """Has an architecture that no test knows read a small tree, and refuses it if it cannot."""
    kind = getattr(model.config, "model_type", type(model.model).__name__)
    if kind not in TESTED:
        try:
            error = tree_error(model)
        except Exception as failure:
            raise UnsupportedModelError(f"{kind} cannot read a token tree: {failure}") from failure
        if not error < (0.1 if model.dtype.itemsize == 2 else 1e-3):
            raise UnsupportedModelError(
                f"{kind} reads a token tree wrongly (its logits are off by {error:.2g} of their "
                "size): its masks or positions do not follow what they are given"
            )


def tree_error(model: LanguageModel) -> float:
    """Relative error of a tree pass: against the bare model's reading of each path by itself.

    A prompt of 6 tokens, then a root with two children and a grandchild; both rows of a ragged
    batch. 0 up to rounding where masks, positions and the cache do what they should.
    """
    ids = torch.arange(1, 11, device=model.device) * 7 % model.vocab_size
    prompts = [ids[:6], ids[2:6]]
    root_and_nodes = ids[6:]  # root, a, b, c
    paths = [[0], [0, 1], [0, 2], [0, 1, 3]]  # a and b hang on the root, c on a
    depth = torch.tensor([len(path) - 1 for path in paths], device=model.device)
    visible = torch.zeros(4, 4, dtype=torch.bool, device=model.device)
    for i, path in enumerate(paths):
        visible[i, path] = True
    cache = model.new_cache(2, 16)
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    with torch.no_grad():
        model.forward(cache, padded, read=torch.zeros_like(padded[:, :1]))
        cache.set_lengths(torch.tensor([len(p) for p in prompts]))
        both = (2, -1)
        tree = model.forward(
            cache,
            root_and_nodes.expand(both),
            depth.expand(both),
            visible.expand(2, -1, -1),
        ).logits.float()
        worst = 0.0
        for row, prompt in enumerate(prompts):
            for i, path in enumerate(paths):
                text = torch.cat([prompt, root_and_nodes[path]])
                bare = model.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
                gap = (tree[row, i] - bare).norm() / (bare - bare.mean()).norm()
                worst = max(worst, float(gap))
    return worst


IGNORED: dict[
    str, tuple[Any, ...]
] = {  # settings of a generation config, and the values that change nothing
    "repetition_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}


def warn_of_ignored_settings(model: Any) -> None:
    """Names the settings by which transformers.generate would bend this model's law."""
    config = getattr(model, "generation_config", None)
    names = [n for n, neutral in IGNORED.items() if getattr(config, n, None) not in neutral]
    if names:
        warnings.warn(
            f"the model's generation config sets {', '.join(names)}, which minispec does not "
            "apply: the law that it keeps is the model's own",
            stacklevel=4,
        )


def is_whole(value: Any) -> bool:
    """Python's and numpy's whole numbers, but not True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_same_tokens(target: LanguageModel, draft: LanguageModel) -> None:
    """Raises ValueError unless both models mean the same thing by the same ids.

    A draft with a reduced vocabulary says by its maps which of the target's ids it means.
    """
    if draft.token_map is not None and draft.read_map is not None:
        if len(draft.read_map) != target.vocab_size or int(draft.token_map.max()) >= len(
            draft.read_map
        ):
            raise ValueError(
                f"the draft's token map is for a vocabulary of {len(draft.read_map)}; "
                f"the target's has {target.vocab_size}"
            )
        return
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size} tokens, the target's "
                f"{target.vocab_size}, and there are no tokenizers to compare"
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    by_id, other = {i: t for t, i in ours.items()}, {i: t for t, i in theirs.items()}
    for i in sorted(by_id.keys() | other.keys()):
        if by_id.get(i) != other.get(i):
            raise ValueError(
                f"the draft's tokenizer differs from the target's: id {i} is "
                f"{other.get(i)!r} there and {by_id.get(i)!r} here"
            )


# The joints with transformers.


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
        and all(isinstance(m["content"], str | list) for m in prompt)
    )


class _CacheAdapter(Cache):
    """Our KVCache in the shape that transformers' attention layers expect."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(layers=[])
        self.kv = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.kv.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.kv.lengths_host.max())

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        raise RuntimeError("this model builds its own attention mask and would ignore the tree's")


class _ShapeProbe(Cache):
    """Takes note of the shapes that the layers want to keep, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1],
            key_states.shape[-1],
            value_states.shape[-1],
            key_states.dtype,
            key_states.device,
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return 1, 0


class _Catch:
    """Hooks that read hidden states on their way, and thin out what the LM head reads."""

    def __init__(self, read: Tensor | None) -> None:
        self.read = read
        self.hidden: Tensor = None  # type: ignore[assignment]
        self.taps: dict[int, Tensor] = {}

    def before_head(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        self.hidden = args[0]  # [B, n, H]
        if self.read is None:
            return None
        index = self.read.to(self.hidden.device)[:, :, None]
        return (self.hidden.gather(1, index.expand(-1, -1, self.hidden.shape[-1])),)

    def tap(self, layer: int) -> Any:
        def before_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.taps[layer] = args[0] if args else kwargs["hidden_states"]

        return before_layer


def _with_layers(model: nn.Module, old: nn.Module, new: nn.Module, config: Any) -> nn.Module:
    """A shallow copy of a module tree with one child list replaced and another config."""
    if model is old:
        return new
    if not any(m is old for m in model.modules()):
        return model
    twin = copy.copy(model)
    twin._modules = {
        name: _with_layers(child, old, new, config) if child is not None else None
        for name, child in model._modules.items()
    }
    if hasattr(model, "config"):
        twin.config = config
    return twin


ATTENTION = "minispec_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of grouped queries that does not repeat the keys.

    query [B, Hq, n, D]; key, value [B, Hkv, S, D]. The G = Hq/Hkv heads that share a key head are
    folded into the query axis, [B, Hkv, G*n, D], so that the cache is read once and copied never;
    the additive mask comes folded alike, [B, 1, G*n, S]. Returns [B, n, Hq, D].
    """
    batch, heads, num, dim = query.shape
    folded = query.reshape(batch, key.shape[1], -1, dim)
    mask = attention_mask
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = folded @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap + mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        out = scores.softmax(-1, dtype=wide).to(value.dtype) @ value
    return out.view(batch, heads, num, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)


@contextmanager
def _grouped_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Has a model use ``grouped_attention`` for one pass; its own setting comes back after."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
