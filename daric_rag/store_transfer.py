"""``daric store export`` and ``import``: documents in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from daric_rag.cli_common import Json, make_console
from daric_rag.errors import ConfigError, StoreError
from daric_rag.store_options import (
    DEFAULT_DISK_BYTES,
    All,
    DiskBytes,
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

__all__ = ["export_file", "import_file"]


def export_file(
    file: Annotated[Path, typer.Argument(help="The file to write, a plain tar.")],
    names: Names = None,
    title: Title = None,
    namespace: Namespace = None,
    model: ModelPrefix = None,
    older_than: OlderThan = None,
    everything: All = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of that name.")
    ] = False,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Write documents to one file, for `daric store import` elsewhere.

    Records of an encrypted store stay sealed in it: importing needs the same key.
    """
    from daric_rag.evaluation.store_report import export_lines
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.storage.archive import export_documents

    selection = selection_of(names, title, namespace, model, older_than, everything)
    with opened(store, key_file) as (disk, cipher):
        tree = tree_of(disk)
        chosen = choose(tree, selection)
        with progress_bar(make_console(stderr=True), "exporting") as bar:
            bar.expect(len(tree.segments_of(chosen)))
            report = export_documents(
                disk.directory,
                tree,
                chosen,
                file,
                key_id=cipher.key_id if cipher else None,
                overwrite=overwrite,
                on_record=lambda: bar.step("exporting"),
            )
    if as_json:
        print_json({"file": str(file), **asdict(report)})
    else:
        typer.echo("\n".join(export_lines(report, str(file))))
    if report.failures.counts:
        raise typer.Exit(1)


def import_file(
    file: Annotated[Path, typer.Argument(help="What `daric store export` wrote.")],
    disk_bytes: DiskBytes = None,
    evict_others: Annotated[
        bool,
        typer.Option("--evict", help="Evict others for room (needs --disk-bytes)."),
    ] = False,
    archive_key_file: Annotated[
        Path | None,
        typer.Option(help="The archive's key, if it is sealed with another."),
    ] = None,
    store: StorePath = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Add the documents of a file to a store; each record is checked for damage.

    Where no store is yet, one is made.

    Import only from whom you trust: false records would steer the answers. Stops
    where the store is full, unless --evict is given. Titles and pins come along.
    """
    from daric_rag.evaluation.store_report import import_lines
    from daric_rag.evaluation.terminal import progress_bar
    from daric_rag.evaluation.units import parse_bytes
    from daric_rag.storage.archive_import import import_records
    from daric_rag.storage.cipher import load_cipher

    if evict_others and disk_bytes is None:
        raise ConfigError(
            "--evict needs --disk-bytes: a store larger than its default would be "
            "evicted down to that"
        )
    budget = parse_bytes(DEFAULT_DISK_BYTES if disk_bytes is None else disk_bytes)
    if not file.is_file():
        raise StoreError(f"cannot read {file}: name what `daric store export` wrote")
    with opened(store, key_file, disk_bytes=budget, writes=True, creates=True) as (
        disk,
        cipher,
    ):
        if archive_key_file is not None:
            cipher = load_cipher(archive_key_file, environ={})
        with progress_bar(make_console(stderr=True), "importing") as bar:
            report = import_records(
                disk,
                file,
                cipher=cipher,
                may_evict=evict_others,
                expect=bar.expect,
                on_record=lambda: bar.step("importing"),
            )
        disk.flush()
    if as_json:
        print_json({"file": str(file), **asdict(report)})
    else:
        typer.echo("\n".join(import_lines(report, str(file))))
    if report.stopped or report.failures.counts or report.num_missing:
        raise typer.Exit(1)
