"""Four processes write at once; an observer who counts every byte sees no excess."""

import pytest

from tests.storage.records import (
    RECORD_BYTES,
    disk_usage,
    key,
    payload,
    read,
    start_elsewhere,
)

_BUDGET = 12 * RECORD_BYTES

# Keys overlap between processes: some records are written twice, some are used where
# others evict them, and lengths differ.
_WORK = """
import random
chance = random.Random(SEED)
for _ in range(150):
    number = chance.randrange(60)
    tier.write(record(number, num_tokens=1 + number % 5))
    found = tier.read(key(chance.randrange(60)), FINGERPRINT)
    tokens = None if found is None else found.header.num_tokens
    if found is not None:
        content = payload(int.from_bytes(found.key), num_tokens=tokens)
        assert found.payload == content
stats = tier.stats()
tier.close()
print(stats.corrupt, stats.failed_writes, stats.evicted, stats.hits)
"""


@pytest.mark.parametrize("num_killed", [0, 2])
def test_four_writers_never_exceed_the_budget(open_disk, folder, num_killed):
    writers = [
        start_elsewhere(folder, f"SEED = {seed}\n" + _WORK, _BUDGET)
        for seed in range(4)
    ]
    largest = 0
    while any(writer.poll() is None for writer in writers):
        largest = max(largest, disk_usage(folder))
        if largest > _BUDGET // 2:
            for writer in writers[:num_killed]:
                writer.kill()
    outputs = [writer.communicate()[0].split() for writer in writers]

    assert _BUDGET // 2 < largest <= _BUDGET
    for output in outputs:
        if output:  # Those that were killed print nothing.
            corrupt, failed, evicted, hits = map(int, output)
            assert (corrupt, failed) == (0, 0)
            assert evicted > 10
            assert hits > 10
    tier = open_disk(_BUDGET)
    assert tier.nbytes == disk_usage(folder) <= _BUDGET
    for one in list(tier.keys()):
        number = int.from_bytes(one)
        assert read(tier, number) == payload(number, num_tokens=1 + number % 5)
    assert tier.stats().misses == 0
    assert not tier.contains(key(999))
