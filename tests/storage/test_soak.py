"""Four processes on one folder for 10,000 cycles: nothing grows, nobody waits long."""

import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from daric_rag.storage import DiskTier
from daric_rag.storage.reclaiming import Reclaimed
from tests.storage.records import record_files
from tests.storage.writer_server import WriterServer
from tests.storage.writers import file_names

NUM_PROCESSES = 4
NUM_CYCLES = 2500  # of each
CAPACITY_BYTES = 200 * 1100  # 200 records, on average
LOOK_INTERVAL_S = 0.01

# What a process may grow by after its first 40 %: one forgotten record, or 256 bytes
# of anything else, in each of the cycles to follow would be more; at most 128 KB were
# seen. What `flush` forgets does not show, with one in 100 cycles: see `test_uses`.
NUM_WARM = NUM_CYCLES * 2 // 5
MAX_GROWTH_BYTES = (NUM_CYCLES - NUM_WARM) << 8
# SQLite begins its journal anew only when nobody happens to read it.
MAX_INDEX_BYTES = 64 << 20
MAX_CALL_S = 2.0


@dataclass
class Observer:
    """Watches a folder from outside.

    Attributes:
        most_bytes: Largest sum of record files, unfinished ones included.
        most_index_bytes: The same of the index with its journal.
        num_looks: How often it looked.
    """

    folder: Path
    most_bytes: int = 0
    most_index_bytes: int = 0
    num_looks: int = 0

    def look(self) -> None:
        """Weigh the files that were there at one moment.

        No name is ever used again, so what is seen before and after was there between;
        a file and its successor are never counted as if they were there together.
        """
        before, after = self._sizes(), self._sizes()
        together = sum(before[name] for name in before.keys() & after.keys())
        self.most_bytes = max(self.most_bytes, together)
        index = 0
        for path in self.folder.glob("cache.db*"):
            with suppress(FileNotFoundError):
                index += path.stat().st_size
        self.most_index_bytes = max(self.most_index_bytes, index)
        self.num_looks += 1

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for name in file_names(self.folder):
            with suppress(FileNotFoundError):
                sizes[name.removesuffix(".tmp")] = (self.folder / name).stat().st_size
        return sizes


def churn(server, observer, tier) -> list[dict]:
    """Run all processes, watch the folder meanwhile, and return their reports."""
    common = {
        "folder": str(observer.folder),
        "capacity": CAPACITY_BYTES,
        "num_cycles": NUM_CYCLES,
        "num_warm": NUM_WARM,
    }
    server.start("churn", *(common | {"seed": seed} for seed in range(NUM_PROCESSES)))
    reports: list[dict] = []
    listener = threading.Thread(target=lambda: reports.extend(server.reports()))
    listener.start()
    most_row_bytes = 0
    while listener.is_alive():
        observer.look()
        rows = tier.segments()
        most_row_bytes = max(most_row_bytes, sum(row.nbytes for row in rows))
        time.sleep(LOOK_INTERVAL_S)
    listener.join()
    assert most_row_bytes <= CAPACITY_BYTES
    return reports


@pytest.mark.usefixtures("all_cpus")
def test_soak(folder):
    observer = Observer(folder)
    with closing(DiskTier(folder, CAPACITY_BYTES)) as tier, WriterServer() as server:
        reports = churn(server, observer, tier)

        ends = [told["status"] for told in reports if "status" in told]
        assert ends == [0] * NUM_PROCESSES
        assert not [told["warning"] for told in reports if "warning" in told]
        for told in (told for told in reports if "hits" in told):
            assert told["hits"] > NUM_CYCLES / 2
            assert told["writes"] > NUM_CYCLES / 2
            assert (told["corrupt"], told["failed_writes"]) == (0, 0)
            assert told["growth_bytes"] < MAX_GROWTH_BYTES
            # It looks at every file and holds no lock; the others must not wait for it.
            del told["longest_s"]["reclaim"]
            assert max(told["longest_s"].values()) < MAX_CALL_S, told
        assert observer.num_looks > 100
        assert 0.9 * CAPACITY_BYTES < observer.most_bytes <= CAPACITY_BYTES
        assert observer.most_index_bytes < MAX_INDEX_BYTES

        # Nothing was left behind, and every row has its file.
        assert tier.reclaim() == Reclaimed()
        rows = tier.segments()
        assert record_files(folder) == sorted(folder / row.filename for row in rows)
        assert list((folder / "writers").glob("*")) == []
