"""Streams of a device that is the CPU, which notice work that nothing orders.

Work runs at once, in the order of its submission. What is watched is what a device
would have made of it: every stream has a vector clock, events carry it to other
streams, and two pieces of work on the same slot, one of them a write, must be ordered.
An event has happened once the host has waited for it or for something after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import KvLayout, SplitKv, slots_of
from daric_rag.runtime.kv_tensors import KvShape

HOST, ENGINE, LOAD, SAVE = "host", "engine", "load", "save"

Clock = dict[str, int]


class Race(AssertionError):
    """Two pieces of work that a device may run in either order."""


class WatchedEvent:
    def __init__(self, streams: WatchedStreams) -> None:
        self._streams, self._clock = streams, Clock()

    def record(self) -> None:
        self._clock = dict(self._streams.now())

    def wait(self) -> None:
        self._streams.learn(self._streams.current, self._clock)

    def query(self) -> bool:
        known = self._streams.clocks[HOST]
        return all(known[stream] >= time for stream, time in self._clock.items())

    def synchronize(self) -> None:
        self._streams.learn(HOST, self._clock)


class WatchedStreams:
    """See `daric_rag.runtime.streams.Streams`.

    Args:
        is_locked: Whether host memory is page-locked.
    """

    def __init__(self, is_locked: Callable[[Tensor], bool] = lambda _: True) -> None:
        self.is_locked = is_locked
        self.current = ENGINE
        self.clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        # Of each slot, when each stream last read and wrote it.
        self._read: dict[tuple[int, int], Clock] = defaultdict(dict)
        self._written: dict[tuple[int, int], Clock] = defaultdict(dict)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def loading(self) -> AbstractContextManager[None]:
        return self.on(LOAD)

    def saving(self) -> AbstractContextManager[None]:
        return self.on(SAVE)

    def event(self) -> WatchedEvent:
        return WatchedEvent(self)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def now(self) -> Clock:
        """The current stream's clock, with a tick of its own."""
        self.learn(self.current, self.clocks[HOST])  # the host has submitted it
        self.clocks[self.current][self.current] += 1
        return self.clocks[self.current]

    def learn(self, stream: str, clock: Clock) -> None:
        for other, time in list(clock.items()):
            self.clocks[stream][other] = max(self.clocks[stream][other], time)

    def has_happened(self, stream: str) -> bool:
        """Whether the host knows that all of a stream's work is done."""
        return self.clocks[HOST][stream] == self.clocks[stream][stream]

    def touch_slots(self, layer: int, slots: Tensor, *, write: bool) -> None:
        """Work of the current stream on some slots of a layer."""
        clock = dict(self.now())
        mine = self._written if write else self._read
        for slot in slots.tolist():
            key = (layer, slot)
            for others in (self._written, self._read) if write else (self._written,):
                for stream, time in others[key].items():
                    if clock.get(stream, 0) < time:
                        raise Race(f"{key}: {self.current} may overtake {stream}")
            mine[key][self.current] = clock[self.current]


class WatchedLayout:
    """A `KvLayout` whose use is watched."""

    def __init__(
        self, streams: WatchedStreams, layout: KvLayout, num_layers: int
    ) -> None:
        self._streams, self._layout, self._num_layers = streams, layout, num_layers
        self.block_size = layout.block_size

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        self._touch_all(block_ids, start, start + keys.shape[1], write=True)
        self._layout.scatter(keys, values, block_ids, start)

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        self._touch_all(block_ids, start, start + keys.shape[1], write=False)
        self._layout.gather(keys, values, block_ids, start)

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        self._streams.touch_slots(layer, slots, write=False)
        return self._layout.read_slots(layer, slots)

    def _touch_all(
        self, block_ids: Sequence[int], start: int, end: int, *, write: bool
    ) -> None:
        slots = torch.tensor(slots_of(block_ids, start, end, self.block_size))
        for layer in range(self._num_layers):
            self._streams.touch_slots(layer, slots, write=write)


class WatchedBlocks(WatchedLayout):
    """Blocks as GPU kernels lay them out, and their operator `write_slots`."""

    def __init__(
        self,
        streams: WatchedStreams,
        shape: KvShape,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
    ) -> None:
        size = (num_blocks, shape.num_kv_heads, block_size, 2 * shape.head_dim)
        self.layers = list(torch.zeros((shape.num_layers, *size), dtype=shape.dtype))
        super().__init__(
            streams, SplitKv(self.layers, shape.head_dim), len(self.layers)
        )

    def write_slots(
        self, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        self._streams.touch_slots(layer, slots, write=True)
        both = torch.cat((keys, values), dim=-1)
        size = self.block_size
        self.layers[layer][slots // size, :, slots % size] = both
