"""Writers killed at hundreds of points, and the index damaged byte by byte.

Whatever was stored is served, the rest goes. One writer at a time applies random steps
and tells of each that is done. A model of an LRU cache applies the same steps, so that
after a kill it is known exactly what the folder must hold: what it held after the last
step that was told, or after the next, or something on the way between the two.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

from daric_rag.storage import DiskTier
from daric_rag.storage.reclaiming import Reclaimed
from tests.storage.records import FINGERPRINT, key, record_files
from tests.storage.writer_server import WriterServer
from tests.storage.writers import STAGES, kv_record

NUM_KILLS_BY_POINT = 300
NUM_KILLS_BY_CLOCK = 100
NUM_INDEX_FLIPS = 200
NUM_KEYS = 30
# Budgets hold 4 to 20 records.
CAPACITIES = (150_000, 300_000, 600_000)
STEPS = (
    *["write"] * 10,
    *["read"] * 3,
    *["flush"] * 3,
    *("delete", "delete", "pin", "unpin", "reclaim"),
)
MAX_PINNED = 2


class Step(NamedTuple):
    """What a writer does with which records."""

    what: str
    numbers: list[int]
    num_tokens: int = 0


def num_tokens(number: int) -> int:
    """A record has 7 to 55 KB, by its number."""
    return 200 + 50 * (number * 7 % NUM_KEYS)


def size(number: int) -> int:
    return kv_record(number, num_tokens(number)).record_bytes


SIZES = {number: size(number) for number in range(NUM_KEYS)}


@dataclass
class Model:
    """What an LRU store holds.

    Attributes:
        saved: Records in the order of the uses that the index knows of.
        used: The same records in the order of their uses.
        pinned: Those that must stay.
    """

    saved: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)

    def removed_by(self, step: Step, capacity: int) -> list[int]:
        """The records that a step removes first, in this order."""
        if step.what == "delete":
            return [number for number in step.numbers if number in self.used]
        if step.what != "write" or step.numbers[0] in self.used:
            return []
        excess = sum(SIZES[n] for n in [*self.used, *step.numbers]) - capacity
        removed = []
        for number in self.used:
            if excess > 0 and number not in self.pinned:
                removed.append(number)
                excess -= SIZES[number]
        assert excess <= 0
        return removed

    def without(self, removed: list[int]) -> "Model":
        return Model(
            [number for number in self.saved if number not in removed],
            [number for number in self.used if number not in removed],
            self.pinned.difference(removed),
        )

    def after(self, step: Step, capacity: int) -> "Model":
        model = self.without(self.removed_by(step, capacity))
        if step.what == "write" and step.numbers[0] not in model.used:
            model.saved.append(step.numbers[0])
            model.used.append(step.numbers[0])
        elif step.what == "read":
            for number in step.numbers:
                if number in model.used:
                    model.used.remove(number)
                    model.used.append(number)
        elif step.what == "flush":
            model.saved = list(model.used)
        elif step.what == "pin":
            model.pinned |= set(step.numbers).intersection(model.used)
        elif step.what == "unpin":
            model.pinned -= set(step.numbers)
        return model

    def on_disk(self) -> tuple[list[int], set[int]]:
        """What the next process finds: records in their order, and which are pinned."""
        return self.saved, self.pinned


def random_steps(rng: random.Random, num_steps: int, pinned: set[int]) -> list[Step]:
    steps = []
    pinned = set(pinned)
    for _ in range(num_steps):
        what = rng.choice(STEPS)
        number = rng.randrange(NUM_KEYS)
        if what == "pin":
            if len(pinned) >= MAX_PINNED:
                continue
            pinned.add(number)
        elif what == "unpin":
            number = rng.choice(sorted(pinned)) if pinned else number
            pinned.discard(number)
        if what in ("flush", "reclaim"):
            steps.append(Step(what, []))
        elif what == "read":
            steps.append(Step(what, rng.sample(range(NUM_KEYS), 3)))
        else:
            steps.append(Step(what, [number], num_tokens(number)))
    return steps


def bytes_of_files(folder) -> int:
    """Of finished and unfinished records."""
    return sum(path.stat().st_size for path in folder.glob("??/??/*"))


@dataclass
class Run:
    """A folder, what it must hold, and what the kills so far have hit."""

    folder: object
    server: WriterServer
    model: Model = field(default_factory=Model)
    seen: Counter = field(default_factory=Counter)

    def kill(self, capacity, steps, *, point=None, delay_s=None) -> bool:
        """Start a writer, kill it, and check what it left; False if it was faster."""
        bytes_before = bytes_of_files(self.folder)
        arguments = {
            "folder": str(self.folder),
            "capacity": capacity,
            "steps": steps,
            "point": point,
            "stay": delay_s is not None,
        }
        (pid,) = self.server.start("change", arguments)
        if delay_s is not None:
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
        reports = list(self.server.reports())
        killed = reports[-1]["status"] == -signal.SIGKILL
        assert killed or reports[-1]["status"] == 0, reports
        assert not [told for told in reports if "warning" in told]
        self.seen.update(told["stage"] for told in reports if "stage" in told)
        num_done = sum("done" in told for told in reports)
        assert bytes_of_files(self.folder) <= max(capacity, bytes_before)
        for step in steps[:num_done]:
            self.model = self.model.after(step, capacity)
        is_amidst = killed and num_done < len(steps)
        step = steps[num_done] if is_amidst else Step("nothing", [])
        self.check(step, capacity=capacity)
        return killed

    def check(self, step, *, capacity) -> None:
        """Open the store that was left in the midst of a step, or before it."""
        self.seen["temporary"] += len(list(self.folder.glob("??/??/*.tmp")))
        with closing(DiskTier(self.folder, capacity, policy="lru")) as tier:
            rows = tier.segments()
            lost = {r.key for r in rows if not (self.folder / r.filename).exists()}
            self.seen["lost"] += len(lost)
            # Opening gives back all that a dead writer had begun.
            left = tier.reclaim(dry_run=True)
            assert replace(left, nbytes=0) == Reclaimed(rows=len(lost))
            removed = self.model.removed_by(step, capacity)
            if lost:
                # Killed between their files' deletion and the transaction's end.
                assert lost <= {key(number) for number in removed}
                possible = [self.model.without([n for n in removed if key(n) in lost])]
                assert len(rows) == len(self.model.saved)
                tier.reclaim()
                rows = tier.segments()
            else:
                possible = [
                    self.model,
                    self.model.without(removed),
                    self.model.after(step, capacity),
                ]
            held = tier.keys()
            numbers = [int.from_bytes(one, "big") for one in held]
            pinned = {int.from_bytes(row.key, "big") for row in rows if row.pinned}
            assert (numbers, pinned) in [model.on_disk() for model in possible]
            assert record_files(self.folder) == sorted(
                self.folder / row.filename for row in rows
            )
            assert list((self.folder / "writers").glob("*")) == []
            for number in numbers:  # In this order, which reading so leaves as it is.
                found = tier.read(key(number), FINGERPRINT)
                assert found is not None
                assert found.payload == kv_record(number, num_tokens(number)).payload
            assert tier.stats().corrupt == 0
        self.model = Model(numbers, list(numbers), pinned)


@pytest.fixture
def run(folder):
    with WriterServer() as server:
        yield Run(folder, server)


def test_kills_at_known_points(run, caplog):
    """Before and after each call that changes or asks anything outside the process."""
    rng = random.Random(20)
    num_kills = 0
    while num_kills < NUM_KILLS_BY_POINT:
        steps = random_steps(rng, 12, run.model.pinned)
        # Opening takes 160 to 190 points, and a step 30 on average.
        point = rng.randrange(1, 190) if rng.random() < 0.1 else rng.randrange(160, 500)
        num_kills += run.kill(rng.choice(CAPACITIES), steps, point=point)

    assert not caplog.records
    assert all(run.seen[stage] for stage in (*STAGES, "evict")), run.seen
    assert run.seen["lost"] > 0  # A transaction was cut off that evicts.
    assert run.seen["temporary"] > 0


def test_kills_by_the_clock(run, caplog):
    """Anywhere, also in the middle of a call."""
    rng = random.Random(21)
    for _ in range(NUM_KILLS_BY_CLOCK):
        steps = random_steps(rng, 100, run.model.pinned)
        capacity = rng.choice(CAPACITIES)
        assert run.kill(capacity, steps, delay_s=rng.uniform(0.0, 0.08))

    assert not caplog.records


def test_any_byte_of_the_index_may_change(folder, tmp_path):
    """Right bytes or a miss, never an exception, and saving goes on."""
    numbers, new_numbers = range(20), range(20, 25)
    with closing(DiskTier(folder, 600_000)) as tier:
        for number in numbers:
            tier.write(kv_record(number, 20))
        tier.pin([key(3)])
    rng = random.Random(22)
    for attempt in range(NUM_INDEX_FLIPS):
        copy = tmp_path / str(attempt)
        shutil.copytree(folder, copy)
        content = bytearray((copy / "cache.db").read_bytes())
        position = rng.randrange(len(content))
        content[position] ^= rng.randrange(1, 256)
        (copy / "cache.db").write_bytes(content)
        for _ in range(2):
            with closing(DiskTier(copy, 600_000)) as tier:
                for number in new_numbers:
                    tier.write(kv_record(number, 20))
                for number in (*numbers, *new_numbers):
                    found = tier.read(key(number), FINGERPRINT)
                    expected = kv_record(number, 20).payload
                    assert found is None or found.payload == expected
                assert found is not None, position
        shutil.rmtree(copy)
