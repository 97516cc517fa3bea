"""HTTP in a thread of its own: an event loop, one task per request, kept connections.

Requests are tried again only while nothing of an answer has arrived: where no
connection came about or it broke before the response, and where the server said that
it is too busy. What ends a task closes its connection, and vLLM aborts the request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from daric_rag.errors import DaricError, EngineClosedError, EngineError
from daric_rag.runtime.client import refuse_fork
from daric_rag.runtime.remote_errors import BUSY_STATUSES, ServerErrors, shown_cause
from daric_rag.runtime.remote_retry import Backoff
from daric_rag.runtime.remote_wire import AnswerReader, EventDecoder
from daric_rag.runtime.request_stream import RequestStream

__all__ = ["RemoteLoop", "RemoteRequest"]

# More wait here: a connection is a file, of which a process may have a thousand.
_MAX_RUNNING = 128

# Silence of what needs no model, in seconds: others may wait for the answer, too.
_ASK_TIMEOUT_S = 30.0

# Of a request that has no response yet: nothing of an answer can be lost by another
# try. One that the server is silent about is not repeated: it may be at work.
_BROKEN = (httpx.ConnectTimeout, httpx.NetworkError, httpx.RemoteProtocolError)


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A request as it goes over the wire.

    Attributes:
        body: JSON.
        headers: Beside the client's own.
        reader: Of its answer.
    """

    body: bytes
    headers: Mapping[str, str]
    reader: AnswerReader


class RemoteLoop:
    """Client process. The only thread to touch the connections of one engine.

    Args:
        client: Closed here.
        errors: Of the server.
        backoff: Between tries.
    """

    def __init__(
        self, client: httpx.AsyncClient, errors: ServerErrors, backoff: Backoff
    ) -> None:
        """Start the thread."""
        self._client, self._errors, self._backoff = client, errors, backoff
        self._ask_errors = errors.within(_ASK_TIMEOUT_S)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing = False
        # Not the pool of connections, where asking for ids would wait behind answers.
        self._slots = asyncio.Semaphore(_MAX_RUNNING)
        self._running: dict[RequestStream, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name="daric-remote", daemon=True
        )
        self._thread.start()

    def check_process(self) -> None:
        """See `client.refuse_fork`."""
        refuse_fork(self._pid, "RemoteEngine")

    def check_open(self) -> None:
        """Raise `EngineClosedError` unless requests are still taken."""
        with self._opened():
            pass

    def submit(self, stream: RequestStream, request: RemoteRequest) -> None:
        """Send a request; its stream hears back.

        Raises:
            EngineClosedError: The engine is closed.
        """
        stream.on_abort(lambda: self._post(lambda: self._abort(stream), quiet=True))
        self._post(lambda: self._begin(stream, request))

    def ask(
        self, method: str, path: str, content: Any = None, *, optional: bool = False
    ) -> Any:
        """Return the JSON that the server answers; for any thread but the loop's.

        Args:
            method: Of HTTP.
            path: Below the server's address.
            content: To be sent as JSON; None to send nothing.
            optional: Whether a path that is not there gives None.

        Raises:
            DaricError: See `ServerErrors`.
        """
        with self._opened():
            answer = self._ask(method, path, content, optional)
            asked = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            asked.cancel()
            # It holds its error, whose traceback holds this frame and its callers'.
            del asked

    def stop(self) -> None:
        """Have running requests and the thread end, without waiting for it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        """End running requests and the thread; harmless when repeated.

        In a forked child, where there is no thread, it does nothing.
        """
        if os.getpid() != self._pid:
            return
        self.stop()
        # A garbage collection in the loop's own thread may end up here.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, command: Callable[[], object], *, quiet: bool = False) -> None:
        try:
            with self._opened():
                self._loop.call_soon_threadsafe(command)
        except EngineClosedError:
            if not quiet:
                raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Hold the loop open, so that no command arrives when it is gone."""
        # Before the lock, which nobody may give back in a fork.
        self.check_process()
        with self._lock:
            if self._closing:
                raise _closed()
            yield

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()

    def _begin(self, stream: RequestStream, request: RemoteRequest) -> None:
        if not stream.done:
            task = self._loop.create_task(self._answer(stream, request))
            self._running[stream] = task
            task.add_done_callback(lambda _: self._ended(stream))

    def _ended(self, stream: RequestStream) -> None:
        del self._running[stream]
        # Cancelled, maybe before it began: all else the stream has heard by now.
        stream.fail(_closed())

    def _abort(self, stream: RequestStream) -> None:
        # Somebody may wait for it in another thread.
        stream.fail(EngineClosedError("the request was aborted by its client"))
        if stream in self._running:
            self._running[stream].cancel()

    async def _answer(self, stream: RequestStream, request: RemoteRequest) -> None:
        """Run a request to its end, whatever that is; the stream hears of it."""
        try:
            async with self._slots:
                await self._read(stream, request)
        except DaricError as error:
            stream.fail(error)
        except Exception as error:
            failure = EngineError(f"the answer could not be read: {error!r}")
            failure.__cause__ = error
            stream.fail(failure)

    async def _read(self, stream: RequestStream, request: RemoteRequest) -> None:
        reader, decoder = request.reader, EventDecoder()
        headers = {"content-type": "application/json", **request.headers}
        sent = self._client.build_request(
            "POST", "/v1/completions", content=request.body, headers=headers
        )
        async with self._response(sent, self._errors) as response:
            try:
                async for piece in response.aiter_bytes():
                    for data in decoder.feed(piece):
                        for output in reader.take(data):
                            stream.feed(output)
            except httpx.HTTPError as error:
                if not reader.is_complete:
                    raise self._errors.of_transport(error) from error
        for output in reader.end():
            stream.feed(output)

    async def _ask(self, method: str, path: str, content: Any, optional: bool) -> Any:
        errors = self._ask_errors
        silence = httpx.Timeout(errors.timeout_s, connect=self._client.timeout.connect)
        request = self._client.build_request(
            method, path, json=content, timeout=silence
        )
        statuses = (200, 404) if optional else (200,)
        async with self._response(request, errors, statuses) as response:
            if response.status_code == 404:
                return None
            try:
                body = await response.aread()
            except httpx.HTTPError as error:
                raise errors.of_transport(error) from error
        try:
            return json.loads(body)
        except ValueError:
            raise self._errors.of_protocol(
                "answered something else than JSON"
            ) from None

    @contextlib.asynccontextmanager
    async def _response(
        self,
        request: httpx.Request,
        errors: ServerErrors,
        statuses: tuple[int, ...] = (200,),
    ) -> AsyncIterator[httpx.Response]:
        """Yield the response to read from, of one of these statuses."""
        num_tried = 0
        while True:
            num_tried += 1
            try:
                response = await self._client.send(request, stream=True)
            except httpx.HTTPError as error:
                wait_s = self._backoff.wait_s(num_tried)
                if wait_s is None or not isinstance(error, _BROKEN):
                    raise errors.of_transport(error) from shown_cause(error)
            else:
                wait_s = None
                if response.status_code in BUSY_STATUSES:
                    asked = response.headers.get("retry-after")
                    wait_s = self._backoff.wait_s(num_tried, asked)
                if wait_s is None:
                    break
                await response.aclose()
            await asyncio.sleep(wait_s)
        try:
            if response.status_code not in statuses:
                raise await self._error_of(response)
            yield response
        finally:
            await response.aclose()

    async def _error_of(self, response: httpx.Response) -> DaricError:
        try:
            body = await response.aread()
        except httpx.HTTPError:
            body = b""
        return self._errors.of_response(response.status_code, body)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed; open a new RemoteEngine")
