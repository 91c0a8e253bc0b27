"""Old name of `pending.py` and `emulated_link.py`, for notebooks that import it."""

from lib.runtime.emulated_link import Link, along, link  # noqa: F401
from lib.runtime.pending import Pending, collective, message  # noqa: F401
