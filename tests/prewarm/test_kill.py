"""kill -9 at any moment: what was done stays done, and nothing is missing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from daric_rag.prewarm import Manifest
from tests.prewarm.killed import TEXTS

REPOSITORY = Path(__file__).parents[2]
NUM_KILLS = 20
NEVER = 10**6


def run(folder: Path, points: list[int]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.prewarm.killed", folder, *map(str, points)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("seed", range(3))
def test_killed_jobs_end_as_a_clean_one_does(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    points = [chance.randint(1, 12) for _ in range(NUM_KILLS)]
    ends = run(tmp_path, [*points, NEVER])
    assert ends[-1] == "0"
    num_kills = ends.count("killed")
    assert num_kills >= NUM_KILLS // 2
    store = tmp_path / "store"
    assert sorted(path.read_text() for path in store.iterdir()) == sorted(TEXTS)
    manifest = Manifest(tmp_path / "m.jsonl")
    entries = list(manifest.entries())
    assert manifest.num_damaged == 0
    assert Counter(entry.id for entry in entries) == {
        f"item {number}": 1 for number in range(len(TEXTS))
    }
    assert all(entry.is_stored for entry in entries)
    computed = (tmp_path / "store.log").read_bytes().count(b"x")
    # At the moment of a kill one document per batch is begun and not stored.
    assert len(TEXTS) <= computed <= len(TEXTS) + 2 * num_kills


@pytest.mark.parametrize("point", range(1, 15))
def test_the_first_batches_can_be_killed_at_every_point(
    tmp_path: Path, point: int
) -> None:
    assert run(tmp_path, [point, NEVER]) == ["killed", "0"]
    stored = [path.read_text() for path in (tmp_path / "store").iterdir()]
    assert sorted(stored) == sorted(TEXTS)
    assert len(list(Manifest(tmp_path / "m.jsonl").entries())) == len(TEXTS)
