"""Streams of a device that is the CPU, which notice work that nothing orders.

Work runs at once, in the order of its submission. What is watched is what a device
would have made of it: every stream has a vector clock, events carry it to other
streams, and two pieces of work on the same slot, one of them a write, must be ordered.
An event has happened once the host has waited for it or for something after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from daric_rag.runtime.kv_layout import SplitKv, slots_of

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
        self._work: dict[Hashable, list[tuple[str, int, bool]]] = defaultdict(list)

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

    def touch(self, what: Iterable[Hashable], *, write: bool) -> None:
        """Work of the current stream on some slots."""
        clock = self.now()
        for key in what:
            for stream, time, wrote in self._work[key]:
                if (write or wrote) and clock[stream] < time:
                    raise Race(f"{key}: {self.current} may overtake {stream}")
            self._work[key].append((self.current, clock[self.current], write))


class WatchedBlocks:
    """Blocks as GPU kernels lay them out. See `KvLayout` and `WriteSlots`."""

    def __init__(
        self,
        streams: WatchedStreams,
        *,
        num_layers: int = 3,
        num_blocks: int = 40,
        num_heads: int = 2,
        block_size: int = 4,
        head_dim: int = 8,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        shape = (num_layers, num_blocks, num_heads, block_size, 2 * head_dim)
        self.layers = list(torch.zeros(shape, dtype=dtype))
        self.streams, self.block_size = streams, block_size
        self._split = SplitKv(self.layers, head_dim)

    def scatter(
        self, keys: Tensor, values: Tensor, block_ids: list[int], start: int
    ) -> None:
        self._split.scatter(keys, values, block_ids, start)

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: list[int], start: int
    ) -> None:
        slots = slots_of(block_ids, start, start + keys.shape[1], self.block_size)
        for layer in range(len(self.layers)):
            self.streams.touch(((layer, slot) for slot in slots), write=False)
        self._split.gather(keys, values, block_ids, start)

    def read_slots(self, layer: int, slots: Tensor) -> Tensor:
        self.streams.touch(((layer, slot) for slot in slots.tolist()), write=False)
        return self._split.read_slots(layer, slots)

    def write_slots(
        self, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        self.streams.touch(((layer, slot) for slot in slots.tolist()), write=True)
        both = torch.cat((keys, values), dim=-1)
        size = self.block_size
        self.layers[layer][slots // size, :, slots % size] = both
