"""Several documents in one sequence: a token attends to earlier tokens of its own document, and to no other.

The problem: sequences of one length are filled with documents of many lengths. Without a border, a token attends to the
end of a document that has nothing to do with its own.
The idea: number the documents of a row; the causal mask is cut into blocks, one for each number. Which tokens are in
which document follows from the tokens, before any rank takes a part of them.

Shapes: B rows of T tokens; t queries and S keys, at any positions of these T.

Source: Llama Team, 2024, arXiv 2407.21783, section 3.2 (a mask between documents matters for very long sequences).
"""

from torch import Tensor, nn


def documents_of(tokens_BT: Tensor, end: int) -> Tensor:
    """Number of the document of each token, int64[B, T]: a document ends with its token `end`."""
    ends = (tokens_BT == end).long()
    return ends.cumsum(1) - ends


def seen_keys(queries_t: Tensor, keys_S: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """Which keys a query attends to: those at its position or before, in its document. bool[t, S], or [B, 1, t, S].

    Args:
        queries_t, keys_S: their positions in the sequence.
        documents_BT: as `documents_of` returns it; None: a sequence is one document.
    """
    seen = keys_S <= queries_t[:, None]
    if documents_BT is None:
        return seen
    same = documents_BT[:, queries_t, None] == documents_BT[:, None, keys_S]
    return (seen & same)[:, None]


def see_documents(model: nn.Module, documents_BT: Tensor | None) -> None:
    """Set the documents of the next rows in every attention of a model."""
    for module in model.modules():
        if hasattr(module, "documents"):
            module.documents = documents_BT
