"""Writing behind: in order, at most so much, and loads before saves."""

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from daric_rag.errors import StoreError
from daric_rag.storage.io_pool import WriteBehind
from daric_rag.storage.read_pool import ReadPool
from tests.storage.records import RECORD_BYTES, key, keys, record


class Sink:
    """Keeps what was written, while its gate is open."""

    def __init__(self):
        self.written = []
        self.held = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.exited = threading.Event()

    def write(self, one):
        self.started.set()
        assert self.gate.wait(30)
        if one.header.segment_index == 7:
            raise OSError("a defect")
        self.written.append(one.key)


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def open_queue(sink):
    opened = []

    def open_one(num_records=100, **options):
        queue = WriteBehind(
            sink.write,
            max_pending_bytes=num_records * RECORD_BYTES,
            on_exit=sink.exited.set,
            hold=sink.held.update,
            release=sink.held.subtract,
            **options,
        )
        opened.append(queue)
        return queue

    yield open_one
    sink.gate.set()
    for queue in opened:
        queue.close()


def submit(queue, number, timeout_s=0.01, **fields):
    return queue.submit(record(number, **fields), timeout_s=timeout_s)


def test_records_are_written_in_order(open_queue, sink):
    queue = open_queue()
    for number in range(20):
        assert submit(queue, number)
    queue.flush()
    assert sink.written == keys(*range(20))
    assert queue.queued() == (0, 0)


def test_a_queued_key_is_not_queued_twice(open_queue, sink):
    queue = open_queue()
    sink.gate.clear()
    assert submit(queue, 1)
    assert submit(queue, 1)
    assert queue.queued() == (1, RECORD_BYTES)
    sink.gate.set()
    queue.flush()
    assert sink.written == keys(1)


def test_a_full_queue_gives_up_until_there_is_room(open_queue, sink):
    queue = open_queue(2)
    sink.gate.clear()
    assert submit(queue, 1)
    assert submit(queue, 2)
    assert not submit(queue, 3)
    assert not submit(queue, 4, timeout_s=3600)  # Nobody waits a second time.

    sink.gate.set()
    queue.flush()

    assert submit(queue, 5, timeout_s=3600)
    queue.flush()
    assert sink.written == keys(1, 2, 5)


def test_a_patient_writer_waits_however_congested_it_is(open_queue, sink):
    queue = open_queue(1)
    sink.gate.clear()
    assert submit(queue, 1)
    assert not submit(queue, 2)
    threading.Timer(0.05, sink.gate.set).start()
    assert submit(queue, 3, timeout_s=None)
    queue.flush()
    assert sink.written == keys(1, 3)


def test_one_record_may_exceed_the_queue(open_queue, sink):
    queue = open_queue(0)
    assert submit(queue, 1)
    queue.flush()
    assert sink.written == keys(1)


def test_keys_are_held_while_they_are_queued(open_queue, sink):
    queue = open_queue()
    sink.gate.clear()
    for number in (1, 2, 2, 3):
        submit(queue, number, index=7 if number == 3 else 0)
    queue.cancel(key(2))
    assert +sink.held == Counter(keys(1, 3))

    sink.gate.set()
    queue.flush()  # 3 fails, and is let go all the same.

    assert not +sink.held
    assert not -sink.held


def test_a_failing_write_is_counted_and_the_next_one_succeeds(open_queue, sink, caplog):
    queue = open_queue()
    submit(queue, 1, index=7)
    submit(queue, 2)
    queue.flush()
    assert queue.failures == len(caplog.records) == 1
    assert sink.written == keys(2)


def test_cancelling_waits_for_what_is_being_written(open_queue, sink):
    queue = open_queue()
    sink.gate.clear()
    submit(queue, 1)
    submit(queue, 2)
    assert sink.started.wait(30)
    threading.Timer(0.05, sink.gate.set).start()

    queue.cancel(key(1))
    assert sink.written[:1] == keys(1)

    queue.flush()
    assert queue.find(key(1)) is None


def test_no_write_starts_while_a_read_is_in_progress(open_queue, sink):
    queue = open_queue(max_yield_s=3600)
    with queue.reading():
        submit(queue, 1)
        with queue.reading():
            time.sleep(0.05)
        time.sleep(0.05)
        assert not sink.started.is_set()
        assert queue.find(key(1)) is not None
    assert sink.started.wait(30)


