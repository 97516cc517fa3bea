"""Which document templates a store was warmed with: a small file beside its records.

A document that is written by another template is another document: its cache is not
found, and nothing else would tell why.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from daric_rag.storage.claim import MARKER

__all__ = ["FILE_NAME", "note_template", "other_templates"]

FILE_NAME: Final = "prewarm_templates.json"


def other_templates(folder: str | os.PathLike[str], template: str) -> list[str]:
    """Return the hashes of other templates that documents here were written by.

    Args:
        folder: The store's.
        template: `PromptBuilder.template_hash`.
    """
    return sorted(_read(Path(folder)).keys() - {template})


def note_template(folder: str | os.PathLike[str], template: str, written: str) -> None:
    """Remember that documents of a store are written by a template.

    A store that cannot be written to is warmed by nobody, so that is no error here. A
    folder that is no store stays as it is.

    Args:
        folder: The store's.
        template: `PromptBuilder.template_hash`.
        written: The template, for people.
    """
    known = _read(Path(folder))
    if template in known or not Path(folder, MARKER).exists():
        return
    known[template] = {"template": written, "time": time.time()}
    path = Path(folder, FILE_NAME)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        try:
            temporary.write_text(json.dumps({"templates": known}), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / FILE_NAME).read_bytes())["templates"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
