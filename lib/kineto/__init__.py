"""Traces of `torch.profiler`, of any PyTorch program, as a `Trace` of all ranks.

The problem: the file of one rank has a hundred thousand events, each backend names its messages differently, each host
has its own clock, and a file may be missing, cut off or of another step.
The idea: read what a file says (`files`, `names`, `calls`), find which calls of different ranks are one (`groups`,
`pairing`), and keep what could not be found beside what was. Who judges (`lib.doctor.traces`) can then say what it did
not see.

May import `lib.cost` and `lib.trace`.
Must never guess: a call without a certain partner is counted, and not compared.
"""

from lib.kineto.files import TraceError
from lib.kineto.names import kind_meant
from lib.kineto.recorded import Recording, exposed_s, length_s, matched, read_traces, waits, waits_s

__all__ = ["Recording", "TraceError", "exposed_s", "kind_meant", "length_s", "matched", "read_traces"]
__all__ += ["waits", "waits_s"]
