"""The options of ``daric prewarm run``, as one value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from daric_rag.config import DaricConfig
from daric_rag.errors import ConfigError

if TYPE_CHECKING:
    from daric_rag.prewarm import JobOptions, PathSource

__all__ = ["PREWARM_CONFIG", "Settings", "manifest_path"]

PREWARM_CONFIG = DaricConfig(
    # A document is stored once and seldom read again: memory is for what waits for the
    # disk. Used over and over, it is faster than new memory is.
    host_bytes=512 << 20,
    require_disk=True,
)
"""Of an engine that does nothing else."""

# Of the engine's limit above the job's: what is under way must not evict.
_HEADROOM_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of ``daric prewarm run``, as they were given."""

    sources: tuple[str, ...]
    model: str | None
    url: str | None
    api_key: str | None
    store: str | None
    key_file: str | None
    manifest: Path
    template: str
    splitter: str | None
    namespace: str
    fields: tuple[str, str, str, str]
    shard: str
    budget: str | None
    batch_tokens: int
    ttl: str | None
    pin: bool
    sync: str | None
    again: bool
    vllm: tuple[str, ...]
    verbose: bool

    def __post_init__(self) -> None:
        """Refuse what does not go together, before a model is loaded."""
        if (self.model is None) == (self.url is None):
            raise ConfigError("name one engine: --model to run here, or --url")
        if self.url is not None:
            # DARIC_STORE may be set for other commands.
            for name in ("vllm", "budget", "key_file"):
                if getattr(self, name):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is the server's affair: leave it "
                        f"out with --url"
                    )
        for name in ("store", "model", "url", "namespace"):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name} is empty: give it a value or leave it out")
        if self.store == ":memory:":
            raise ConfigError(
                "a store in memory ends with the job: name a folder with --store"
            )
        if self.sync and "-" in self.sources:
            raise ConfigError(
                "--sync needs the whole corpus, and standard input may end before it "
                "does: write the documents to a file and name that"
            )
        if (self.sync or self.pin) and not self.sees_store:
            raise ConfigError(
                "--sync and --pin need the server's store on this machine: name its "
                "folder with --store, or use `daric store` there"
            )

    @property
    def sees_store(self) -> bool:
        """Whether the store's folder is on this machine."""
        return self.store is not None or self.url is None

    @property
    def budget_bytes(self) -> int | None:
        """What the store may hold before the job stops; None if nothing is said."""
        from daric_rag.evaluation.units import parse_bytes

        return parse_bytes(self.budget) if self.budget is not None else None

    @property
    def limit_bytes(self) -> int:
        """What a store on this machine may hold before the job stops."""
        return self.budget_bytes or PREWARM_CONFIG.disk_bytes

    def config(self) -> DaricConfig:
        """Return the engine's configuration."""
        return replace(
            PREWARM_CONFIG,
            namespace=self.namespace,
            # Never below the default: a small budget stops the job, and must not make
            # the engine evict what others keep here. And above the job's own limit,
            # which it cannot see to the last byte while others write.
            disk_bytes=max(self.budget_bytes or 0, PREWARM_CONFIG.disk_bytes)
            + _HEADROOM_BYTES,
            encryption_key_file=self.key_file,
        )

    def store_folder(self) -> str:
        """Return the store's folder, absolute."""
        from daric_rag.storage import default_store_path

        path = default_store_path() if self.store is None else Path(self.store)
        return str(path.expanduser().absolute())

    def source(self, stdin: BinaryIO | None = None) -> PathSource:
        """Return what the paths hold.

        Args:
            stdin: Stands for standard input.
        """
        from daric_rag.prewarm import JsonFields, PathSource
        from daric_rag.prewarm.splitting import load_splitter

        if stdin is None and sys.stdin is not None:
            stdin = sys.stdin.buffer
        split = None if self.splitter is None else load_splitter(self.splitter)
        return PathSource(
            self.sources, JsonFields(*self.fields), stdin, split, [self.manifest]
        )

    def watched_folders(self) -> list[Path]:
        """Return the folders that tell of changes; of a file its own one.

        Editors replace files, so that there is nothing else to watch.
        """
        paths = [Path(path).absolute() for path in self.sources]
        return [path if path.is_dir() else path.parent for path in paths]

    def change_filter(self, linked: Iterable[Path] = ()) -> Callable[[str], bool]:
        """Return what tells whether a change of a file is a change of a source.

        What a job writes is none, wherever it lies.

        Args:
            linked: Folders that links in a source lead to.
        """
        from daric_rag.prewarm.folders import real
        from daric_rag.prewarm.manifest import is_manifest

        sources = {Path(source).absolute() for source in self.sources} | {*linked}
        own = {real(self.manifest)}
        if self.sees_store:
            own.add(real(Path(self.store_folder())))

        def is_change(path: str) -> bool:
            changed = Path(path)
            place = real(changed)
            if own & {place, *place.parents} or is_manifest(place):
                return False
            return not sources.isdisjoint((changed, *changed.parents))

        return is_change

    def job_options(self) -> JobOptions:
        """Return how the job is to run."""
        from daric_rag.evaluation.units import parse_duration
        from daric_rag.prewarm import JobOptions, Shard

        identity: dict[str, Any] = {"namespace": self.namespace}
        if self.url is None:
            identity |= {"model": self.model, "store": self.store_folder()}
        return JobOptions(
            shard=Shard.parse(self.shard),
            batch_tokens=self.batch_tokens,
            budget_bytes=None if self.url else self.limit_bytes,
            lifetime_s=parse_duration(self.ttl) if self.ttl else None,
            again=self.again,
            identity=identity,
        )

    def vllm_options(self) -> dict[str, Any]:
        """Return the options for vLLM; values are JSON, or text if they are none."""
        options: dict[str, Any] = {}
        for text in self.vllm:
            name, equals, value = text.partition("=")
            if not (name and equals):
                raise ConfigError(f"--vllm {text!r}: write it as max_model_len=8192")
            try:
                options[name.replace("-", "_")] = json.loads(value)
            except ValueError:
                options[name.replace("-", "_")] = value
        return options


def manifest_path(given: Path | None, shard: str) -> Path:
    """Return where a job's manifest is; shards have one each."""
    from daric_rag.prewarm import Shard

    parsed = Shard.parse(shard)
    if given is not None:
        return given
    if parsed.count == 1:
        return Path("prewarm.jsonl")
    return Path(f"prewarm-{parsed.index}-of-{parsed.count}.jsonl")
