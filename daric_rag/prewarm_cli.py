"""``daric prewarm``: fills a store with documents, ahead of all questions."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from daric_rag.cli_common import Json, Verbose, make_console
from daric_rag.errors import ConfigError
from daric_rag.prewarm_run import dry_run_of, exit_code_of, run_job
from daric_rag.prewarm_settings import Settings, manifest_path
from daric_rag.prewarm_watch import watch_and_run
from daric_rag.store_options import KeyFile, StorePath, opened, print_json

__all__ = ["prewarm_app"]


class _RunByDefault(TyperGroup):
    """Takes what is no command of its own for the sources of ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``run`` in front unless a command or help is asked for."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


prewarm_app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Compute and store documents ahead of the prompts that will hold them.\n\n"
    "`daric prewarm SOURCE...` is `daric prewarm run SOURCE...`, whose --help lists "
    "the options.\n\n"
    "Exit codes of a run: 0, all is stored; 1, it could not run; 2, no such option; 3, "
    "some documents failed, and the manifest says why; 4, the store has no more "
    "room or cannot write; 130, interrupted and ready to go on. Interrupt twice to "
    "stop at once.",
)


class Sync(StrEnum):
    """What becomes of documents that the sources have no more."""

    EVICT = "evict"
    UNPIN = "unpin"


ManifestPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Record that makes the job resumable, one per shard.",
        show_default="prewarm.jsonl, or prewarm-3-of-8.jsonl",
    ),
]


@prewarm_app.command("run")
def run(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files and folders (text, Markdown, HTML, PDF, JSON Lines); - is "
            "JSON Lines on standard input.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, hub name, or smollm2-135m, to run here."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Server to run on, as http://host:8000.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="Of the server.", show_envvar=True),
    ] = None,
    store: StorePath = None,
    key_file: KeyFile = None,
    manifest: ManifestPath = None,
    template: Annotated[
        str, typer.Option(help="PromptBuilder's document_template.")
    ] = "{text}",
    splitter: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:OBJECT",
            help="Cuts documents as the retriever's index does: an object with "
            "split_text, or a function.",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    text_field: Annotated[str, typer.Option(help="Of JSON Lines.")] = "text",
    title_field: Annotated[str, typer.Option(help="Of JSON Lines.")] = "title",
    source_field: Annotated[str, typer.Option(help="Of JSON Lines.")] = "source",
    id_field: Annotated[str, typer.Option(help="Of JSON Lines.")] = "id",
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="This worker's share, as 3/8.")
    ] = "1/1",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Stop before the store holds more: 200GB, 32GiB.",
            show_default="32GiB",
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="About so many tokens at once.")
    ] = 8_192,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="`expire` evicts what this run stores then: 12h, 30d."
        ),
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Keep what is stored from eviction.")
    ] = False,
    sync: Annotated[
        Sync | None,
        typer.Option(help="What becomes of documents that vanished from the sources."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Run again whenever a source changes.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Ask the store, not the manifest.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--vllm",
            metavar="NAME=VALUE",
            help="Option of vLLM, as max_model_len=8192; may be repeated.",
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compute and store every document of the sources that is not stored yet."""
    settings = Settings(
        sources=tuple(sources),
        model=model,
        url=url,
        api_key=api_key,
        store=store,
        key_file=key_file,
        manifest=manifest_path(manifest, shard),
        template=template,
        splitter=splitter,
        namespace=namespace,
        fields=(text_field, title_field, source_field, id_field),
        shard=shard,
        budget=budget,
        batch_tokens=batch_tokens,
        ttl=ttl,
        pin=pin,
        sync=sync and sync.value,
        again=again,
        vllm=tuple(option or ()),
        verbose=verbose,
    )
    if dry_run:
        num_refused = dry_run_of(settings, as_json=as_json)
        raise typer.Exit(3 if num_refused else 0)
    run_again = watch_and_run if watch else run_job
    report = run_again(settings, as_json=as_json)
    code = exit_code_of(report)
    if code:
        raise typer.Exit(code)


@prewarm_app.command()
def verify(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Of a job.")],
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Read all that a manifest says is stored; exit code 1 if any is not, or damaged.

    `daric prewarm run --again` computes what is missing.
    """
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.prewarm.audit import audit

    read = _existing(manifest)
    with (
        opened(store, key_file) as (disk, _),
        progress_bar(make_console(stderr=True), "verifying") as bar,
    ):
        found = audit(read, disk, on_record=lambda: bar.step("verifying"))
    if as_json:
        print_json(
            {
                "num_documents": found.num_documents,
                "num_records": found.records.num_records,
                "nbytes": found.records.nbytes,
                "num_damaged_lines": found.num_damaged_lines,
                "missing": [_named(entry) for entry in found.missing],
                "damaged": [_named(entry) for entry in found.damaged],
            }
        )
    else:
        for word, entries in (("missing", found.missing), ("damaged", found.damaged)):
            for entry in entries:
                typer.echo(f"{word}: {entry.id}")
        typer.echo(
            f"{found.num_documents} documents, {found.records.num_records} records: "
            f"{len(found.missing)} missing, {len(found.damaged)} damaged"
        )
    if found.num_damaged_lines and not as_json:
        typer.echo(f"{found.num_damaged_lines} damaged lines left out", err=True)
    if not found.is_good:
        raise typer.Exit(1)


@prewarm_app.command()
def expire(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Of a job.")],
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Evict the documents of a manifest whose --ttl is over."""
    from daric_rag.evaluation.units import human_bytes
    from daric_rag.prewarm.refresh import expire as evict_expired

    read = _existing(manifest)
    with opened(store, key_file, writes=True) as (disk, _):
        num_documents, freed = evict_expired(disk, read, now=time.time())
    if as_json:
        print_json({"num_documents": num_documents, "freed_bytes": freed})
    else:
        typer.echo(f"{num_documents} documents, {human_bytes(freed)} freed")


def _named(entry: Any) -> dict[str, str]:
    names = ("id", "hash", "document", "place")
    return {name: getattr(entry, name) for name in names}


def _existing(path: Path) -> Any:
    from daric_rag.prewarm.manifest import Manifest, what_else

    manifest = Manifest(path)
    if not manifest.headers():
        kind = what_else(path) if path.is_file() else "no file: name a job's manifest"
        raise ConfigError(f"{path} is {kind}")
    return manifest
