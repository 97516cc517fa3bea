"""Programs that use a store in processes of their own, and may be killed.

They import the storage package and nothing else; see `writer_server`.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from daric_rag.storage import DiskTier, Record, RecordHeader
from daric_rag.storage.format import SegmentIdentity
from tests.storage.records import FINGERPRINT, ROOT, key
from tests.storage.writer_server import report, serve

NUM_DOCUMENTS = 300
# What `churn` does besides, in how many cycles of a thousand.
RARELY = {"": 937, "delete": 20, "pin": 20, "touch": 10, "flush": 10, "reclaim": 3}

# So that the engine reads records oftener than they are written anew.
COPY_INTERVAL_S = 0.005

# What changes the world outside the process, or waits for it.
_POINTS = frozenset(
    {
        *("close", "execute", "fdatasync", "flock", "fsync", "mkdir", "open"),
        *("rename", "rmdir", "unlink", "write"),
    }
)
# Functions that a kill is said to have hit, innermost first.
STAGES = (
    "save_uses",
    "reclaim",
    "set_pinned",
    "remove",
    "open_database",
    "reserve",
    "write_record_file",
    "publish",
)


def kv_record(number: int, num_tokens: int, parent: bytes = ROOT, index: int = 0):
    """A record whose content follows from its number."""
    identity = SegmentIdentity(key(number), parent, FINGERPRINT, index)
    header = RecordHeader.for_shape(identity, (2, num_tokens, 1, 4), "bfloat16")
    content = random.Random(number).randbytes(header.payload_len)
    return Record(header, memoryview(content))


def _die_at(point: int | None) -> Callable[[], int]:
    """End by SIGKILL just before or after a call; returns the number of calls so far.

    Unlike a kill by the clock, it can be told which code it hits and be repeated.
    """
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event not in ("c_call", "c_return") or argument.__name__ not in _POINTS:
            return
        count += 1
        if count == point:
            names = []
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            stage = next((name for name in STAGES if name in names), "other")
            if stage == "reserve" and {argument.__name__, *names} & {
                "unlink",
                "delete",
            }:
                stage = "evict"
            report(stage=stage)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)
    return lambda: count


def change(
    folder: str, capacity: int, steps: list[list[Any]], point: int | None, stay: bool
) -> None:
    """Apply `test_kill.Step`s one by one and tell of each that is done.

    Args:
        folder: The store's.
        capacity: Budget in bytes.
        steps: `[what, numbers, num_tokens]` each.
        point: Where to die, see `_die_at`.
        stay: Whether to wait for a kill when all is done.
    """
    num_points = _die_at(point)
    tier = DiskTier(folder, capacity, policy="lru")
    for what, numbers, num_tokens in steps:
        keys = [key(number) for number in numbers]
        if what == "write":
            tier.write(kv_record(numbers[0], num_tokens))
            assert tier.contains(keys[0])
        elif what == "read":
            for number, found in zip(
                numbers, tier.read_many(keys, FINGERPRINT), strict=True
            ):
                if found is not None:
                    expected = kv_record(number, found.header.num_tokens)
                    assert found.payload == expected.payload
        elif what == "delete":
            tier.delete(keys[0])
        elif what in ("pin", "unpin"):
            getattr(tier, what)(keys)
        else:
            getattr(tier, what)()
        stats = tier.stats()
        assert (stats.corrupt, stats.failed_writes) == (0, 0)
        report(done=what)
    sys.setprofile(None)
    report(points=num_points())
    while stay:
        time.sleep(1)
        report(waiting=True)  # Fails, and so ends us, if the test is no more.


def churn(
    folder: str, capacity: int, seed: int, num_cycles: int, num_warm: int
) -> None:
    """Read, write, pin and delete documents, and tell how that went.

    Args:
        folder: The store's.
        capacity: Budget in bytes.
        seed: Of the choice of documents, of which some are wanted often.
        num_cycles: Each asks for one document and stores what is missing of it.
        num_warm: After how many of them memory has stopped growing.
    """
    tier = TimedTier(DiskTier(folder, capacity))
    rng = random.Random(seed)
    pinned: list[bytes] = []
    num_writes = warm_bytes = 0
    for cycle in range(num_cycles):
        records = churned_document(int(NUM_DOCUMENTS * rng.random() ** 2))
        keys = [one.key for one in records]
        tier.call("protect", keys)
        found = tier.call("read_many", keys, FINGERPRINT)
        for one, other in zip(records, found, strict=True):
            if other is None:
                tier.call("write", one)
                num_writes += 1
            else:
                assert (other.header, other.payload) == (one.header, one.payload)
        tier.call("release", keys)
        tier.call("contains", rng.choice(keys))
        tier.call("take_evicted")
        (what,) = rng.choices(list(RARELY), RARELY.values())
        if what == "delete":
            tier.call("delete", keys[-1])
        elif what == "pin":
            tier.call("pin", keys[-1:])
            pinned.append(keys[-1])
        elif what == "touch":
            tier.call("touch", keys)
        elif what:
            tier.call(what)
        if len(pinned) > 2:
            tier.call("unpin", [pinned.pop(0)])
        if cycle == num_warm:
            warm_bytes = resident_bytes()
    growth_bytes = resident_bytes() - warm_bytes
    stats = tier.call("stats")
    tier.call("close")
    report(
        longest_s=tier.longest_s,
        growth_bytes=growth_bytes,
        writes=num_writes,
        hits=stats.hits,
        corrupt=stats.corrupt,
        failed_writes=stats.failed_writes,
    )


def copy(folder: str, capacity: int, source: str, seed: int) -> None:
    """Write another store's records over and over, until killed.

    Args:
        folder: The store's.
        capacity: Budget in bytes.
        source: The other store's folder, which nobody else uses.
        seed: Of the order.
    """
    rng = random.Random(seed)
    originals, tier = DiskTier(source, 1 << 40), DiskTier(folder, capacity)
    rows = originals.segments()
    while True:
        row = rng.choice(rows)
        if rng.random() < 0.5:
            tier.delete(row.key)
        found = originals.read(row.key, row.fingerprint)
        assert found is not None
        tier.write(found)
        report(written=row.filename)  # Fails, and so ends us, if the test is no more.
        time.sleep(COPY_INTERVAL_S)


def damage(folder: str, seed: int, interval_s: float, also_index: bool) -> None:
    """Flip random bytes of a store's files, until killed.

    Not a thread's work: a process that closes any file of SQLite's loses its locks.

    Args:
        folder: The store's.
        seed: Of the choice of bytes.
        interval_s: Between two flips.
        also_index: Whether every other flip is in the index or its journal.
    """
    rng = random.Random(seed)
    while True:
        # Looking for files takes longer than flipping a byte.
        names = file_names(folder)
        for name in rng.choices(names, k=20) if names else []:
            flip_byte(folder, name, rng)
            if also_index:
                suffix = rng.choice(("", "-wal", "-shm"))
                flip_byte(folder, "cache.db" + suffix, rng)
            time.sleep(interval_s)


def file_names(folder: str | Path) -> list[str]:
    """List files of records, unfinished ones included, relative to the folder.

    Not by `Path.glob`, which fails if a folder goes while it looks.
    """
    return [
        os.path.relpath(Path(top, name), folder)
        for top, _, names in os.walk(folder)
        for name in names
        if ".val" in name
    ]


def flip_byte(folder: str, name: str, rng: random.Random) -> None:
    """Change a random byte of a file, if it is there and has any, and tell of it."""
    with suppress(FileNotFoundError), Path(folder, name).open("r+b", 0) as file:
        offset = rng.randrange(1 + os.fstat(file.fileno()).st_size)
        if byte := os.pread(file.fileno(), 1, offset):
            flipped = byte[0] ^ rng.randrange(1, 256)
            os.pwrite(file.fileno(), bytes([flipped]), offset)
            report(flipped=name)


class TimedTier:
    """Keeps the longest time that each method took, in seconds."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.longest_s: dict[str, float] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        begun = time.perf_counter()
        result = getattr(self.tier, name)(*arguments)
        duration_s = time.perf_counter() - begun
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), duration_s)
        return result


def churned_document(number: int) -> list[Record]:
    """One to three small segments, 1 KB each on average."""
    records: list[Record] = []
    for index in range(1 + number % 3):
        parent = records[-1].key if records else ROOT
        records.append(kv_record(3 * number + index, 10 + number % 40, parent, index))
    return records


def resident_bytes() -> int:
    """This process's memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve({"change": change, "churn": churn, "copy": copy, "damage": damage})
