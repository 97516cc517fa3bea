"""Transfers of a GPU: loads and saves beside the passes that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from daric_rag.runtime.layer_loads import LayerLoads
from daric_rag.runtime.layer_saves import LayerSaves
from daric_rag.runtime.placement import Placement
from daric_rag.runtime.streams import CudaStreams, Streams
from daric_rag.runtime.transfers import (
    ImmediateTransfers,
    KvAccess,
    LayerSave,
    Transfers,
    gather,
)

__all__ = ["StreamTransfers", "transfers_for"]


class StreamTransfers:
    """Copies while the engine computes. See `Transfers`, `layer_loads`, `layer_saves`.

    Args:
        access: To the blocks.
        streams: Of the device.
    """

    is_layerwise = True

    def __init__(self, access: KvAccess, streams: Streams) -> None:
        self._access = access
        self._loads = LayerLoads(access, streams)
        self._saves = LayerSaves(access, streams)

    def place(self, placement: Placement) -> None:
        """See `Transfers.place`."""
        self._loads.place(placement)

    def submit(self) -> None:
        """See `Transfers.submit`."""
        # What was saved from may be loaded into.
        self._saves.settle()
        self._loads.submit()

    def begin_pass(self, *, layerwise: bool) -> None:
        """See `Transfers.begin_pass`."""
        self.submit()
        if layerwise:
            self._saves.begin_pass()
            self._loads.wait_layer(0)
        else:
            self._saves.forget()
            self._loads.wait_all()

    def wait_layer(self, layer: int) -> None:
        """See `Transfers.wait_layer`; waits one layer ahead, see `layer_loads`."""
        self._loads.wait_layer(layer + 1)

    def save_layer(self, layer: int) -> None:
        """See `Transfers.save_layer`."""
        self._saves.save_layer(layer)

    def expect_save(self, save: LayerSave) -> None:
        """See `Transfers.expect_save`."""
        self._saves.expect(save)

    def finish_save(self, save: LayerSave) -> bool:
        """See `Transfers.finish_save`."""
        return self._saves.finish(save)

    def gather(
        self, keys: Tensor, values: Tensor, block_ids: Sequence[int], start: int
    ) -> None:
        """See `Transfers.gather`."""
        self._loads.wait_all()
        gather(self._access, keys, values, block_ids, start)

    def settle(self) -> None:
        """See `Transfers.settle`."""
        self._loads.settle()
        self._saves.settle()

    def forget(self) -> None:
        """See `Transfers.forget`."""
        self._loads.forget()
        self._saves.forget()


def transfers_for(access: KvAccess, layers: Sequence[Tensor]) -> Transfers:
    """Return the transfers that suit a device.

    Args:
        access: To the blocks.
        layers: One cache tensor per layer.
    """
    # Layers that share a tensor are one layer's loads and several layers' attention.
    distinct = len({layer.data_ptr() for layer in layers}) == len(layers)
    if access.device.type == "cuda" and distinct:
        return StreamTransfers(access, CudaStreams(access.device))
    return ImmediateTransfers(access)
