"""10.3: two reports of a hang; in each, one action is missing from one rank's list."""

from dataclasses import replace

from course.check.table import findings

RIGHT = {"1": "1SEND_F3", "2": "3RECV_F2"}

MISTAKES = """
1: "0RECV_B2" | "1RECV_B2" | "2RECV_F3" | "3SEND_B2"
or
2: "0RECV_B1" | "1RECV_B1" | "2SEND_F2" | "3SEND_B2"
    a rank waits in this call, so the call was made.
        Which call should meet it on the peer?
1: "1SEND_B2" | "2SEND_B2" | "2RECV_B2"
or
2: "1SEND_B1" | "2SEND_B1" | "2RECV_B2"
    this action comes later in its rank's list.
        Find the call in which that rank waits now, and its partner.
1: "1SEND_F4" | "1SEND_F2"
or
2: "3RECV_F3"
    that is the message of a different microbatch.
        Microbatches are numbered from 0: a message of 16 · (k + 1) elements belongs to microbatch k.
1: "1SEND_B3"
or
2: "3RECV_B2"
    that message goes the other way.
        F is the direction of activations, from rank 0 to rank 3; B is the direction of gradients, back to rank 0.
"""

TABLE = findings("10.3", "missing_calls", "Report", (), RIGHT, MISTAKES)
EXERCISE = replace(TABLE, parts=("Report 1", "Report 2"))
