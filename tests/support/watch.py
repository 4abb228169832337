"""Cost of an attack for other clients: latency of a second client, memory and descriptors."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx
import psutil

POLL_S = 0.01


class SecondClient:
    """Repeats a request over one connection inside the context manager."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        *,
        path: str = "/health",
        body: dict[str, Any] | None = None,
        interval_s: float = POLL_S,
    ) -> None:
        """`body`: JSON of a POST; None: the request is a GET."""
        self._method = "GET" if body is None else "POST"
        self._path, self._body = path, body
        self._interval_s = interval_s
        self._http = httpx.Client(base_url=url, timeout=timeout_s, verify=False)
        self._thread = threading.Thread(target=self._run)
        self._is_over = threading.Event()
        self.latencies_s: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> "SecondClient":
        self._http.get("/health")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._http.close()

    def _run(self) -> None:
        # Send the first request at once: the watched code may take less than the time between two
        # requests.
        self._ask()
        while not self._is_over.wait(self._interval_s):
            self._ask()

    def _ask(self) -> None:
        start = time.monotonic()
        try:
            answer = self._http.request(self._method, self._path, json=self._body)
            if answer.status_code != 200:
                self.failures.append(f"{self._path} gave {answer.status_code}: {answer.text}")
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
        self.latencies_s.append(time.monotonic() - start)

    def percentile_s(self, share: float) -> float:
        """Latency that this fraction of the requests did not exceed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def is_delayed(
    url: str, latency_s: float, limit_s: float, share: float = 1.0, **request: Any
) -> bool:
    """Whether a second client's latency at this `share` of its requests exceeds the limit and three
    times the latency of `request` beside nothing but other work of the machine."""
    if latency_s < limit_s:
        return False
    with SecondClient(url, **request) as alone:
        time.sleep(2)
    return latency_s > 3 * alone.percentile_s(share)


class Family:
    """A server's process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def resident_bytes(self) -> int:
        """Resident bytes of all processes; memory that processes share is counted for each of
        them."""
        return sum(self._of_each(lambda process: process.memory_info().rss))

    def num_descriptors(self) -> int:
        return sum(self._of_each(lambda process: process.num_fds()))

    def _of_each(self, look: Callable[[psutil.Process], int]) -> list[int]:
        found = []
        for process in [self._root, *self._root.children(recursive=True)]:
            # A process that has ended meanwhile counts as 0.
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(look(process))
        return found
