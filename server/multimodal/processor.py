"""Preprocesses images and videos off the event loop: threads call the isolated processes, and
results are cached by content."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from config.errors import ConfigError, EngineDied, Overloaded, UserError
from engine.process.isolation import (
    CallBroken,
    CallInterrupted,
    CallKilled,
    Cancellation,
    ForkServer,
    Limits,
)
from engine.transport.messages import InputTensor
from server.http.fair_slots import FairSlots
from server.multimodal.messages import IMAGE, VIDEO, Answer, ImageFacts, Setup

IMAGE_LIMITS = Limits(cpu_s=10.0, wall_s=20.0, memory_bytes=2 * 2**30, stack_bytes=8 * 2**20)
VIDEO_LIMITS = Limits(cpu_s=20.0, wall_s=30.0, memory_bytes=3 * 2**30, stack_bytes=8 * 2**20)
MAX_RUNNING = 4
"""Maximum number of images and videos processed concurrently."""
MAX_RUNNING_PER_CLIENT = 2
MAX_PENDING = 256
"""Maximum number of images and videos that wait for processing (see FairSlots)."""
MAX_PENDING_BYTES = 2**30
"""Maximum total size of images and videos that wait or are being processed (see FairSlots)."""
MAX_UUIDS = 65_536
INLINE_BYTES = 256 * 2**10
"""Maximum size of an image or video that is hashed on the event loop; larger files are hashed on a
thread."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image or a video that is ready for the vision tower."""

    kind: bytes
    """IMAGE or VIDEO."""
    digest: bytes
    """SHA-256 of the kind and the bytes of the image or the encoded Video."""
    text: str
    """Text that replaces the template's placeholder in the prompt."""
    num_tokens: int
    """Number of image or video tokens in `text`."""
    grid: tuple[int, int, int]
    tensors: list[InputTensor]
    time_step: float = 1.0
    num_rows: int = 0
    """See PromptForm.num_rows."""

    @property
    def num_embeddings(self) -> int:
        """Embedding rows that the vision tower computes."""
        return self.num_rows or self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


def image_processes(
    folder: str,
    image_token: str,
    options: Mapping[str, Any] | None = None,
    limits: Limits = IMAGE_LIMITS,
    *,
    video_token: str = "",
    video_frames: tuple[int, float] = (32, -1),
    is_unlisted: bool = False,
) -> ForkServer:
    """Processes that decode images and videos and preprocess them with the image processor of the
    checkpoint in `folder`. `options`: arguments of the image processor. `video_frames`:
    `num_frames` and `fps` of `Setup`."""
    setup = Setup(
        folder,
        image_token,
        dict(options or {}),
        video_token,
        *video_frames,
        is_unlisted=is_unlisted,
    )
    return ForkServer("server.multimodal.isolated", msgspec.msgpack.encode(setup), limits)


