"""Whether a forward writes into parameters.

The problem: `nn.Embedding(max_norm=...)` rescales the rows that it looks up, and some layers clamp or normalise their
weights in forward. In one process this is harmless. With several ranks each writes what its own rows need, with several
microbatches it is written several times, and a shard that is gathered for a forward is lost after it.
The idea: each write in place raises the version of a tensor, by which autograd finds that a saved tensor has changed.
A write through `p.data` raises none.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

WRITTEN_IN_FORWARD = (
    "the forward of this module writes into its parameter {}, as nn.Embedding(max_norm=...) does: each rank would "
    "write other values, and FSDP would lose them. Write it after step(), equally on all ranks, or compute with a "
    "changed copy of it"
)


@contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """A context for a forward of the module.

    Raises:
        RuntimeError: a parameter was written or replaced inside.
    """
    before = [(name, p, _version_of(p)) for name, p in module.named_parameters()]
    yield
    after = dict(module.named_parameters())
    for name, p, version in before:
        if after.get(name) is not p or _version_of(p) != version:
            raise RuntimeError(WRITTEN_IN_FORWARD.format(name))


def _version_of(p: nn.Parameter) -> int:
    """How often a parameter was written; 0 if it was made in inference mode, where torch does not count."""
    return 0 if p.is_inference() else p._version
