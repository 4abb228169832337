"""Clearing of the frames of exceptions: their local variables refer to the data of a request, often
in a cycle, which only the garbage collector would free much later."""

import inspect
import traceback
from types import FrameType

_CAN_SUSPEND = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
"""Flags of functions whose frames may be suspended: neither running nor ended."""


def release_frames(error: BaseException) -> None:
    """Clear the frames of an error like `clear_frames`, and drop the tracebacks of the error and
    its causes. The error must have been logged."""
    for current in clear_frames(error):
        current.__traceback__ = None


def clear_frames(error: BaseException) -> list[BaseException]:
    """Clear the local variables of the ended frames to which an error and its causes refer; returns
    the error and its causes. Their tracebacks can still be logged.

    The callers of the frames in a traceback are also cleared: Jinja replaces tracebacks, and the
    functions that replace them then refer to the replaced traceback.
    """
    found = {id(error): error}
    new = [error]
    frames: set[FrameType] = set()
    while new:
        current = new.pop()
        for cause in filter(None, (current.__cause__, current.__context__)):
            if id(cause) not in found:
                found[id(cause)] = cause
                new.append(cause)
        for frame, _ in traceback.walk_tb(current.__traceback__):
            _clear(frame, frames)
    return list(found.values())


def _clear(frame: FrameType, seen: set[FrameType]) -> None:
    """Clear a frame of a traceback, and its callers up to a frame that has not ended.

    A frame keeps a reference to its caller after `clear`, so the order does not matter.
    """
    caller: FrameType | None = frame
    while caller and caller not in seen:
        # `clear` would close a caller that is suspended.
        if caller is not frame and caller.f_code.co_flags & _CAN_SUSPEND:
            return
        seen.add(caller)
        try:
            caller.clear()
        except RuntimeError:  # the frame is running, and so are its callers
            return
        caller = caller.f_back
