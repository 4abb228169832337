"""Background responses, and streams of their stored frames."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from config.errors import Overloaded
from config.fair_threads import current_client
from config.json_text import Json
from server.http.access_log import RequestRecord
from server.http.errors import fault_of
from server.http.pacing import LoopPacer
from server.openai.responses.store import ResponseStore, StoredResponse
from server.openai.responses.writer import ResponseWriter
from server.serving.job import ServingRequest, sse_frames

PIECE_BYTES = 64 * 2**10
"""Approximate bytes of stored frames that are sent at once: a few hundred frames."""


class BackgroundResponse:
    """Runs `job` to its end and stores the response in `entry`."""

    def __init__(
        self,
        job: ServingRequest,
        writer: ResponseWriter,
        entry: StoredResponse,
        store: ResponseStore,
        record: RequestRecord,
    ) -> None:
        """`record`: access-log record for the job, because the request that started the job ends
        earlier."""
        self._job = job
        self._record = record
        self._writer = writer
        self._entry = entry
        self._store = store
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        """Whether `_task` ends the response with status cancelled."""

    def start(self) -> None:
        """Register in the store and start. Raises Overloaded if the store is full; the job is then
        closed."""
        self._entry.running = self
        try:
            self._store.add_running(self._entry)
        except Overloaded:
            self._job.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._run())

    def fields(self) -> Json:
        return self._writer.fields()

    @property
    def num_values(self) -> int:
        return self._job.num_answer_values

    async def cancel(self) -> None:
        """Cancel the response and store its output so far. No effect if the response is already
        ending."""
        if self._writer.has_ended:
            return
        if not self._is_cancelled:
            self._is_cancelled = True
            # Stop the task first, so that it adds no more output.
            self._job.close()
            if self._task is not None:
                self._task.cancel()
            # Followers need the last frames even if this request's client disconnects.
            self._task = asyncio.get_running_loop().create_task(self._end_cancelled())
        assert self._task is not None, "a cancelled response has the task that ends it"
        await asyncio.shield(self._task)

    async def _end_cancelled(self) -> None:
        self._store_data(await self._writer.cancelling())
        self._entry.notify()

    async def _run(self) -> None:
        try:
            self._store_frames(await self._writer.opening())
            async for data in sse_frames(self._job, self._writer):
                self._store_data(data)
        except Overloaded as error:
            self._store_data(await self._writer.failing(fault_of(error)))
        finally:
            self._job.close()
            self._record.status = 200
            self._record.write(access_log=False)
            self._entry.notify()

    def _store_data(self, data: bytes) -> None:
        """Store the frames in `data`. Raises Overloaded if the store is full."""
        self._store_frames(_frames_in(data))

    def _store_frames(self, frames: Iterable[bytes]) -> None:
        """Raises Overloaded if the store is full."""
        events = self._entry.events
        if events is None:
            return
        added = list(frames)
        events += added
        self._entry.notify()
        self._store.add_bytes(self._entry, sum(map(len, added)))


def _frames_in(data: bytes) -> Iterator[bytes]:
    """The frames in `data`, which is not split before the first frame is read."""
    for part in data.split(b"\n\n")[:-1]:
        yield part + b"\n\n"


async def follow_events(
    entry: StoredResponse, after: int, pacer: LoopPacer
) -> AsyncIterator[bytes]:
    """The frames of a stored stream after sequence number `after`, to its end. `pacer` paces the
    pieces of all streams, because a send does not suspend while the socket accepts bytes."""
    events = entry.events
    assert events is not None
    position = after + 1
    client = current_client.get() or ""
    while True:
        has_changed = entry.has_changed
        while position < len(events):
            await pacer.wait(client)
            piece = bytearray()
            while position < len(events) and len(piece) < PIECE_BYTES:
                piece += events[position]
                position += 1
            yield bytes(piece)
        if entry.running is None:
            return
        await has_changed.wait()
