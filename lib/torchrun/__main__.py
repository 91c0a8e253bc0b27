"""`python -m lib.torchrun …` is `torchrun …`, with a sentence below its traceback if machines do not come together.

The problem: torchrun waits for all machines before it starts a rank, so no program can say who is missing. After ten
minutes it prints the lines of its own code, and `RendezvousTimeoutError`. The idea: the same program, and a sentence.
"""

import socket
import sys

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.run import get_args_parser, main


def sentence_for(error: Exception, words: list[str]) -> str:
    """What a machine that waits for the others can say of them.

    Args:
        words: of the command line.
    """
    args = get_args_parser().parse_args(words)
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer than {args.nnodes} machines came to {args.rdzv_endpoint or 'the meeting point'} in time: start "
            "torchrun on each of them, with the same --nnodes, --rdzv-endpoint and --rdzv-id, and see what it says "
            "there (--rdzv-conf join_timeout=120 is the wait, in seconds)"
        )
    return (
        f"this machine does not reach {args.rdzv_endpoint}: torchrun must run on that machine, this machine must know "
        "its name, and no firewall may close the port"
    )


if __name__ == "__main__":
    try:
        main()
    except (RendezvousTimeoutError, RendezvousConnectionError, socket.gaierror) as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(f"\npython -m lib.torchrun: {sentence_for(error, sys.argv[1:])}")
