"""Predicted costs: bytes, seconds, operations, bubbles, each from a formula with its source.

May import nothing else. It is pure Python, so that a planner or a web page never waits for torch.
Must never know an implementation: the predictions of this room must agree with measurements made elsewhere.
"""

from lib.cost.comm import block_wire_bytes, comm_s, wire_bytes, zero_wire_bytes
from lib.cost.held import activation_bytes, state_bytes
from lib.cost.sizes import forward_flops, train_flops, train_s

__all__ = ["activation_bytes", "block_wire_bytes", "comm_s", "forward_flops", "state_bytes", "train_flops", "train_s"]
__all__ += ["wire_bytes", "zero_wire_bytes"]
