"""Isolated calls: native code that crashes, hangs or uses too much memory ends only its call.

A fork server imports a module and prepares its state once. Each call runs in a fork of the server,
with limits on CPU time, wall time, address space and stack. The fork exits with the call, which
frees its memory. A fork takes 4 ms from a process of 120 MiB.
"""

import contextlib
import gc
import importlib
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from config.errors import EngineDied, Overloaded, UserError
from config.loading.env import environment
from config.native import panics_as_errors
from engine.process.child_process import FAULTS, describe_exit, die_with_parent, python_command

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""Attempts to run a call when the fork server itself has died or hangs."""
START_TIMEOUT_S = 60.0
"""Maximum time for a fork server to prepare its state; it is replaced earlier if it uses no CPU
time for STUCK_S. Seconds."""
STUCK_S = 3.0
"""Time without CPU use after which a fork server that was asked for a fork is killed and replaced;
seconds."""
CLOSE_S = 0.5
"""Time for a closed fork server to exit; seconds."""
GRACE_S = 1.0
"""Wait for the report of a call's end after its wall-time limit; seconds."""

_FRAME = struct.Struct("<cQ")
_RESULT, _FAILED, _EXITED, _READY, _LIMITS = b"R", b"F", b"X", b"S", b"L"

Call = Callable[[bytes], bytes]
"""Function that runs in a fork."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of a call. Exceeding the CPU time or wall time ends the call by a signal, also inside
    native code."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    """Address space in addition to the fork server's."""
    stack_bytes: int


CLOSED = "the process that isolates third-party code was closed"


class CallKilled(Exception):
    """The process of a call ended without a result: it crashed, or used too much CPU time or
    memory. A repeated call would probably fail again, except after CallInterrupted."""


class CallInterrupted(CallKilled):
    """The call has no result for a reason that may lie outside of the call, such as its wall time
    on a busy machine or a signal of another process. A repeated call may succeed."""


class CallBroken(Exception):
    """The call raised an unexpected exception."""


class CallCancelled(Exception):
    """The call was cancelled; its process is killed."""


@contextlib.contextmanager
def failures_of_requests(action: str, refusal: str, *, param: str | None = None) -> Iterator[None]:
    """Convert failures of a call into errors of its request, and log them: Overloaded for
    CallInterrupted, since the request may succeed later; UserError with the text `refusal` for
    CallKilled and CallBroken. `action`: what the call does, as the subject of a sentence."""
    try:
        yield
    except CallInterrupted as error:
        logger.warning("%s was interrupted: %s", action, error)
        raise Overloaded(f"{action} was interrupted: {error}") from None
    except (CallKilled, CallBroken) as error:
        logger.warning("%s failed, and its request is rejected: %s", action, error)
        raise UserError(f"{refusal}: {error}", param=param) from None


class Cancellation:
    """Ends a call from another thread, before it starts or while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Make the call raise CallCancelled and kill its process; safe to call twice."""
        with self._lock:
            self.is_cancelled = True
            if self._channel is not None:
                # Wakes the reading thread, and makes the fork server kill the process.
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def cancelling(self, channel: socket.socket) -> Iterator[None]:
        """Context in which `cancel` shuts down `channel`."""
        with self._lock:
            self._channel = channel
            if self.is_cancelled:
                channel.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                self._channel = None


class _Orders(msgspec.Struct, frozen=True):
    module: str
    setup: bytes


