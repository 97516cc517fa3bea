"""Pre-warming: offline jobs that fill a store, resumable and verified.

    job = PrewarmJob(engine, PathSource(["corpus"]), manifest="prewarm.jsonl")
    print(job.run().totals)

Nothing here knows how an engine computes or a store keeps; `daric prewarm` puts them
together.
"""

from __future__ import annotations

from daric_rag.prewarm.items import SourceItem, items_of
from daric_rag.prewarm.job import PrewarmEngine, PrewarmJob
from daric_rag.prewarm.manifest import Entry, Manifest
from daric_rag.prewarm.options import JobOptions, JobReport, Totals
from daric_rag.prewarm.readers import read_text
from daric_rag.prewarm.sharding import Shard, TextHash, text_hash
from daric_rag.prewarm.sources import JsonFields, PathSource

__all__ = [
    "Entry",
    "JobOptions",
    "JobReport",
    "JsonFields",
    "Manifest",
    "PathSource",
    "PrewarmEngine",
    "PrewarmJob",
    "Shard",
    "SourceItem",
    "TextHash",
    "Totals",
    "items_of",
    "read_text",
    "text_hash",
]
