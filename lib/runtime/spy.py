"""Old name of `record_torch_calls.py`, for notebooks that import it."""

from lib.runtime.record_torch_calls import watch_calls as watch  # noqa: F401
