"""EncoderCacheManager: schedules image encoding and tracks the embeddings in the worker's cache."""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from engine.request import Request
from engine.scheduling.resource import Refusal, RequestResource
from engine.transport.messages import AddRequest
from hpu.protocol import TOKEN_BYTES, EncoderInput, ImagePlacement, StepPlan


@dataclass(slots=True, eq=False)
class _Entry:
    """Cached embeddings of an image, by content."""

    num_tokens: int
    ref_count: int = 0
    """Number of references by running requests that still read the embeddings."""


class EncoderCacheManager(RequestResource):
    """Limits the embeddings in the worker's encoder cache to `max_tokens` rows; `max_tokens` is 0
    if the model takes no images.

    An image is encoded with the first chunk that overlaps it, and is referenced until its last
    token is scheduled. Then it stays cached until it is evicted, least recently used first. Between
    two steps a request references at most the image that its chunk ended in, and needs no further
    space to finish that image, so requests cannot deadlock. Models with cross-attention to images
    differ, see `request_tiles`.
    """

    def __init__(
        self,
        max_tokens: int,
        max_num_batched_tokens: int,
        *,
        whole_images: bool = False,
        request_tiles: int = 0,
    ) -> None:
        """`max_num_batched_tokens`: token budget of a step. `whole_images`: a chunk may not end
        inside an image. `request_tiles`: for models with cross-attention to images, the maximum
        rows of a request's images; all of them are encoded with the first chunk and referenced
        until the request ends. 0: other models."""
        self.max_tokens = max_tokens
        self._max_step_tokens = max_num_batched_tokens
        self.holds_back_later = self._whole_images = whole_images
        self._request_tiles = request_tiles
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """Entries by content hash, in LRU order."""
        self._num_tokens = 0
        self._num_referenced = 0
        """Tokens of referenced entries, which may not be evicted."""
        self._held: dict[int, list[ImagePlacement]] = {}
        """Referenced images of each request, by request key."""
        self._done: list[tuple[int, ImagePlacement]] = []
        """(request key, image) pairs of images whose last token is in the plan under construction.
        They stay referenced until `fill_plan`, because the plan's evictions run before its
        launches."""
        self._to_encode: list[EncoderInput] = []
        self._to_free: list[bytes] = []
        self._is_full = False
        """Whether an image did not fit in this step. If so, later requests may not add images."""
        self.num_queries = self.num_hits = 0
        self.num_images = self.num_encoded_tokens = 0

    def refusal(self, message: AddRequest) -> Refusal | None:
        if not message.images:
            return None
        if not self.max_tokens or message.pooling is not None:
            error: str | None = f"the request has {len(message.images)} images, the model takes 0"
        else:
            error = self._error(message)
        # An empty `param` marks a client error that concerns the whole request.
        return None if error is None else Refusal(error, "")

    def _error(self, message: AddRequest) -> str | None:
        """Why a request's images can never be encoded; None if they can."""
        sizes = {image.content: image.num_embeddings for image in message.encoded_images}
        num_tokens = message.prompt.nbytes // TOKEN_BYTES
        end = 0
        for image in message.images:
            if image.content not in sizes:
                return f"the image at token {image.offset} has no tensors"
            if not end <= image.offset < image.offset + image.length <= num_tokens:
                return (
                    f"an image has tokens {image.offset} to {image.offset + image.length - 1}, "
                    f"the previous image ends at {end}, the prompt at {num_tokens}"
                )
            end = image.offset + image.length
            if sizes[image.content] > self.max_tokens:
                return (
                    f"an image has {sizes[image.content]} embeddings, the encoder cache has room "
                    f"for {self.max_tokens}"
                )
            if self._whole_images and image.length > self._max_step_tokens:
                return (
                    f"an image has {image.length} tokens, which must be computed in one step, and "
                    f"max_num_batched_tokens is {self._max_step_tokens}"
                )
        total = sum(sizes[image.content] for image in message.images)
        if self._request_tiles and total > self._request_tiles:
            return (
                f"{len(message.images)} images have {total} tiles, the model reads at most "
                f"{self._request_tiles} (--cross-attention-images)"
            )
        return None

    def begin_step(self) -> None:
        """Clear `_is_full` for a new plan."""
        self._is_full = False

    def fit(self, request: Request, start: int, count: int) -> int:
        """How many of the `count` tokens from `start` can be scheduled now. The range ends before
        the first image that does not fit, or that must not be split and is cut by the chunk."""
        if not request.images:
            return count
        stop = start + count
        if self._request_tiles:
            return count if request.key in self._held or self._has_room(request) else 0
        held = {image.content for image in self._held.get(request.key, ())}
        num_needed = 0
        for image in request.images:
            end = image.offset + image.length
            if end <= start:
                continue
            if image.offset >= stop:
                break
            if self._whole_images and end > stop:
                return max(image.offset - start, 0)
            if image.content in held:
                continue
            entry = self._entries.get(image.content)
            if entry is None or not entry.ref_count:
                num_tokens = request.encoded_images[image.content].num_embeddings
                is_late = entry is None and self._is_full
                if is_late or self._num_referenced + num_needed + num_tokens > self.max_tokens:
                    self._is_full = True
                    return max(image.offset - start, 0)
                num_needed += num_tokens
            held.add(image.content)
        return count

    def _has_room(self, request: Request) -> bool:
        """Whether all images of a request fit in the cache now."""
        num_needed, is_late = 0, False
        for content in {image.content for image in request.images}:
            entry = self._entries.get(content)
            if entry is None or not entry.ref_count:
                num_needed += request.encoded_images[content].num_embeddings
                is_late = is_late or entry is None
        if (is_late and self._is_full) or self._num_referenced + num_needed > self.max_tokens:
            self._is_full = True
            return False
        return True

    def add_chunk(self, request: Request, start: int, count: int) -> None:
        """Schedule `count` tokens from `start`, for which `fit` found room, and the encoding of
        their images."""
        if not request.images:
            return
        if self._request_tiles:
            if request.key not in self._held:
                for image in request.images:
                    self._take(image, request.encoded_images[image.content])
                self._held[request.key] = list(request.images)
            return
        stop = start + count
        for image in request.images:
            end = image.offset + image.length
            if end <= start:
                continue
            if image.offset >= stop:
                break
            held = self._held.setdefault(request.key, [])
            if image not in held:
                self._take(image, request.encoded_images[image.content])
                held.append(image)
            if end <= stop:
                self._done.append((request.key, image))

    def _take(self, image: ImagePlacement, encoded: EncoderInput) -> None:
        self.num_queries += 1
        entry = self._entries.get(image.content)
        if entry is not None:
            self.num_hits += 1
            self._entries.move_to_end(image.content)
        else:
            self._make_room(encoded.num_embeddings)
            entry = self._entries[image.content] = _Entry(encoded.num_embeddings)
            self._num_tokens += entry.num_tokens
            self._to_encode.append(encoded)
            self.num_images += 1
            self.num_encoded_tokens += entry.num_tokens
        if not entry.ref_count:
            self._num_referenced += entry.num_tokens
        entry.ref_count += 1

    def _make_room(self, num_tokens: int) -> None:
        unused = [content for content, entry in self._entries.items() if not entry.ref_count]
        for content in unused:
            if self._num_tokens + num_tokens <= self.max_tokens:
                return
            self._num_tokens -= self._entries.pop(content).num_tokens
            self._to_free.append(content)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the images to encode and to evict to the plan, and release images whose last token
        was scheduled."""
        plan.encoded_images, self._to_encode = self._to_encode, []
        plan.freed_images, self._to_free = self._to_free, []
        done, self._done = self._done, []
        for key, image in done:
            held = self._held.get(key, [])
            if image in held:
                held.remove(image)
                self._release(image)
                if not held:
                    del self._held[key]

    def release(self, request: Request) -> None:
        """Release the images of a request that ended or was preempted. Plans in flight can still
        use the images: later plans carry the evictions."""
        for image in self._held.pop(request.key, ()):
            self._release(image)

    def _release(self, image: ImagePlacement) -> None:
        entry = self._entries[image.content]
        entry.ref_count -= 1
        if not entry.ref_count:
            self._num_referenced -= entry.num_tokens

    def reset(self) -> None:
        """Drop all embeddings, which the worker has lost; no request may be running."""
        assert not self._held, f"{len(self._held)} requests have images"
        self._entries.clear()
        self._to_encode, self._to_free = [], []
        self._num_tokens = self._num_referenced = 0

    @property
    def gauges(self) -> dict[str, int]:
        """EngineStats fields about images; empty if the model takes no images."""
        if not self.max_tokens:
            return {}
        return {
            "encoder_cache_tokens": self._num_tokens,
            "encoder_cache_queries": self.num_queries,
            "encoder_cache_hits": self.num_hits,
            "encoded_images": self.num_images,
            "encoded_image_tokens": self.num_encoded_tokens,
        }

    def check(self, running: Set[int]) -> None:
        """Raise AssertionError unless counts and references agree. `running`: keys of the requests
        that may hold references."""
        counts: dict[bytes, int] = {}
        for key, images in self._held.items():
            assert key in running, f"{key} has images and does not run"
            for image in images:
                counts[image.content] = counts.get(image.content, 0) + 1
        for content, entry in self._entries.items():
            assert entry.ref_count == counts.pop(content, 0), "references of an image disagree"
        assert not counts, f"{len(counts)} images are referenced and not kept"
        referenced = sum(e.num_tokens for e in self._entries.values() if e.ref_count)
        total = sum(entry.num_tokens for entry in self._entries.values())
        assert (total, referenced) == (self._num_tokens, self._num_referenced)
        assert total <= self.max_tokens, f"{total} embeddings, of {self.max_tokens}"
