"""Child processes: started with arguments, watched, stopped, and gone with their parent.

Arguments travel over the child's stdin, which then stays open and silent. The kernel closes it when
the parent dies in whatever way, and the child exits: nothing is orphaned, not even by kill -9.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

PARENT_DIED = 3
"""Exit code of a child whose parent is gone."""
STOP = signal.SIGUSR1
"""How a parent stops a child that obeys it. Not SIGTERM: service managers send that to every
process of a service at once, and a child that left then would take running requests with it."""
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a child that obeys its parent does not heed."""

_LENGTH = struct.Struct("<Q")

# Run by -c rather than by -m: the current directory must not come first in the path (a user's
# config.py would win there), and signals are the parent's affair from the first moment.
_BOOT = (
    "import signal, sys; [signal.signal(number, signal.SIG_IGN) for number in {ignored}]; "
    "sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1]); "
    "from {module} import main; main()"
)


def python_command(module: str, ignored: Sequence[signal.Signals] = IGNORED_SIGNALS) -> list[str]:
    """The command that runs `main()` of one of our modules in a new interpreter, which does not
    heed the signals in `ignored` until it says otherwise."""
    root = str(Path(__file__).resolve().parents[2])
    numbers = [int(one) for one in ignored]
    return [sys.executable, "-c", _BOOT.format(module=module, ignored=numbers), root]


def describe_exit(code: int) -> str:
    """How a process ended, for a message: `was killed by SIGKILL`, `exited with code 1`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code}"


class Terminated(BaseException):
    """The parent says stop: at the next instruction, wherever that is."""


class ChildProcess:
    """The parent's end. When the child ends by itself, `on_exit` is called once, on a thread of its
    own, with a sentence that says how; not when `close` came first."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        orders: Any,
        *,
        environment: Mapping[str, str] | None = None,
        on_exit: Callable[[str], None] | None = None,
        stop_signal: signal.Signals = STOP,
    ) -> None:
        """Start `command` and hand it `orders` (anything msgspec can encode). `name` is for
        messages. `environment` is all of the child's variables; None: a copy of ours."""
        self._name = name
        self._stop_signal = stop_signal
        self._on_exit = on_exit
        self._closing = False
        self.sentinel, self._alive = os.pipe()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self.pid = self._process.pid
        payload = msgspec.msgpack.encode(orders)
        # A child that is already dead is reported by the watcher, like any other death.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, _LENGTH.pack(len(payload)) + payload)
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.pid}", daemon=True)
        self._watcher.start()

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None while it runs. `sentinel` is a descriptor
        that turns readable at the same moment."""
        return self._process.poll()

    def stop(self) -> None:
        """Send the stop signal, once; `close` waits for the end."""
        if not self._closing:
            self._closing = True
            self._process.send_signal(self._stop_signal)

    def close(self, timeout_s: float = 10.0) -> None:
        """The stop signal, wait, SIGKILL; returns when the child is gone. Safe to call twice."""
        self.stop()
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
            with contextlib.suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()

    @property
    def exit_description(self) -> str:
        """How it ended: `worker 0 (process 17) was killed by SIGKILL`."""
        code = self._process.returncode
        ending = "has not ended" if code is None else describe_exit(code)
        return f"{self._name} (process {self.pid}) {ending}"

    @property
    def _stdin(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _watch(self) -> None:
        self._process.wait()
        os.close(self._alive)
        if self._on_exit is not None and not self._closing:
            self._on_exit(self.exit_description)


def read_orders(kind: Any) -> Any:
    """The child's end: take the orders from stdin. Exits when the parent dies while writing."""
    length = _LENGTH.unpack(_read_exactly(_LENGTH.size))[0]
    return msgspec.msgpack.decode(_read_exactly(length), type=kind)


def exit_with_parent(clean_up: Callable[[], None] = lambda: None) -> None:
    """The child's end: from now on, leave at once when the parent is gone, after `clean_up`.

    Takes stdin away from the rest of the process.
    """
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def hold() -> None:
        while os.read(lifeline, 64):
            pass
        clean_up()
        os._exit(PARENT_DIED)

    threading.Thread(target=hold, name="lifeline", daemon=True).start()


def install_stop_handler() -> None:
    """The child's end: STOP raises Terminated, once, in the main thread, which must be the caller;
    Ctrl-C and SIGTERM are the parent's affair."""
    heard = threading.Event()
    main_thread = threading.get_ident()
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def terminate(*_: Any) -> None:
        if not heard.is_set():
            heard.set()
            raise Terminated

    def nudge() -> None:
        # Python runs handlers in the main thread, which sleeps on if the signal went to another
        # thread, or came just before it fell asleep.
        os.read(told, 1)
        while not heard.wait(0.05):
            signal.pthread_kill(main_thread, STOP)

    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(STOP, terminate)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=nudge, name="stop", daemon=True).start()


def ignore_stop_signal() -> None:
    """The child's end: it is already leaving, STOP changes nothing any more."""
    signal.signal(STOP, signal.SIG_IGN)


def _read_exactly(length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            os._exit(PARENT_DIED)
        data += chunk
    return data
