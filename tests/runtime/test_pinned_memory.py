"""Page-locking the arena, with and without the system's consent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from daric_rag.runtime import pinned_memory
from daric_rag.storage.arena import Arena

CUDA = torch.device("cuda")


class Cuda:
    """A runtime that tells of its last error once, to whoever asks next."""

    def __init__(self, error: int) -> None:
        self.error = self.untold = error
        self.cuda = SimpleNamespace(cudart=lambda: self)
        self.unlocked: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        self.unlocked.append(address)

    def ones(self, *_: object, **__: object) -> None:
        if self.untold:
            self.untold = 0
            raise RuntimeError("CUDA error")


def test_a_refusal_is_not_left_to_the_model_to_find(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(error=2)
    monkeypatch.setattr(pinned_memory, "torch", cuda)
    unpin = pinned_memory.pin_arena(Arena(4096), CUDA)
    assert not cuda.untold
    assert "ulimit -l" in caplog.text
    unpin()
    assert cuda.unlocked == []


def test_what_is_locked_is_unlocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(error=0)
    monkeypatch.setattr(pinned_memory, "torch", cuda)
    unpin = pinned_memory.pin_arena(Arena(4096), CUDA)
    assert cuda.unlocked == []
    unpin()
    assert len(cuda.unlocked) == 1


def test_other_devices_need_no_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "torch", None)
    pinned_memory.pin_arena(Arena(4096), torch.device("cpu"))()
