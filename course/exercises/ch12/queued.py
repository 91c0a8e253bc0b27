"""What an object keeps in its queue, whatever form the queue has, and at each instruction of its class."""

import gc
import sys
from contextlib import contextmanager
from types import FrameType, FunctionType, GeneratorType, ModuleType

import torch


@contextmanager
def at_each_step(later, look):
    """Call `look` at each instruction of its class and what is beside it: a queue may be too long between two."""
    methods = (f for one in type(later).__mro__ for f in vars(one).values() if isinstance(f, FunctionType))
    files = {method.__code__.co_filename for method in methods}

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def queued(later, sizes, in_forward):
    """How many ∂y an object keeps: tensors of these sizes that forward did not have, in any place."""
    found, seen, left = set(), set(), [later]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FrameType, GeneratorType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found |= {one.data_ptr()} if one.numel() in sizes else set()
        elif isinstance(one, FunctionType):
            left += [one.__closure__, one.__defaults__]  # and not all names of its file
        elif not (isinstance(one, dict) and "__builtins__" in one):
            left += gc.get_referents(one)
    return len(found - in_forward)
