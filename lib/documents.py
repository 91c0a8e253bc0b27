"""Several documents in one sequence: a token attends to earlier tokens of one document alone.

The problem: sequences of one length are filled with documents of many lengths. Without a border, a token attends to the
end of a document that has nothing to do with its own.
The idea: number the documents of a row; the causal mask is cut into blocks, one for each number. Which tokens are in
which document follows from the tokens, before any rank takes a part of them.

Shapes: B rows of T tokens; t queries and S keys, at any positions of these T: a range of them.

Source: Llama Team, 2024, arXiv 2407.21783, section 3.2 (a mask between documents matters for very long sequences).
"""

import torch
from torch import Tensor, nn

from lib.model import Heads


def documents_of(tokens_BT: Tensor, end: int) -> Tensor:
    """Number of the document of each token, int64[B, T]: a document ends with its token `end`."""
    ends = (tokens_BT == end).long()
    return ends.cumsum(-1) - ends


def check_documents(documents_BT: Tensor | None, rows: int, length: int) -> None:
    """Check that each token of these rows, of all ranks, has the number of a document; [1, T] is for every row.

    Raises:
        ValueError: numbers of some of the tokens, of more, or of different rows.
    """
    if documents_BT is not None and documents_BT.shape not in ((rows, length), (1, length)):
        raise ValueError(
            f"documents have shape {list(documents_BT.shape)}, and attention is over [{rows}, {length}] tokens: number "
            "all tokens of each sequence, also those of other ranks, as documents_of(tokens, end) does"
        )


def positions_in(tokens: range, device: torch.device | None = None) -> Tensor:
    """The positions of a range of tokens, int64[t]."""
    stop = max(tokens.start, tokens.stop)  # an empty range may stop before it starts
    return torch.arange(tokens.start, stop, tokens.step, device=device)


def seen_keys(
    queries: range, keys: range, documents_BT: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Which keys a query attends to: those at its position or before, in its document. bool[t, S], or [B, 1, t, S].

    Args:
        documents_BT: as `documents_of` returns it; None: a sequence is one document.
    """
    queries_t, keys_S = positions_in(queries, device), positions_in(keys, device)
    seen = keys_S <= queries_t[:, None]
    if documents_BT is None:
        return seen
    same = documents_BT[:, queries_t, None] == documents_BT[:, None, keys_S]
    return (seen & same)[:, None]


def see_documents(model: nn.Module, documents_BT: Tensor | None) -> None:
    """Set the documents of the next rows in every attention of a model."""
    for module in model.modules():
        if isinstance(module, Heads):
            module.documents = documents_BT
