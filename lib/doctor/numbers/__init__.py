"""Is a program the same training as one process? Four lines write a step down, and a command compares two of them.

The chain of a step: weights, data, loss, gradients, norm, clipped gradients, options, updates, buffers.

May import `lib.runtime`.
Must never know a layer of this library, or a framework that the program did not load.
"""

from lib.doctor.numbers.comparison import Comparison, compare_numbers
from lib.doctor.numbers.page import page_of_numbers
from lib.doctor.numbers.recorded_numbers import Numbers, read_numbers
from lib.doctor.numbers.start import start_from
from lib.doctor.numbers.torch_insides import CannotSee
from lib.doctor.numbers.watch import Watch, watch

__all__ = ["CannotSee", "Comparison", "Numbers", "Watch", "compare_numbers", "page_of_numbers", "read_numbers"]
__all__ += ["start_from", "watch"]
