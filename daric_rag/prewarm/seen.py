"""Which documents are done and which came before, on disk and not in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, Self

from daric_rag.prewarm.manifest import Entry, Status
from daric_rag.prewarm.sharding import TextHash

__all__ = ["Known", "SeenDocuments"]

_SCHEMA: Final = """
CREATE TABLE documents (
    hash BLOB PRIMARY KEY, id BLOB, document TEXT, expires REAL, place BLOB,
    seen INTEGER, number INTEGER
) WITHOUT ROWID;
CREATE INDEX by_id ON documents (id);
CREATE INDEX by_place ON documents (place);
CREATE TABLE refused (id BLOB PRIMARY KEY, why TEXT) WITHOUT ROWID;
"""


_REFUSED: Final = ("failed", "skipped")


class Known(Enum):
    """What is known of a document that a source yields."""

    NEW = "new"
    DONE = "done"  # by an earlier run
    REPEATED = "repeated"  # in this run


class SeenDocuments:
    """Documents by the hash of their text. For one thread.

    A database in a temporary file of SQLite's own: a job over a million documents
    takes no more memory than one over ten.
    """

    def __init__(self) -> None:
        # An empty name is a private file that is gone with the connection.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(_SCHEMA)
        # Nothing has to outlive this process: no transaction ever ends.
        self._database.execute("BEGIN")
        self._num_put = self._doubted_until = 0

    def load(self, history: Iterable[Entry | None]) -> None:
        """Take over what earlier runs did; a later entry counts more.

        Args:
            history: See `Manifest.history`.
        """
        for entry in history:
            if entry is None:
                # It may have said that any of those before it is gone.
                self._doubted_until = self._num_put
                continue
            self._note(entry)
            if not entry.hash:
                continue
            if entry.is_stored:
                self._put(entry, seen=False)
            else:
                # A document that fails now was lost, whatever was said before.
                self._database.execute(
                    "DELETE FROM documents WHERE hash = ?", (bytes.fromhex(entry.hash),)
                )

    def visit(self, name: TextHash, document_id: str, place: str = "") -> Known:
        """Say what is known of a document, and remember that it came."""
        found = self._database.execute(
            "SELECT seen, number FROM documents WHERE hash = ?", (name,)
        ).fetchone()
        is_doubted = found is not None and found[1] < self._doubted_until
        if found is None or (is_doubted and not found[0]):
            came = Entry(document_id, "hit", name.hex(), place=place)
            self._put(came, seen=True)
            return Known.NEW
        self._database.execute("UPDATE documents SET seen = 1 WHERE hash = ?", (name,))
        return Known.REPEATED if found[0] else Known.DONE

    def move(self, name: TextHash, document_id: str, place: str) -> Entry | None:
        """Note what a known document is called now, and where it is.

        Returns:
            What is to be written down; None if it is where it was.
        """
        called = _packed(document_id), _packed(place)
        was_id, was_place, document, expires = self._database.execute(
            "SELECT id, place, document, expires FROM documents WHERE hash = ?", (name,)
        ).fetchone()
        if (was_id, was_place) == called:
            return None
        self._database.execute(
            "UPDATE documents SET id = ?, place = ? WHERE hash = ?", (*called, name)
        )
        return Entry(
            document_id, "hit", name.hex(), document, expires=expires, place=place
        )

    def saw(self, name: TextHash) -> None:
        """Remember that a document came that is not to be computed here."""
        self._database.execute("UPDATE documents SET seen = 1 WHERE hash = ?", (name,))

    def is_told(self, entry: Entry) -> bool:
        """Whether the last word on a document is the same: it is not stored, and why.

        Unless its text is called stored, under whichever name.
        """
        if entry.status not in _REFUSED:
            return False
        found = self._database.execute(
            "SELECT 1 FROM refused WHERE id = ? AND why = ? AND NOT EXISTS "
            "(SELECT 1 FROM documents WHERE hash = ? AND document != '')",
            (_packed(entry.id), _why(entry), bytes.fromhex(entry.hash)),
        ).fetchone()
        return found is not None

    def learn(self, entry: Entry) -> None:
        """Take notice of what a document of this run is stored as, or why it is not."""
        self._note(entry)
        if entry.is_stored:
            self._database.execute(
                "UPDATE documents SET document = ? WHERE hash = ?",
                (entry.document, bytes.fromhex(entry.hash)),
            )

    def keep(self, document_id: str, place: str = "") -> None:
        """A document of this name, or place, could not be read now and is there."""
        self._database.execute(
            "UPDATE documents SET seen = 1 WHERE id = ? OR place = ?",
            # NULL is no place's equal.
            (_packed(document_id), _packed(place) if place else None),
        )

    def stored(self) -> Iterator[Entry]:
        """Yield all that earlier runs did."""
        return self._select("document != ''", "hit")

    def vanished(self) -> Iterator[Entry]:
        """Yield what earlier runs did and this one's source did not have.

        Texts that differ may have the same tokens: what is stored for them stays as
        long as one of them does.
        """
        return self._select(f"NOT seen AND {_no_other('seen')}", "removed")

    def expired(self, now: float) -> Iterator[Entry]:
        """Yield what earlier runs did and has had its time, for all texts it is of.

        Args:
            now: In seconds since 1970.
        """
        others = _no_other("(expires IS NULL OR expires > ?)")
        return self._select(f"expires <= ? AND {others}", "removed", now, now)

    def __len__(self) -> int:
        """Return how many there are."""
        row = self._database.execute("SELECT count(*) FROM documents").fetchone()
        return int(row[0])

    def close(self) -> None:
        """Forget everything; harmless when repeated."""
        self._database.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _note(self, entry: Entry) -> None:
        name = _packed(entry.id)
        if entry.status in _REFUSED:
            self._database.execute(
                "INSERT OR REPLACE INTO refused VALUES (?, ?)", (name, _why(entry))
            )
        else:
            self._database.execute("DELETE FROM refused WHERE id = ?", (name,))

    def _select(
        self, condition: str, status: Status, *values: float
    ) -> Iterator[Entry]:
        rows = self._database.execute(
            f"SELECT hash, id, document, place FROM documents WHERE {condition} "
            f"ORDER BY id",
            values,
        )
        for name, document_id, document, place in rows:
            yield Entry(
                _unpacked(document_id),
                status,
                name.hex(),
                document,
                place=_unpacked(place),
            )

    def _put(self, entry: Entry, *, seen: bool) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                bytes.fromhex(entry.hash),
                _packed(entry.id),
                entry.document,
                entry.expires,
                _packed(entry.place),
                int(seen),
                self._num_put,
            ),
        )
        self._num_put += 1


def _why(entry: Entry) -> str:
    return repr((entry.status, entry.hash, entry.error))


def _no_other(condition: str) -> str:
    return (
        f"document NOT IN (SELECT document FROM documents "
        f"WHERE {condition} AND document IS NOT NULL)"
    )


def _packed(document_id: str) -> bytes:
    # Names of files may hold half a character, which SQLite's text may not.
    return document_id.encode(errors="surrogatepass")


def _unpacked(packed: bytes) -> str:
    return packed.decode(errors="surrogatepass")
