"""Clears the frames of exceptions: their local variables refer to request data, often in reference
cycles that only the garbage collector frees."""

import inspect
import traceback
from types import FrameType

_CAN_SUSPEND = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
"""Code flags of functions whose frames can be suspended."""


def release_frames(error: BaseException) -> None:
    """Clear the frames of an error with `clear_frames`, and drop the tracebacks of the error and
    its causes. Log the error first."""
    for current in clear_frames(error):
        current.__traceback__ = None


def clear_frames(error: BaseException) -> list[BaseException]:
    """Clear the local variables of the finished frames in the tracebacks of an error and its
    causes; returns the error and its causes. Their tracebacks can still be logged.

    The callers of the frames in a traceback are also cleared: Jinja rewrites tracebacks, and the
    frames of its rewriting functions refer to the original traceback.
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
    """Clear a frame of a traceback, and its callers up to a frame that runs or may be suspended.

    A frame keeps the reference to its caller after `clear`, so the order does not matter.
    """
    caller: FrameType | None = frame
    while caller and caller not in seen:
        # `clear` would close a suspended caller.
        if caller is not frame and caller.f_code.co_flags & _CAN_SUSPEND:
            return
        seen.add(caller)
        try:
            caller.clear()
        except RuntimeError:  # the frame and its callers are running
            return
        caller = caller.f_back