class ForkServer:
    """Runs calls of a module in forks. Thread-safe. Starts on first use, and again after it has
    died. `module` must define `prepare(setup: bytes) -> Call`, which runs once per start."""

    def __init__(self, module: str, setup: bytes, limits: Limits) -> None:
        self._orders = _Orders(module, setup)
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the fork server; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the fork server if it is not running; does not wait for `prepare`."""
        with self._lock:
            self._connect()

    def call(
        self,
        payload: bytes,
        limits: Limits | None = None,
        cancellation: Cancellation | None = None,
    ) -> bytearray:
        """Run the call in a fork and return its result. `limits` replaces the constructor's limits.
        Blocks. Raises CallKilled, CallBroken, CallCancelled, CallInterrupted (also when no fork
        server can be started), and EngineDied after `close`."""
        limits = limits or self._limits
        cancellation = cancellation or Cancellation()
        for _ in range(MAX_STARTS):
            ours, theirs = socket.socketpair()
            with ours, cancellation.cancelling(ours):
                with theirs:
                    process = self._send_channel(theirs)
                if process is None:
                    continue
                try:
                    if self._await_fork(ours, process):
                        return self._result_unless_closed(ours, payload, limits)
                except CallKilled:
                    if cancellation.is_cancelled:
                        raise CallCancelled from None
                    raise
                if cancellation.is_cancelled:
                    raise CallCancelled
                self._replace(process)
        raise CallInterrupted("its process cannot be started")

    def close(self) -> None:
        """Stop the fork server and all its calls; safe to call twice."""
        with self._lock:
            self._is_closed = True
            if self._control is not None:
                self._control.close()
                self._control = None
            process, self._process = self._process, None
        if process is not None:
            # The fork server kills its calls and exits, unless `prepare` is still running.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_S)
            process.kill()
            process.wait()

    def _send_channel(self, channel: socket.socket) -> "subprocess.Popen[bytes] | None":
        """Ask for a fork that serves `channel`. Returns the fork server, or None if it has died or
        reads nothing."""
        with self._lock:
            control = self._connect()
            try:
                # DONTWAIT: a stopped fork server reads nothing.
                socket.send_fds(control, [b"c"], [channel.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                self._forget()
                return None
            return self._process

    def _await_fork(self, channel: socket.socket, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until the fork reports that it runs; until then, `prepare` may still be running.
        Returns False if the fork server has died or is stuck."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        end, before = time.monotonic() + START_TIMEOUT_S, _processor_time(process.pid)
        while not poll.poll(STUCK_S * 1e3):
            used = _processor_time(process.pid)
            if used == before or time.monotonic() > end:
                return False
            before = used
        channel.settimeout(STUCK_S)
        try:
            return _receive_frame(channel)[0] == _READY
        except (ConnectionError, TimeoutError):
            return False

    def _replace(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the fork server `process`, unless another call has replaced it."""
        with self._lock:
            if self._process is process:
                self._forget()

    def _connect(self) -> socket.socket:
        if self._is_closed:
            raise EngineDied(CLOSED)
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # A memory file, not a pipe: writing to a pipe would block on a stopped process.
            with theirs, os.fdopen(os.memfd_create("orders"), "w+b") as orders:
                orders.write(msgspec.msgpack.encode(self._orders))
                orders.seek(0)
                title = f"isolation for {self._orders.module}"
                command = [*python_command("engine.process.isolation", title)]
                command.append(str(theirs.fileno()))
                self._process = subprocess.Popen(
                    command,
                    stdin=orders,
                    pass_fds=[theirs.fileno()],
                    env=_environment(environment()),
                )
            self._control = ours
        return self._control

    def _forget(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None

    def _result_unless_closed(
        self, channel: socket.socket, payload: bytes, limits: Limits
    ) -> bytearray:
        try:
            return _result_of(channel, payload, limits)
        except CallKilled:
            # `close` has killed the process; the payload is not the cause.
            if self._is_closed:
                raise EngineDied(CLOSED) from None
            raise


def _result_of(channel: socket.socket, payload: bytes, limits: Limits) -> bytearray:
    channel.settimeout(limits.wall_s + GRACE_S)
    try:
        _send_frame(channel, _LIMITS, msgspec.msgpack.encode(limits))
        _send_frame(channel, _RESULT, payload)
        kind, data = _receive_frame(channel)
    except TimeoutError:
        # Closing the channel makes the fork server kill the call.
        raise CallInterrupted(f"it took longer than {limits.wall_s:g} s") from None
    except ConnectionError:
        raise CallInterrupted("its process was lost") from None
    if kind == _RESULT:
        return data
    if kind == _FAILED:
        raise CallBroken(data.decode("utf-8", "replace"))
    code = int(data)
    is_caused_by_call = code >= 0 or -code in (*FAULTS, signal.SIGPROF)
    raise (CallKilled if is_caused_by_call else CallInterrupted)(_why(code, limits))


def _why(code: int, limits: Limits) -> str:
    mib = limits.memory_bytes / 2**20
    reasons = {
        -signal.SIGPROF: f"it took longer than {limits.cpu_s:g} s of processor time",
        -signal.SIGALRM: f"it took longer than {limits.wall_s:g} s",
        -signal.SIGABRT: f"it took more than {mib:g} MiB, or aborted",
        _OUT_OF_MEMORY: f"it took more than {mib:g} MiB",
    }
    return reasons.get(code, f"its process {describe_exit(code)}")


_OUT_OF_MEMORY = 17


def main() -> None:
    """Entry point of a fork server."""
    control = socket.socket(fileno=int(sys.argv[2]))
    orders = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Orders)
    # Ignore signals: this process ends when the control channel is closed, by the parent or, if the
    # parent dies, by the kernel.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    call = importlib.import_module(orders.module).prepare(orders.setup)
    # Forks share these objects' pages as long as the garbage collector does not write to them.
    gc.collect()
    gc.freeze()
    _Server(control, call).run()


