"""Why a rank ends, where torchrun says it last.

The problem: a rank that cannot start prints one sentence, and torchrun prints a traceback of its own and a table of all
ranks below, 68 lines without it. The idea: torchrun names to each rank a file, `TORCHELASTIC_ERROR_FILE`. What a rank
leaves there stands at the end of the table, as the root cause.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress


def leave_last_word(sentence: str) -> None:
    """Let torchrun end with this sentence; without torchrun nothing happens."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": sentence, "timestamp": str(int(time.time()))}  # as torch's own `record` writes it
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": sentence, "extraInfo": more}}, file)
