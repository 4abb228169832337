"""ChildProcess: starts a child process with arguments, sends it messages, watches and stops it. A
child exits when its parent dies.

Arguments and messages are sent over the child's stdin, which stays open. The kernel closes it when
the parent dies, even by kill -9, and the child exits: no process is orphaned.
"""

import contextlib
import ctypes
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from setproctitle import setproctitle

logger = logging.getLogger(__name__)

PARENT_DIED = 3
"""Exit code of a child whose parent died."""
STOP = signal.SIGUSR1
"""Signal with which a parent stops a child by default. Not SIGTERM: service managers send SIGTERM
to every process of a service at once, and an engine that exited then would lose running
requests."""
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a child ignores by default, since only the parent handles them."""

EXIT_WAIT_S = 1.0
"""Maximum wait for the threads of a process that has finished its work; seconds."""

STOPPED_S = 30.0
"""Time after which a child that a signal has stopped (SIGSTOP) is killed: it keeps its connections
and requests, and answers nothing; seconds."""

FAULTS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
)
"""Signals caused by the code that a process executes."""

_LENGTH = struct.Struct("<Q")
CONTINUED_S = 1.0
"""Further time before the kill, in seconds. A terminal that stops the server (Ctrl-Z) stops its
timers, too, and continues all processes at once."""

_CHANGES = os.WSTOPPED | os.WCONTINUED
_PR_SET_PDEATHSIG = 1
"""prctl(2): option that sets the signal a process gets when its parent dies."""

# Run with -c rather than -m: the current directory must not come first in the path (a user's
# config.py would win), and the signals must be ignored from the first moment.
_BOOT = (
    "import signal, sys; [signal.signal(number, signal.SIG_IGN) for number in {ignored}]; "
    "sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1]); "
    "from engine.process.child_process import set_title; set_title({title!r}); "
    "from {module} import main; main()"
)


def python_command(
    module: str, title: str, ignored: Sequence[signal.Signals] = IGNORED_SIGNALS
) -> list[str]:
    """Command that runs `main()` of a gaudiserve module in a new interpreter, which ignores the
    signals in `ignored` until it sets handlers. `ps` shows the process as `gaudiserve: <title>`."""
    root = str(Path(__file__).resolve().parents[2])
    numbers = [int(number) for number in ignored]
    boot = _BOOT.format(module=module, title=title, ignored=numbers)
    return [sys.executable, "-c", boot, root]


def set_title(title: str) -> None:
    """Make `ps` and `top` show this process as `gaudiserve: <title>`."""
    # With SPT_NOENV, setproctitle overwrites only the arguments: /proc/<pid>/environ stays
    # readable.
    os.putenv("SPT_NOENV", "1")
    setproctitle(f"gaudiserve: {title}")
    os.unsetenv("SPT_NOENV")


def describe_exit(code: int) -> str:
    """Description of a process's end for messages: `was killed by SIGKILL`, `exited with code
    1`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code}"


class ProcessEnd(NamedTuple):
    """How a process ended without being stopped by its parent."""

    description: str
    """Name and end of the process, such as `worker 0 (process 17) was killed by SIGKILL`."""
    is_external: bool
    """Whether the process was killed from outside, for example by the OOM killer."""
    pid: int


def is_external_end(code: int) -> bool:
    """Whether exit code `code` means that a signal from outside killed the process."""
    return code < 0 and -code not in FAULTS


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state == "T"


class Terminated(BaseException):
    """The parent sent STOP: raised in the main thread, at any instruction."""


class ChildProcess:
    """The parent's handle of a child process. When the child ends without `stop` or `close`,
    `on_exit` is called once with its end, on another thread. A child that a signal has stopped for
    STOPPED_S is killed."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        orders: Any,
        *,
        environment: Mapping[str, str] | None = None,
        on_exit: Callable[[ProcessEnd], None] | None = None,
        stop_signal: signal.Signals = STOP,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `command` and send it `orders` (any value that msgspec can encode). `name`: for
        error messages. `environment`: all variables of the child; None: a copy of this process's
        variables. `pass_fds`: descriptors that the child inherits."""
        self._name = name
        self._stop_signal = stop_signal
        self._on_exit = on_exit
        self._closing = False
        self._sending = threading.Lock()
        self.sentinel, self._alive = os.pipe()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, pass_fds=pass_fds
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        write_orders(self._stdin.fileno(), orders)
        os.set_blocking(self._stdin.fileno(), False)
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.pid}", daemon=True)
        self._watcher.start()

    def poll(self) -> int | None:
        """Exit code (negative: the signal number), or None while the child runs. The file
        descriptor `sentinel` becomes readable when the child ends."""
        return self._process.poll()

    def send(self, message: object) -> None:
        """Send `message` (any value that msgspec can encode) to the `on_message` of the child's
        `exit_with_parent`. Never blocks: if the pipe is full, the child has hung and is killed. A
        message to a child that has ended is lost. Thread-safe."""
        frame = _frame(message)
        with self._sending:
            if self._stdin.closed:
                return
            try:
                num_written = os.write(self._stdin.fileno(), frame)
            except BrokenPipeError:
                return
            except BlockingIOError:
                num_written = 0
        if num_written < len(frame):
            logger.error("%s does not read its messages and is killed", self._name)
            self._process.kill()

    def stop(self) -> None:
        """Send the stop signal, once; `close` waits for the child to end."""
        if not self._closing:
            self._closing = True
            self._process.send_signal(self._stop_signal)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send the stop signal, wait up to `timeout_s`, then send SIGKILL; returns when the child
        has ended. Safe to call twice."""
        self.stop()
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
            with self._sending, contextlib.suppress(BrokenPipeError):
                self._stdin.close()

    @property
    def end(self) -> ProcessEnd:
        """How the child ended. Only valid after its end."""
        code = self._process.returncode
        ending = "has not ended" if code is None else describe_exit(code)
        description = f"{self._name} (process {self.pid}) {ending}"
        return ProcessEnd(description, is_external_end(code or 0), self.pid)

    def _watch(self) -> None:
        self._watch_stops()
        self._process.wait()
        os.close(self._alive)
        if self._on_exit is not None and not self._closing:
            self._on_exit(self.end)

    def _watch_stops(self) -> None:
        """Return when the child has ended; kill it when it has been stopped for STOPPED_S."""
        killing = threading.Timer(STOPPED_S, self._kill_stopped)
        # `poll` of another thread may reap the child.
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_PID, self.pid, _CHANGES | os.WEXITED | os.WNOWAIT)
                if found is None or found.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                    break
                os.waitid(os.P_PID, self.pid, _CHANGES | os.WNOHANG)
                killing.cancel()
                if found.si_code == os.CLD_STOPPED:
                    killing = threading.Timer(STOPPED_S, self._kill_stopped)
                    killing.daemon = True
                    killing.start()
        killing.cancel()

    def _kill_stopped(self) -> None:
        time.sleep(CONTINUED_S)
        if not _is_stopped(self.pid):
            return
        logger.error("%s was stopped by a signal for %g s and is killed", self._name, STOPPED_S)
        self._process.kill()


def write_orders(descriptor: int, orders: object) -> None:
    """In the parent: write `orders` to the child's stdin. Ignores a child that is already dead,
    whose watcher reports the end."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, _frame(orders))


def read_orders(kind: Any) -> Any:
    """In the child: read the orders from stdin. Exits if the parent dies while writing."""
    try:
        return msgspec.msgpack.decode(_read_frame(0), type=kind)
    except EOFError:
        os._exit(PARENT_DIED)


def exit_with_parent(
    clean_up: Callable[[], None] = lambda: None,
    on_message: Callable[[bytes], None] = lambda payload: None,
) -> None:
    """In the child: from now on, exit when the parent dies, after `clean_up`; native code that
    holds the GIL delays the exit. `on_message` is called on another thread with each message of
    ChildProcess.send, encoded as msgpack. Replaces stdin by /dev/null for the rest of the
    process."""
    parent_pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def read_until_parent_dies() -> None:
        with contextlib.suppress(EOFError):
            while True:
                on_message(_read_frame(parent_pipe))
        clean_up()
        os._exit(PARENT_DIED)

    threading.Thread(target=read_until_parent_dies, name="parent", daemon=True).start()


def die_with_parent() -> None:
    """In the child: make the kernel kill this process when the thread that started it ends, even
    while native code runs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def install_stop_handler() -> None:
    """In the child, on its main thread: make STOP raise Terminated, once, in the main thread.
    SIGINT and SIGTERM are ignored, since the parent handles them."""
    has_raised = threading.Event()
    main_thread = threading.get_ident()
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)

    def terminate(*_: Any) -> None:
        if not has_raised.is_set():
            has_raised.set()
            raise Terminated

    def repeat_signal() -> None:
        # Python runs handlers in the main thread, which is not woken if another thread received the
        # signal, or if it arrived just before a blocking call.
        os.read(wakeup_read, 1)
        while not has_raised.wait(0.05):
            signal.pthread_kill(main_thread, STOP)

    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(STOP, terminate)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    threading.Thread(target=repeat_signal, name="stop", daemon=True).start()


def ignore_stop_signal() -> None:
    """In the child, once it is exiting: ignore STOP."""
    signal.signal(STOP, signal.SIG_IGN)


def run_child(work: Callable[[], int]) -> int:
    """In the child: run `work`, which handles Terminated, and return its exit code."""
    try:
        install_stop_handler()
        code = work()
    except Terminated:
        # STOP arrived before `work` could handle it.
        code = 0
    bound_exit(code)
    return code


def bound_exit(code: int, wait_s: float = EXIT_WAIT_S) -> None:
    """Exit this process with `code` after `wait_s` seconds, unless it exits earlier. Call it last:
    at exit the interpreter waits for running threads, which may take long and cannot be stopped."""

    def end() -> None:
        time.sleep(wait_s)
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=end, name="exit", daemon=True).start()


def _frame(message: object) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _read_frame(descriptor: int) -> bytes:
    """Payload of the next frame. Raises EOFError when the other end is closed."""
    (length,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size))
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(descriptor, length - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
