"""What goes wrong in a run, other than a hang (`hang.py`) and calls that do not match (`call_table.py`)."""


class RunError(RuntimeError):
    """A run failed."""


class RankError(RunError):
    """A rank raised an exception, exited, or was killed.

    Attributes:
        rank, ranks: the rank that failed; a tuple of it alone.
        error, trace_back: the name of the exception's type, and the traceback, which the message also contains; both
            are "" if there was no exception.
    """

    def __init__(self, message: str, rank: int = 0, error: str = "", trace_back: str = "") -> None:
        super().__init__(message)  # `pickle` makes it of this alone, and then adds the attributes
        self.rank, self.ranks, self.error, self.trace_back = rank, (rank,), error, trace_back


class RunTimeout(RunError, TimeoutError):
    """The ranks were still computing when the time limit passed.

    Attributes:
        ranks: for whom the others waited.
        held_bytes: memory that all ranks held together.
    """

    ranks: tuple[int, ...] = ()
    held_bytes: int = 0


class StartError(RunError, ValueError):
    """The variables of torchrun contradict each other or this machine, or the ranks do not agree.

    Attributes:
        ranks: that did not come, or cannot connect.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