class _Server:
    """Main loop of a fork server: forks for each channel that it receives and reports the end of
    each fork."""

    def __init__(self, control: socket.socket, call: Call) -> None:
        self._control = control
        self._call = call
        self._calls: dict[int, socket.socket] = {}
        self._ended, wakeup_write = os.pipe()
        os.set_blocking(self._ended, False)
        os.set_blocking(wakeup_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the parent closes the control channel."""
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            poll.register(self._ended, select.POLLIN)
            for channel in self._calls.values():
                # Poll for hang-ups only: the fork reads the parent's data.
                poll.register(channel, 0)
            ready = dict(poll.poll())
            if self._ended in ready:
                os.read(self._ended, 4096)
            self._reap()
            self._kill_abandoned(ready)
            if self._control.fileno() in ready and not self._accept():
                break
        for pid in self._calls:
            os.kill(pid, signal.SIGKILL)

    def _accept(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            return False
        if not data or not descriptors:
            return False
        channel = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            _report(channel, _FAILED, str(error).encode())
            channel.close()
            return True
        if pid == 0:
            self._run_fork(channel)
        self._calls[pid] = channel
        return True

    def _reap(self) -> None:
        for pid in list(self._calls):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                channel = self._calls.pop(pid)
                _report(channel, _EXITED, str(os.waitstatus_to_exitcode(status)).encode())
                channel.close()

    def _kill_abandoned(self, ready: Mapping[int, int]) -> None:
        for pid, channel in self._calls.items():
            if ready.get(channel.fileno(), 0) & (select.POLLHUP | select.POLLERR):
                os.kill(pid, signal.SIGKILL)

    def _run_fork(self, channel: socket.socket) -> NoReturn:
        code = 1
        try:
            # Forks must end with a fork server that is killed and replaced, even if they are
            # stopped.
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for other in self._calls.values():
                other.close()
            # Discard the library's output: a client that makes it crash could control the text.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            _report(channel, _READY)
            kind, encoded = _receive_frame(channel)
            assert kind == _LIMITS, kind
            limits = msgspec.msgpack.decode(encoded, type=Limits)
            kind, received = _receive_frame(channel)
            assert kind == _RESULT, kind
            payload = bytes(received)
            del received
            _limit(limits)
            code = _on_stack(limits.stack_bytes, lambda: _answer(channel, self._call, payload))
        finally:
            os._exit(code)


def _answer(channel: socket.socket, call: Call, payload: bytes) -> int:
    try:
        with panics_as_errors():
            result = call(payload)
        _report(channel, _RESULT, result)
    except MemoryError:
        return _OUT_OF_MEMORY
    except Exception as error:  # Process border: the error is reported to the parent.
        _report(channel, _FAILED, f"{type(error).__name__}: {error}".encode()[:4096])
    return 0


def _processor_time(pid: int) -> int:
    """Clock ticks of CPU time that the process has used; proc(5), fields 14 and 15 of stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    # The second field is the name in parentheses, which may contain spaces.
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _on_stack(stack_bytes: int, work: Callable[[], int]) -> int:
    """Run `work` on a thread with `stack_bytes` of stack, and return its result; _OUT_OF_MEMORY if
    `work` raises."""
    codes: list[int] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: codes.append(work()))
    thread.start()
    thread.join()
    return codes[0] if codes else _OUT_OF_MEMORY


def _limit(limits: Limits) -> None:
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    most = size + limits.memory_bytes + limits.stack_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given` with a single thread per library, because a fork has only the thread that forked, and
    a single malloc arena, so that the call's thread can use free memory of the parent's heap."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        **given,
        **dict.fromkeys(names, "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "1",
    }


def _report(channel: socket.socket, kind: bytes, data: bytes = b"") -> None:
    # The parent may have closed the channel.
    with contextlib.suppress(OSError):
        _send_frame(channel, kind, data)


def _send_frame(channel: socket.socket, kind: bytes, data: bytes) -> None:
    channel.sendall(_FRAME.pack(kind, len(data)))
    channel.sendall(data)


def _receive_frame(channel: socket.socket) -> tuple[bytes, bytearray]:
    kind, size = _FRAME.unpack(_receive(channel, _FRAME.size))
    return kind, _receive(channel, size)


def _receive(channel: socket.socket, size: int) -> bytearray:
    # Read in place: joining chunks of hundreds of megabytes would hold the GIL.
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = channel.recv_into(left)
        if not count:
            raise ConnectionError("the other end is closed")
        left = left[count:]
    return data
