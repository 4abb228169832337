"""Clearing of the frames of exceptions: their local variables refer to the data of a request, often
in a cycle, which only the garbage collector would free much later."""

import inspect
from types import FrameType

_CAN_SUSPEND = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


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
    chain: list[BaseException | None] = [error]
    found: dict[int, BaseException] = {}
    frames: set[FrameType] = set()
    while chain:
        current = chain.pop()
        if current is None or id(current) in found:
            continue
        found[id(current)] = current
        chain += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            chain += current.exceptions
        step = current.__traceback__
        while step is not None:
            _clear(step.tb_frame, frames)
            step = step.tb_next
    return list(found.values())


def _clear(frame: FrameType, seen: set[FrameType]) -> None:
    """Clear a frame of a traceback, and its callers up to a frame that has not ended."""
    caller: FrameType | None = frame
    while caller is not None and caller not in seen:
        # `clear` would close a caller that is suspended.
        if caller is not frame and caller.f_code.co_flags & _CAN_SUSPEND:
            return
        seen.add(caller)
        try:
            caller.clear()
        except RuntimeError:  # the frame is running, and so are its callers
            return
        caller = caller.f_back
