"""The key/value cache: preallocated, one length per row, nothing ever concatenated.

Slot s of row b holds the keys and values of the token at position s. The committed tokens fill
slots 0 .. length-1. A pass over n new tokens (a root and its drafted nodes) writes token i of row
b at slot length[b] + i; then ``keep`` moves the accepted path's slots down behind the root and
the rest is simply forgotten: it lies beyond the length and is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for one token: heads x key_dim and heads x value_dim numbers."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass
class Slots:
    """Where the pass under way writes: set by ``begin``, read by every layer's ``update``."""

    index: Tensor  # [B, n] slot of each new token
    start: int | None  # the first slot where all rows share it, else None
    end: int  # one past the last slot that any row can see


class KVCache:
    """Keys and values of B rows of up to ``capacity`` tokens each, for all layers.

    Layers of one shape share one buffer [layers, B, heads, capacity, dim], so that moving an
    accepted path costs one gather and one scatter whatever the number of layers.
    """

    def __init__(self, shapes: Sequence[LayerShape], batch: int, capacity: int) -> None:
        self.shapes, self.batch, self.capacity = list(shapes), batch, capacity
        self.device = self.shapes[0].device
        self.lengths_host = torch.zeros(batch, dtype=torch.long)  # on the CPU, always known
        self.lengths = self.lengths_host.to(self.device)  # [B] committed tokens held
        self.slots: Slots | None = None
        self.buffers: list[tuple[Tensor, Tensor]] = []  # (keys, values) of each shape
        self.layers: list[tuple[Tensor, Tensor]] = [None] * len(self.shapes)  # type: ignore
        for shape in dict.fromkeys(self.shapes):
            ids = [i for i, s in enumerate(self.shapes) if s == shape]
            size = (len(ids), batch, shape.heads, capacity)
            keys = torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=shape.device)
            values = torch.zeros(*size, shape.value_dim, dtype=shape.dtype, device=shape.device)
            self.buffers.append((keys, values))
            for place, layer in enumerate(ids):
                self.layers[layer] = (keys[place], values[place])  # views, [B, heads, S, dim]

    @property
    def nbytes(self) -> int:
        """Bytes held: batch x capacity x the sum of the layers' bytes_per_token."""
        return sum(k.nbytes + v.nbytes for k, v in self.buffers)

    def first_layers(self, num: int) -> KVCache:
        """A cache of the first ``num`` layers that shares this one's memory and lengths."""
        part = object.__new__(KVCache)
        part.__dict__.update(self.__dict__)
        part.shapes, part.layers, part.buffers = self.shapes[:num], self.layers[:num], []
        return part

    def rows(self, index: Tensor) -> KVCache:
        """A copy that holds only the rows ``index`` [live], in that order."""
        part = KVCache(self.shapes, len(index), self.capacity)
        for mine, theirs in zip(part.buffers, self.buffers, strict=True):
            for new, old in zip(mine, theirs, strict=True):
                torch.index_select(old, 1, index.to(old.device), out=new)
        part.set_lengths(self.lengths_host[index])
        return part

    def set_lengths(self, lengths_host: Tensor) -> None:
        """Sets the number of committed tokens of each row: lengths_host [B], on the CPU."""
        self.lengths_host = lengths_host
        self.lengths = lengths_host.to(self.device, non_blocking=True)

    def begin(self, num: int, behind: int = 0) -> None:
        """Opens a pass over ``num`` new tokens a row, ``behind`` so many that are not committed."""
        low, high = int(self.lengths_host.min()), int(self.lengths_host.max())
        end = high + behind + num
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; this pass needs {end}")
        index = self.lengths.unsqueeze(1) + torch.arange(behind, behind + num, device=self.device)
        self.slots = Slots(index, low + behind if low == high else None, end)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a layer's new keys and values [B, heads, n, dim] and returns all that is held.

        The returned views [B, heads, end, dim] end at the longest row's last new token.
        """
        assert self.slots is not None, "call begin() before the pass"
        slots, held = self.slots, self.layers[layer]
        for buffer, new in zip(held, (keys, values), strict=True):
            if slots.start is not None:
                buffer[:, :, slots.start : slots.start + new.shape[2]] = new
            else:
                index = slots.index.to(new.device)[:, None, :, None].expand_as(new)
                buffer.scatter_(2, index, new)
        return held[0][:, :, : slots.end], held[1][:, :, : slots.end]

    def mask(
        self, depth: Tensor, visible: Tensor, dtype: torch.dtype, window: int | None = None
    ) -> Tensor:
        """The additive attention mask [B, 1, n, end] of the pass that ``begin`` opened.

        depth [B, m] of the last m tokens written, the n new ones at their end (a token's position
        is length + depth); visible [B, n, m] bool, which of them each new token sees; window: only
        keys less than that many positions back.
        0 where a token may look, the dtype's lowest number elsewhere. Additive floats and not
        booleans: eager attention adds a mask, and adding True hides nothing.
        """
        assert self.slots is not None, "call begin() before the pass"
        queries, num = visible.shape[1:]
        slot = torch.arange(self.slots.end, device=self.device)
        new = slot - self.lengths.unsqueeze(1)  # [B, end]: index among the m, < 0 if committed
        inside = (new >= 0) & (new < num)
        index = new.clamp(0, num - 1)
        seen = visible.gather(2, index.unsqueeze(1).expand(-1, queries, -1))  # [B, n, end]
        seen = torch.where(inside.unsqueeze(1), seen, (new < 0).unsqueeze(1))
        if window is not None:
            query = self.lengths.unsqueeze(1) + depth[:, num - queries :]  # [B, n] positions
            key = torch.where(inside, self.lengths.unsqueeze(1) + depth.gather(1, index), slot)
            seen = seen & (query.unsqueeze(2) - key.unsqueeze(1) < window)
        return torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(
            ~seen, torch.finfo(dtype).min
        )[:, None]

    def advance(self, num: int = 1) -> None:
        """Commits the last pass's first ``num`` tokens of every row: a chain that is kept."""
        self.set_lengths(self.lengths_host + num)

    def keep(self, path: Tensor, emitted_host: Tensor) -> None:
        """Commits the last pass's root and the accepted nodes behind it.

        path [B, >=D] indices of the accepted nodes (-1 padded); emitted_host [B], on the CPU: how
        many tokens each row emits this round, accepted + 1 (the token after the path has no slot
        yet: it is the next root), or 0 for a row that has stopped and stays as it is.
        Node i lies at slot length + 1 + i and moves to length + 1 + its place in the path.
        """
        longest = int(emitted_host.max()) - 1
        if longest > 0:
            step = torch.arange(longest, device=path.device)
            path = path[:, :longest]
            target = self.lengths.unsqueeze(1) + 1 + step  # [B, D] slots
            source = torch.where(path >= 0, self.lengths.unsqueeze(1) + 1 + path, target)
            for pair in self.buffers:
                for buffer in pair:  # [layers, B, heads, S, dim]
                    shape = (buffer.shape[0], -1, buffer.shape[2], -1, buffer.shape[4])
                    src = source.to(buffer.device)[None, :, None, :, None].expand(shape)
                    dst = target.to(buffer.device)[None, :, None, :, None].expand(shape)
                    buffer.scatter_(3, dst, buffer.gather(3, src))
        self.set_lengths(self.lengths_host + emitted_host)