class ImagePreprocessor:
    """Preprocesses the images and videos of a model. Used on a single event loop."""

    def __init__(
        self,
        processes: ForkServer,
        image_token: str,
        *,
        cache_bytes: int = 4 * 2**30,
        video_token: str = "",
        video_limits: Limits = VIDEO_LIMITS,
    ) -> None:
        """`processes`: result of `image_processes`."""
        self._tokens = {IMAGE: image_token, VIDEO: video_token}
        self._processes = processes
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="images")
        self._video_limits = video_limits
        self._slots = FairSlots(
            "images",
            total=MAX_RUNNING,
            per_client=MAX_RUNNING_PER_CLIENT,
            max_waiting=MAX_PENDING,
            max_bytes=MAX_PENDING_BYTES,
        )
        self._cache: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._jobs: dict[tuple[str, bytes], _Job] = {}
        """Running jobs, by client and digest."""
        self._uuids: OrderedDict[tuple[str, bytes, str], bytes] = OrderedDict()
        self._marks: dict[bytes, str] = {}
        self.on_lookup: Callable[[bool], None] = lambda is_hit: None
        """Called for each lookup of an image or video, with whether it is cached or already being
        processed for the same client."""
        self.on_processed: Callable[[float], None] = lambda seconds: None
        """Called when the processing of an image or video has ended, with its time (queue
        included)."""

    @property
    def marks(self) -> Mapping[bytes, str]:
        """Kind -> text that the chat template writes for an image or video, for the supported
        kinds; set by `open`."""
        return self._marks

    def open(self) -> None:
        """Start the processes and wait for them. Blocks for seconds. Raises ConfigError."""
        try:
            facts = msgspec.msgpack.decode(self._processes.call(b""), type=ImageFacts)
        except (CallKilled, CallBroken, EngineDied) as error:
            raise ConfigError(f"the model's image processor does not start: {error}") from error
        if facts.error:
            raise ConfigError(facts.error)
        self._marks = {IMAGE: facts.mark}
        if facts.video_mark:
            self._marks[VIDEO] = facts.video_mark

    def close(self) -> None:
        """Stop the processes and threads; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def cached(self, digest: bytes) -> ProcessedImage | None:
        """The cached image or video with `digest`, if any."""
        found = self._cache.get(digest)
        if found is not None:
            self._cache.move_to_end(digest)
        return found

    async def process(
        self,
        data: bytes,
        where: str,
        param: str = "messages",
        kind: bytes = IMAGE,
        *,
        client: str = "",
    ) -> ProcessedImage:
        """Preprocess the bytes of an image, or an encoded Video. Clients share the processing slots
        fairly. If all callers of an image or video are cancelled, it leaves the queue or its
        process is killed. Raises UserError, which names the place `where` in the request,
        Overloaded, and the errors of ForkServer.call except CallKilled and CallBroken."""
        data = kind + data
        if len(data) <= INLINE_BYTES:
            digest = sha256(data).digest()
        else:
            digest = await asyncio.to_thread(lambda: sha256(data).digest())
        found, job = self.cached(digest), self._jobs.get((client, digest))
        self.on_lookup(found is not None or job is not None)
        if found is not None:
            return found
        if job is None:
            job = _Job(asyncio.ensure_future(self._process(digest, data, client)))
            self._jobs[client, digest] = job
        job.num_waiting += 1
        try:
            # Shielded: another request of the client may wait for the same job.
            return await asyncio.shield(job.task)
        except _Refused as reason:
            raise UserError(f"{where}: {reason}", param=param) from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting:
                job.task.cancel()
                del self._jobs[client, digest]

    async def _process(self, digest: bytes, data: bytes, client: str) -> ProcessedImage:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with self._slots.hold(client, len(data)):
                # Another client's job may have processed the image while this job waited.
                found = self.cached(digest)
                if found is not None:
                    return found
                raw = await self._call(data)
        except CallInterrupted as error:
            noun = "video" if data[:1] == VIDEO else "image"
            raise Overloaded(f"processing the {noun} was interrupted: {error}") from None
        except (CallKilled, CallBroken) as error:
            noun = "video" if data[:1] == VIDEO else "image"
            raise _Refused(f"the {noun} cannot be processed: {error}") from None
        finally:
            self.on_processed(loop.time() - began_s)
        answer = msgspec.msgpack.decode(raw, type=Answer)
        if answer.error:
            raise _Refused(answer.error)
        kind = data[:1]
        image = ProcessedImage(
            kind,
            digest,
            answer.text,
            answer.text.count(self._tokens[kind]),
            answer.grid,
            answer.tensors,
            answer.time_step,
            answer.num_rows,
        )
        self._add(image)
        return image

    async def _call(self, data: bytes) -> bytearray:
        """Call an isolated process, which is killed if this task is cancelled."""
        limits = self._video_limits if data[:1] == VIDEO else None
        cancellation = Cancellation()
        call = partial(self._processes.call, data, limits, cancellation)
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancellation.cancel()
            # Hold the slot until the thread is free.
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise
        return running.result()

    def _add(self, image: ProcessedImage) -> None:
        if image.num_bytes > self._cache_bytes or image.digest in self._cache:
            return
        self._cache[image.digest] = image
        self._cached_bytes += image.num_bytes
        while self._cached_bytes > self._cache_bytes:
            _, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= evicted.num_bytes

    # Images referenced by uuid

    def remember(self, owner: str, uuid: str, digest: bytes, kind: bytes = IMAGE) -> None:
        """Let `owner` send `uuid` in place of this image or video in later requests."""
        self._uuids[owner, kind, uuid] = digest
        self._uuids.move_to_end((owner, kind, uuid))
        if len(self._uuids) > MAX_UUIDS:
            self._uuids.popitem(last=False)

    def named(self, owner: str, uuid: str, kind: bytes = IMAGE) -> ProcessedImage | None:
        """The image or video that `owner` sent with `uuid`, if it is still cached."""
        digest = self._uuids.get((owner, kind, uuid))
        found = None if digest is None else self.cached(digest)
        self.on_lookup(found is not None)
        return found


@dataclass(slots=True)
class _Job:
    task: "asyncio.Future[ProcessedImage]"
    num_waiting: int = 0
    """Number of callers that wait for the image or video."""


class _Refused(Exception):
    """An image or video that was rejected. `process` converts it to a UserError that names the
    place in the request."""
