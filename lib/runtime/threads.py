"""Which threads of this process may send before they receive: while one may, ranks that wait are not stuck forever.

A rank waits in a call, and a thread of the reader computes, sleeps or reads a file: nobody knows what it will send.
Only threads that run nothing of the reader, wait in a call, or wait for another thread without a limit send nothing.
"""

import sys
import threading
import traceback
import types

from lib import mesh
from lib.runtime import pending, places, record_torch_calls

# Files in the stack of a thread that waits for ranks.
_IN_CALL = {pending.__file__, record_torch_calls.__file__, mesh.__file__}


def is_free(frame: types.FrameType) -> bool:
    """Whether a thread, by its innermost frame, neither waits in a call nor for another thread."""
    files = [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
    joins = files[0] == threading.__file__ and frame.f_locals.get("timeout", 0) in (None, -1)  # without a limit
    return not joins and not _IN_CALL & {*files}


def is_readers(frame: types.FrameType) -> bool:
    """Whether a thread runs code of the reader."""
    return not all(places.is_library(caller.f_code.co_filename) for caller, _ in traceback.walk_stack(frame))


def may_send() -> bool:
    """Whether the main thread, or another one that runs code of the reader, may still send."""
    main = threading.main_thread().ident
    frames = sys._current_frames().items()
    return any(is_free(frame) for ident, frame in frames if ident == main or is_readers(frame))
