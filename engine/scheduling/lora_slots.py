"""LoRASlots: tracks adapters in host memory and in device slots, and requests that wait for
adapters."""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from config.errors import UserError
from config.lora.info import LoRAInfo
from config.params.lora import LoRAConfig
from engine.request import Request
from engine.scheduling.resource import Refusal, RequestResource
from engine.scheduling.waiting_queue import WaitingQueue, order_key
from engine.transport.messages import AddRequest
from hpu.protocol import NO_SLOT, AdapterLoaded, DropAdapter, LoadAdapter, StepPlan, ToWorker

ABSENT, LOADING, LOADED = range(3)

MAX_PASSES = 32
"""Maximum number of requests that overtake a request while it waits for a slot or host memory."""

MAX_RETIRED = 64

MAX_ADAPTERS = 4096
"""Maximum number of adapter names served at once."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An adapter, identified by its content hash. Several names may share it."""

    info: LoRAInfo
    names: set[str] = field(default_factory=set)
    state: int = ABSENT
    slot: int = NO_SLOT
    num_requests: int = 0
    """Unfinished requests, including running requests."""
    num_running: int = 0
    last_used: int = 0


class LoRASlots(RequestResource):
    """Assigns adapters to host memory and to `max_loras` device slots. A running request's adapter
    keeps its slot and its host memory. An adapter with waiting requests only keeps its host memory
    unless MAX_PASSES requests have overtaken a request that waits for host memory. Other served
    adapters stay until their slot or memory is needed, and are evicted least recently used first.

    With LoRA off, no adapter can be registered.
    """

    def __init__(self, config: LoRAConfig) -> None:
        self.is_enabled = config.enable_lora
        self.max_loras = config.max_loras
        self._max_host = config.num_cpu_loras
        self._entries: dict[str, _Entry] = {}
        self._by_name: dict[str, LoRAInfo] = {}
        self._retired: dict[str, LoRAInfo] = {}
        """The MAX_RETIRED most recently unloaded adapters, by content hash."""
        self._slots: list[_Entry | None] = [None] * config.max_loras
        self._messages: list[ToWorker] = []
        self._to_load: OrderedDict[str, _Entry] = OrderedDict()
        """Adapters of requests that wait for host memory, because it is full of adapters that are
        in use or being loaded, by content hash."""
        self._idle: OrderedDict[str, _Entry] = OrderedDict()
        """Adapters in host memory without unfinished requests, least recently used first, by
        content hash."""
        self._assigned: list[tuple[int, str]] = []
        self._clock = 0
        self.version = 0
        """Incremented when a request that could not start may have become startable."""
        self.num_loading = 0
        self._loaded: dict[str, _Entry] = {}
        """Adapters in host memory, by content hash."""
        self.num_bytes = 0
        """Total file size of the adapters in host memory, in bytes."""
        self.running: dict[str, int] = {}
        """Running requests by adapter name, without zeros. If an adapter has several names, all its
        requests count under one name. Two adapters have the same name if an adapter was registered
        again, with other files, while older requests were unfinished."""
        self.waiting: dict[str, int] = {}
        """Waiting requests by adapter name, counted like `running`."""
        self.num_loads = self.num_failures = self.num_evictions = 0
        self._blocked: Request | None = None
        """The request with the lowest priority key among requests that wait for a slot or host
        memory."""
        self._num_passes = 0

    @property
    def infos(self) -> list[LoRAInfo]:
        """Served adapters in the order of their registration."""
        return list(self._by_name.values())

    def register(self, info: LoRAInfo) -> None:
        """Start serving an adapter; an adapter that is served already under this name, with the
        same files, is accepted. Raises UserError."""
        self._check_enabled()
        if info.name in self._by_name:
            if self._by_name[info.name].content == info.content:
                # Another engine may have failed to load it, or several front ends load it again.
                return
            raise UserError(
                f"the adapter {info.name} is loaded already, with other files: unload it first",
                param="lora_name",
            )
        if len(self._by_name) >= MAX_ADAPTERS:
            raise UserError(
                f"{len(self._by_name)} adapters are loaded, at most {MAX_ADAPTERS} are allowed: "
                "unload an adapter",
                param="lora_name",
            )
        self._by_name[info.name] = info
        entry = self._entries.setdefault(info.content, _Entry(info))
        if not entry.names:
            # The adapter's folder may have moved.
            self._set_info(entry, info)
        entry.names.add(info.name)

    def unregister(self, name: str) -> int:
        """Stop serving an adapter under this name. If no other name serves the adapter, its memory
        is freed when its last request ends. Returns its number of unfinished requests. Raises
        UserError."""
        self._check_enabled()
        info = self._by_name.pop(name, None)
        if info is None:
            raise UserError(f"there is no adapter {name}", param="lora_name")
        entry = self._entries[info.content]
        entry.names.discard(name)
        if entry.names and entry.info.name == name:
            # The files of the unloaded adapter may be removed.
            self._set_info(entry, self._by_name[min(entry.names)])
        # Removed first, so that the entry becomes the newest.
        self._retired.pop(info.content, None)
        self._retired[info.content] = info
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
        num_requests = entry.num_requests
        self._end_use(entry)
        return num_requests

    def serves(self, content: str, *, is_continuation: bool = False) -> bool:
        """Whether a request may use the adapter with this content hash. A continuation of an
        accepted request (`is_continuation`) may also use a recently unloaded adapter."""
        if is_continuation and content in self._retired:
            return True
        entry = self._entries.get(content)
        return entry is not None and bool(entry.names)

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise UserError("this server serves no adapters: start it with --enable-lora")

    def refusal(self, message: AddRequest) -> Refusal | None:
        was_accepted = message.is_continuation or message.resumption is not None
        if not message.adapter or self.serves(message.adapter, is_continuation=was_accepted):
            return None
        return Refusal("the adapter of the request was unloaded", "model")

    def add_request(self, request: Request) -> None:
        """Register a waiting request. `serves` must have accepted its adapter."""
        if not request.adapter:
            return
        entry = self._entries.get(request.adapter)
        if entry is None:
            # A continuation whose adapter was unloaded.
            entry = self._entries[request.adapter] = _Entry(self._retired[request.adapter])
        self._count(entry, requests=1)
        self._idle.pop(request.adapter, None)
        if entry.state == ABSENT:
            # An adapter that waits already keeps its place.
            self._to_load[request.adapter] = entry
            self._load_waiting()

    def finish_request(self, request: Request) -> None:
        if not request.adapter:
            return
        entry = self._entries[request.adapter]
        self._count(entry, requests=-1)
        if request is self._blocked:
            self._unblock()
        if not entry.num_requests:
            self._end_use(entry)
            self._load_waiting()

    def may_start(self, request: Request) -> bool:
        """Whether the request's adapter is in host memory and has, or can get, a slot. False if the
        request would overtake a request that waits for a slot or host memory, and MAX_PASSES
        requests have done so before."""
        if not request.adapter:
            return True
        entry = self._entries[request.adapter]
        if entry.state == LOADING:
            return False
        if self._num_passes >= MAX_PASSES and self._is_pass(request):
            return False
        if entry.state == LOADED and (entry.slot != NO_SLOT or self._idle_slot() is not None):
            return True
        blocked = self._blocked
        if blocked is None or order_key(request) < order_key(blocked):
            self._blocked = request
        return False

    def start(self, request: Request) -> None:
        """Set the `lora_slot` of a request that starts. Call it before a FairQueue changes the
        request's `priority_key`, which shows whether the request overtakes a waiting request."""
        if not request.adapter:
            return
        entry = self._entries[request.adapter]
        if request is self._blocked:
            self._unblock()
        elif self._is_pass(request):
            self._num_passes += 1
        if entry.slot == NO_SLOT:
            slot = self._idle_slot()
            assert slot is not None, "a request started without a slot"
            self._take_slot(slot, entry)
        self._count(entry, running=1)
        self._clock += 1
        entry.last_used = self._clock
        request.lora_slot = entry.slot

    def release(self, request: Request) -> None:
        """Release the slot reference of a started request that ended or was preempted."""
        if not request.adapter:
            return
        entry = self._entries[request.adapter]
        self._count(entry, running=-1)
        if not entry.num_running:
            self.version += 1

    def take_messages(self) -> list[ToWorker]:
        """Adapters that the workers must load or drop."""
        if self._to_load:
            self._make_space_for_blocked()
            self._load_waiting()
        messages, self._messages = self._messages, []
        return messages

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the slots to fill, and the content hashes of their adapters, to the plan."""
        if self._assigned:
            assigned, self._assigned = self._assigned, []
            # If a slot was assigned twice, the last adapter wins.
            last = dict(assigned)
            plan.lora_slots, plan.lora_adapters = list(last), list(last.values())

    def on_loaded(self, message: AdapterLoaded) -> bool:
        """Handle the workers' answer to a load. Returns False if the adapter could not be read; the
        caller must then fail its requests."""
        entry = self._entries[message.content]
        assert entry.state == LOADING, f"{entry.info.name} is read, in state {entry.state}"
        self.num_loading -= 1
        self.version += 1
        if message.error is not None:
            self.num_failures += 1
            entry.state = ABSENT
            # Other ranks may have loaded the adapter.
            self._messages.append(DropAdapter(message.content))
        else:
            self.num_loads += 1
            entry.state = LOADED
            self._loaded[message.content] = entry
            self.num_bytes += entry.info.num_bytes
        self._end_use(entry)
        # All requests of the adapter may have ended during the load, so its memory may be reusable.
        self._load_waiting()
        return message.error is None

    def reset(self) -> None:
        """Clear slots and host memory, which the workers have lost."""
        assert not self.num_loading, f"{self.num_loading} adapters are being read"
        for entry in self._entries.values():
            entry.state, entry.slot = ABSENT, NO_SLOT
        self._slots = [None] * self.max_loras
        self._messages, self._assigned = [], []
        self._to_load.clear()
        self._idle.clear()
        self._loaded.clear()
        self.num_bytes = 0
        self._unblock()

    @property
    def gauges(self) -> dict[str, Any]:
        """EngineStats fields about adapters; empty with LoRA off."""
        if not self.is_enabled:
            return {}
        return {
            "max_loras": self.max_loras,
            "lora_running": self.running.copy(),
            "lora_waiting": self.waiting.copy(),
            "lora_loads": self.num_loads,
            "lora_load_failures": self.num_failures,
            "lora_evictions": self.num_evictions,
            "lora_bytes": self.num_bytes,
        }

    def check(self, running: Set[int]) -> None:
        """Raise AssertionError unless slots and adapters agree."""
        for slot, entry in enumerate(self._slots):
            assert entry is None or entry.slot == slot, f"slot {slot} is not that of its adapter"
        used = [entry for entry in self._entries.values() if entry.num_running]
        assert len(used) <= self.max_loras, f"{len(used)} adapters run, of {self.max_loras}"
        for content, entry in self._entries.items():
            assert 0 <= entry.num_running <= entry.num_requests, (
                f"{entry.info.name}: {entry.num_running} of {entry.num_requests} requests run"
            )
            assert entry.names or entry.num_requests or entry.state == LOADING, (
                f"{entry.info.name} has 0 names and 0 requests, and was not forgotten"
            )
            is_idle = entry.state == LOADED and not entry.num_requests
            assert is_idle == (content in self._idle), f"{entry.info.name} is idle: {is_idle}"
            assert entry.state == LOADED or not entry.num_running, (
                f"{entry.info.name} runs and is not in host memory"
            )
        loaded = [entry for entry in self._entries.values() if entry.state == LOADED]
        num_loaded = len(self._loaded)
        assert num_loaded == len(loaded), f"{num_loaded}, not {len(loaded)} are loaded"
        assert sum(self.running.values()) == sum(entry.num_running for entry in used)

    def _count(self, entry: _Entry, *, requests: int = 0, running: int = 0) -> None:
        """Add to the adapter's unfinished and running requests."""
        entry.num_requests += requests
        entry.num_running += running
        _add(self.running, entry.info.name, running)
        _add(self.waiting, entry.info.name, requests - running)

    def _set_info(self, entry: _Entry, info: LoRAInfo) -> None:
        requests, running = entry.num_requests, entry.num_running
        self._count(entry, requests=-requests, running=-running)
        entry.info = info
        self._count(entry, requests=requests, running=running)

    def _load_waiting(self) -> None:
        """Load adapters that wait for host memory, as far as there is space now."""
        while self._to_load and self._make_space():
            _, entry = self._to_load.popitem(last=False)
            entry.state = LOADING
            self.num_loading += 1
            info = entry.info
            self._messages.append(LoadAdapter(info.content, info.path, info.root, info.name))

    def _make_space(self) -> bool:
        """Evict an idle adapter if host memory is full. Returns whether there is space now."""
        if self._is_full and self._idle:
            self._evict(next(iter(self._idle.values())))
        return not self._is_full

    def _make_space_for_blocked(self) -> None:
        """If MAX_PASSES requests have overtaken a request that waits for host memory, load its
        adapter next, and if necessary evict an adapter that no running request uses. Must not run
        during a schedule, which may be about to start a request of the evicted adapter."""
        blocked = self._blocked
        if blocked is None or self._num_passes < MAX_PASSES or blocked.adapter not in self._to_load:
            return
        self._to_load.move_to_end(blocked.adapter, last=False)
        if self._is_full and not self._idle:
            unused = [entry for entry in self._loaded.values() if not entry.num_running]
            if unused:
                self._evict(min(unused, key=lambda entry: entry.last_used))

    @property
    def _is_full(self) -> bool:
        return self.num_loading + len(self._loaded) >= self._max_host

    def _evict(self, entry: _Entry) -> None:
        """Evict an adapter from host memory, and from its slot: without host memory, it could not
        be copied to a slot again. An adapter with waiting requests then waits for host memory."""
        self.num_evictions += 1
        del self._loaded[entry.info.content]
        self._idle.pop(entry.info.content, None)
        if entry.num_requests:
            self._to_load[entry.info.content] = entry
        self.num_bytes -= entry.info.num_bytes
        entry.state = ABSENT
        self._messages.append(DropAdapter(entry.info.content))
        if entry.slot != NO_SLOT:
            self._slots[entry.slot] = None
            entry.slot = NO_SLOT

    def _end_use(self, entry: _Entry) -> None:
        """If the adapter has no requests and is not being loaded, allow its eviction, and forget it
        if it has no names."""
        if entry.num_requests or entry.state == LOADING:
            return
        content = entry.info.content
        self._to_load.pop(content, None)
        if entry.state == LOADED:
            self._idle[content] = entry
        if not entry.names:
            if entry.state == LOADED:
                self._evict(entry)
            del self._entries[content]

    def _idle_slot(self) -> int | None:
        """A slot that no running request uses: a free slot, else the least recently used."""
        idle = [
            (-1 if entry is None else entry.last_used, slot)
            for slot, entry in enumerate(self._slots)
            if entry is None or not entry.num_running
        ]
        return min(idle)[1] if idle else None

    def _take_slot(self, slot: int, entry: _Entry) -> None:
        before = self._slots[slot]
        if before is not None:
            before.slot = NO_SLOT
        self._slots[slot] = entry
        entry.slot = slot
        self._assigned.append((slot, entry.info.content))

    def _is_pass(self, request: Request) -> bool:
        """Whether the request would overtake a request that precedes it in the queue and waits for
        a slot or host memory."""
        blocked = self._blocked
        return blocked is not None and order_key(request) > order_key(blocked)

    def _unblock(self) -> None:
        self._blocked = None
        self._num_passes = 0
        self.version += 1


def _add(counts: dict[str, int], name: str, amount: int) -> None:
    """Add to the count of `name`; zeros are removed."""
    count = counts.get(name, 0) + amount
    if count:
        counts[name] = count
    else:
        counts.pop(name, None)


class AdapterQueue(WaitingQueue):
    """A WaitingQueue that skips requests whose adapter is not ready: the next request is the first
    request that may start."""

    def __init__(self, slots: LoRASlots, *, by_share: bool = False) -> None:
        super().__init__(by_share=by_share)
        self._slots = slots
        self._passed: list[Request] = []
        self._version = -1

    def peek(self, *, is_new: bool = False) -> Request | None:
        if self._version != self._slots.version:
            self._version = self._slots.version
            passed, self._passed = self._passed, []
            for request in passed:
                if self._requests.get(request.key) is request:
                    self._push(request)
        while first := super().peek(is_new=is_new):
            if self._slots.may_start(first):
                return first
            self._pop(first)
            self._passed.append(first)
        return None