def test_reads_without_end_do_not_starve_writes(open_queue, sink):
    queue = open_queue(max_yield_s=0.01)
    with queue.reading():
        submit(queue, 1)
        assert sink.started.wait(30)


def test_a_half_full_queue_does_not_wait_for_reads(open_queue, sink):
    queue = open_queue(4, max_yield_s=3600)
    with queue.reading():
        for number in range(3):
            submit(queue, number)
        assert sink.started.wait(30)


@pytest.mark.parametrize(
    "demand",
    [
        lambda queue: queue.flush(),
        lambda queue: queue.wait_for(key(1)),
        lambda queue: queue.close(),
    ],
)
def test_whoever_waits_for_a_write_does_not_wait_for_reads(open_queue, sink, demand):
    queue = open_queue(max_yield_s=3600)
    with queue.reading():
        submit(queue, 1)
        demand(queue)
        assert sink.written == keys(1)


def test_cancelling_during_a_read_leaves_a_working_queue(open_queue, sink):
    queue = open_queue(max_yield_s=0.01)
    with queue.reading():
        submit(queue, 1)
        queue.cancel(key(1))
    submit(queue, 2)
    queue.flush()
    assert key(2) in sink.written


def test_closing_writes_what_waits_and_ends_the_thread(open_queue, sink):
    queue = open_queue()
    for number in range(5):
        submit(queue, number)
    queue.close()
    queue.close()
    assert sink.written == keys(*range(5))
    assert sink.exited.is_set()
    with pytest.raises(StoreError, match="closed"):
        submit(queue, 9)


def test_idle_work_needs_no_write_and_survives_a_defect(open_queue, sink, caplog):
    done = []
    is_done = threading.Event()

    def work():
        done.append(threading.current_thread())
        if len(done) == 1:
            raise OSError("a defect")
        is_done.set()

    queue = open_queue(on_idle=work, idle_interval_s=0.001)
    queue.start()
    queue.start()
    assert is_done.wait(30)
    submit(queue, 1)
    queue.flush()
    queue.close()

    assert sink.written == keys(1)
    assert set(done) == {done[0]} != {threading.current_thread()}
    assert len(caplog.records) == 1
    assert queue.failures == 0


def test_no_thread_is_started_after_the_end(open_queue, sink):
    queue = open_queue()
    queue.close()
    queue.start()
    queue.close()
    assert not sink.exited.is_set()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_pool_answers_in_order(num_threads):
    pool = ReadPool(num_threads)
    assert pool.map(lambda item: item * item, range(50)) == [n * n for n in range(50)]
    pool.close()
    assert pool.map(str, [1, 2]) == ["1", "2"]
    pool.close()


def test_a_pool_works_side_by_side():
    barrier = threading.Barrier(3)
    pool = ReadPool(3)
    assert len(set(pool.map(lambda _: barrier.wait(30), range(3)))) == 3
    pool.close()


def test_a_forked_child_waits_for_nothing_and_writes_nothing(tmp_path):
    entered, leave = threading.Event(), threading.Event()

    def write(one):
        entered.set()
        leave.wait(30)

    writer = WriteBehind(
        write,
        max_pending_bytes=10 * RECORD_BYTES,
        on_exit=lambda: None,
        hold=lambda keys: None,
        release=lambda keys: None,
    )
    writer.submit(record(1), timeout_s=None)
    entered.wait(30)
    child = os.fork()
    if child == 0:
        try:
            took = writer.submit(record(2), timeout_s=None)
            writer.flush()
            writer.close()
            os._exit(3 if took else 0)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    leave.set()
    writer.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert writer.queued() == (0, 0)


def test_a_pool_that_is_closed_meanwhile_still_answers():
    pool = ReadPool(2)

    for _ in range(50):
        with ThreadPoolExecutor(2) as both:
            answers = [
                both.submit(pool.map, lambda n: 2 * n, [1, 2, 3]),
                both.submit(pool.close),
            ]
        assert answers[0].result() == [2, 4, 6]
