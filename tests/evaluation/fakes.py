"""An engine of a few lines that remembers which chunks it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from daric_rag import Completion, DaricConfig, PromptLayout, ReuseStats, TokenPrompt
from daric_rag.engine import Delta
from daric_rag.layout import build_layout


class FakeEngine:
    """Text becomes one token per word; a prompt takes 1 ms per computed token."""

    tokenizer = range(1000)
    block_size = 32
    max_model_len = 8192

    def __init__(self, **wrong: int) -> None:
        self.stored: set[Any] = set()
        self.cached: list[int] = []
        self.on_disk_only = False
        self.reads = {"host": 0, "disk": 0}
        self.calls: list[str] = []
        self.wrong = wrong
        self.closed = False

    def layout(self, prompt: Any) -> PromptLayout:
        if isinstance(prompt, TokenPrompt):
            chunks = [list(chunk) for chunk in prompt.chunks]
        else:
            texts = [prompt.system or "You", *prompt.texts(), prompt.question]
            chunks = [[hash(w) % 2**31 for w in text.split()] for text in texts]
        return build_layout(chunks, config=DaricConfig(), block_size=32, pad_token_id=0)

    def generate(self, prompt: Any, **options: Any) -> Completion:
        self.calls.append(options["reuse"])
        layout = self.layout(prompt)
        count = self._ordinary if options["reuse"] == "off" else self._reusing
        stats = count(layout, options)
        computed = stats.recomputed_tokens + stats.generated_tokens
        ids = tuple(range(options["max_tokens"]))
        return Completion("Two. ", ids, "length", None, computed / 1000, stats)

    def stream(self, prompt: Any, **options: Any) -> Iterator[Delta]:
        done = self.generate(prompt, **options)
        for token in done.token_ids[:-1]:
            yield Delta("x", (token,))
        yield Delta("x", done.token_ids[-1:], completion=done)

    def _ordinary(self, layout: PromptLayout, options: Any) -> ReuseStats:
        same = 0
        for mine, theirs in zip(layout.token_ids[:-1], self.cached, strict=False):
            if mine != theirs:
                break
            same += 1
        prefix = same // 32 * 32
        self.cached = list(layout.token_ids)
        return ReuseStats(
            layout.prompt_len,
            gpu_prefix_tokens=prefix,
            recomputed_tokens=layout.prompt_len - prefix,
        )

    def _reusing(self, layout: PromptLayout, options: Any) -> ReuseStats:
        hit = generated = 0
        for chunk in layout.chunks[:-1]:
            key = options["namespace"], layout.token_ids[chunk.start : chunk.end]
            if key in self.stored:
                hit += chunk.end - chunk.start
                self.reads["disk" if self.on_disk_only else "host"] += 1
            elif chunk.start:
                generated += chunk.end - chunk.start
            self.stored.add(key)
        self.on_disk_only = False
        windows = layout.recompute_len
        if options["reuse"] == "full_reuse":
            windows = layout.chunks[-1].end - layout.chunks[-1].start
        counts = {
            "contiguous_hit_tokens": hit,
            "generated_tokens": generated,
            "recomputed_tokens": windows,
        }
        return ReuseStats(layout.prompt_len, **(counts | self.wrong))

    def clear_prefix_cache(self) -> None:
        self.cached = []

    def flush(self) -> None:
        pass

    def clear_host(self) -> None:
        self.on_disk_only = True

    def store_stats(self) -> Any:
        tiers = {name: SimpleNamespace(hits=n) for name, n in self.reads.items()}
        return SimpleNamespace(**tiers)

    def close(self) -> None:
        self.closed = True
