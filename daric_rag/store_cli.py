"""``daric store``: what a store holds, and looking after it while engines use it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daric_rag.cli_common import Json, make_console
from daric_rag.errors import ConfigError
from daric_rag.store_options import (
    All,
    DryRun,
    KeyFile,
    ModelPrefix,
    Names,
    Namespace,
    OlderThan,
    StorePath,
    Title,
    choose,
    opened,
    print_json,
    selection_of,
    tree_of,
)
from daric_rag.store_transfer import export_file, import_file

if TYPE_CHECKING:
    from daric_rag.storage.document_selection import Selection
    from daric_rag.storage.documents import Document

__all__ = ["store_app"]

store_app = typer.Typer(
    help="See what a store holds, and look after it while engines use it.\n\n"
    "An encrypted store needs its key in --key-file, DARIC_STORE_KEY_FILE or "
    "DARIC_STORE_KEY.",
    no_args_is_help=True,
)

store_app.command("export")(export_file)
store_app.command("import")(import_file)


class SortBy(StrEnum):
    """What a listing is ordered by; figures fall, titles rise."""

    USED = "used"
    SIZE = "size"
    USES = "uses"
    TITLE = "title"


_ORDER: dict[SortBy, Callable[[Document], Any]] = {
    SortBy.USED: lambda document: -document.last_used,
    SortBy.SIZE: lambda document: -document.nbytes,
    SortBy.USES: lambda document: -document.uses,
    SortBy.TITLE: lambda document: document.title.casefold(),
}


@store_app.command("ls")
def list_documents(
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    sort: Annotated[SortBy, typer.Option(help="What comes first.")] = SortBy.USED,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show so many at most.")
    ] = None,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """List documents; "own" is what evicting one alone would free."""
    selection = selection_of(names, title, namespace, model, older_than)
    with opened(store, key_file) as (disk, _):
        tree = tree_of(disk)
    chosen = choose(tree, selection, explicit=False)
    shown = sorted(chosen, key=_ORDER[sort])[:limit]
    if as_json:
        from daric_rag.evaluation.store_report import document_json

        print_json({"documents": [document_json(d) for d in shown]})
        return
    from daric_rag.evaluation.store_view import documents_table, listing_console

    listing_console().print(documents_table(shown, now=time.time()))
    if len(shown) < len(chosen):
        typer.echo(f"{len(chosen) - len(shown)} more: raise --limit", err=True)


@store_app.command()
def stats(
    store: StorePath = None, key_file: KeyFile = None, as_json: Json = False
) -> None:
    """Show sums: documents, bytes, models, namespaces."""
    from daric_rag.storage.admin import store_facts

    with opened(store, key_file) as (disk, _):
        facts = store_facts(disk, tree_of(disk))
    if as_json:
        print_json(facts)
        return
    from daric_rag.evaluation.store_view import listing_console, stats_table

    listing_console().print(stats_table(facts, now=time.time()))


@store_app.command()
def verify(
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete damaged records.")
    ] = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Read records and check every byte; exit code 1 if any is damaged.

    Engines find damage themselves when they read a record, and compute it again.
    """
    from daric_rag.evaluation.store_report import verify_json, verify_lines
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.storage.admin import verify_segments

    selection = selection_of(names, title, namespace, model, older_than)
    with opened(store, key_file, writes=repair) as (disk, _):
        tree = tree_of(disk)
        rows = tree.segments_of(choose(tree, selection, explicit=False))
        with progress_bar(make_console(stderr=True), "verifying") as bar:
            bar.expect(len(rows))
            report = verify_segments(
                disk, rows, repair=repair, on_record=lambda: bar.step("verifying")
            )
    documents = tree.needing(key for key, _ in report.damaged)
    if as_json:
        print_json(verify_json(report, documents))
    else:
        typer.echo("\n".join(verify_lines(report, documents)))
    if report.damaged or report.unreadable:
        raise typer.Exit(1)


@store_app.command()
def pin(
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    everything: All = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Keep documents from eviction, whoever makes room, until they are unpinned."""
    _set_pinned(
        True,
        selection_of(names, title, namespace, model, older_than, everything),
        store,
        key_file,
        as_json,
    )


@store_app.command()
def unpin(
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    everything: All = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Let pinned documents be evicted again."""
    _set_pinned(
        False,
        selection_of(names, title, namespace, model, older_than, everything),
        store,
        key_file,
        as_json,
    )


@store_app.command()
def evict(
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Delete documents; what others share with them, and pinned ones, stay."""
    from daric_rag.evaluation.store_report import eviction_json, eviction_lines
    from daric_rag.storage.admin import carry_out, plan_eviction

    selection = selection_of(names, title, namespace, model, older_than, everything)
    with opened(store, key_file, writes=not dry_run) as (disk, _):
        tree = tree_of(disk)
        plan = plan_eviction(tree, choose(tree, selection))
        if plan.pinned and selection.names:
            raise ConfigError(
                f"{plan.pinned[0].key.hex()[:12]} is pinned: `daric store unpin` it "
                "first"
            )
        sweeping = everything or selection.is_unlimited
        if sweeping and plan.documents and not (dry_run or yes):
            _confirm(len(plan.documents), str(disk.directory))
        freed = plan.nbytes if dry_run else carry_out(disk, plan)
    if as_json:
        print_json(eviction_json(plan, freed, dry_run=dry_run))
    else:
        typer.echo("\n".join(eviction_lines(plan, freed, dry_run=dry_run)))


@store_app.command()
def gc(
    dry_run: DryRun = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Give back what ended processes left: files without a record and the reverse."""
    from daric_rag.evaluation.store_report import reclaimed_lines

    with opened(store, key_file, writes=not dry_run) as (disk, _):
        reclaimed = disk.reclaim(dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(reclaimed)})
    else:
        typer.echo("\n".join(reclaimed_lines(reclaimed, dry_run=dry_run)))


def _set_pinned(
    pinned: bool,
    selection: Selection,
    store: str | None,
    key_file: str | None,
    as_json: bool,
) -> None:
    with opened(store, key_file, writes=True) as (disk, _):
        chosen = choose(tree_of(disk), selection)
        keys = [document.key for document in chosen]
        num_changed = disk.pin(keys) if pinned else disk.unpin(keys)
    word = "pinned" if pinned else "unpinned"
    if as_json:
        print_json({"num_documents": len(chosen), f"num_{word}": num_changed})
    else:
        already = len(chosen) - num_changed
        typer.echo(f"{num_changed} {word}" + (f", {already} were" if already else ""))


def _confirm(num_documents: int, directory: str) -> None:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            "evicting everything asks on a terminal: from a script, add --yes"
        )
    typer.confirm(
        f"Delete all {num_documents} documents in {directory}?", abort=True, err=True
    )
