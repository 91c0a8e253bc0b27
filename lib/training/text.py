"""The text of a run: the little stories of the book, or a file of your own.

The problem: a run reads its text again and again: on every rank, on every machine, after a pause of a week. A file that
has changed since is a different run, with the same settings and no error.
The idea: the settings of a run hold the SHA-256 of its file. Whoever reads the file compares it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import lru_cache

from lib import data
from lib.data import Corpus
from lib.layout import whole_number
from lib.text import TEXT

TOKENS = ("bytes", "characters")
VALIDATION = 0.1  # of a text
SHARED_BY = 64  # characters are rounded up to a multiple of it, so that tensor-parallel ranks can share a vocabulary


@dataclass(frozen=True)
class Text:
    """What a run trains on, and how much the trained model writes.

    Args:
        text: file to train on instead of the little stories, the same on all machines; its last tenth is kept for
            validation.
        tokens: what a token is: a byte, of any file, or a character, of a file in UTF-8.
        sample: tokens that the trained model writes at the end of a run, on rank 0, which then holds the full model; 0
            is none.
        sha256: of the file; "" before it was read.

    Raises:
        ValueError: an invalid value.
    """

    text: str | None = None
    tokens: str = "bytes"
    sample: int = 0
    sha256: str = ""

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens={self.tokens!r} must be one of {', '.join(TOKENS)}")
        whole_number("sample", self.sample, 0)

    def read(self, context: int) -> Text:
        """The same with the SHA-256 of the file, after a look whether sequences of `context` tokens can be cut from it.

        Raises:
            ValueError: it cannot be read, is not UTF-8 where a token is a character, or is too short.
        """
        raw = self._bytes()
        known = replace(self, sha256=hashlib.sha256(raw).hexdigest() if self.text else "")
        if self.text is None:  # they are long enough for a split, and may be too short for this context
            data.windows(known.load().validation, context, limit=1)
            return known
        try:
            length = len(raw.decode()) if self.tokens == "characters" else len(raw)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--text {self.text} is not UTF-8, in which characters are read here: its byte {error.start} is "
                f"0x{raw[error.start]:02x}; use --tokens bytes, which takes any file, or convert it, such as with iconv"
            ) from None
        kept = int(length * VALIDATION)
        if kept <= context:
            shorter = f", or --context {kept - 1} or less" if kept > 1 else ""
            raise ValueError(
                f"--text {self.text} has {length} {self.tokens}, of which the last tenth, {kept}, is kept for "
                f"validation; a sequence of --context {context} tokens and its last target need {context + 1} there: "
                f"give a file of {10 * (context + 1)} or more{shorter}"
            )
        return known

    def load(self) -> Corpus:
        """Its tokens. The last text is kept, so that a summary after hours does not read a file that may be gone.

        Raises:
            ValueError: the file cannot be read, or has changed.
        """
        return _load(self) if self.text else data.load(None, VALIDATION, self.tokens == "characters")

    def vocab_size(self) -> int:
        """Size of the vocabulary: 256 bytes, or the characters of the text, rounded up to a multiple of `SHARED_BY`."""
        return -(-self.load().num_tokens // SHARED_BY) * SHARED_BY

    def named(self) -> str:
        """The text in a few words."""
        of = f"{self.text} (SHA-256 {self.sha256[:12]})" if self.text else "the little stories"
        return of if self.tokens == "bytes" else f"the characters of {of}"

    def _bytes(self) -> bytes:
        if self.text is None:
            return TEXT
        if os.path.exists(self.text) and not os.path.isfile(self.text):
            raise ValueError(f"--text {self.text} is no regular file: each rank reads it, and a pipe is read once")
        try:
            with open(self.text, "rb") as file:
                return file.read()
        except OSError as error:
            raise ValueError(f"--text {self.text} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=1)
def _load(text: Text) -> Corpus:
    raw = text._bytes()
    if text.sha256 and hashlib.sha256(raw).hexdigest() != text.sha256:
        raise ValueError(f"--text {text.text} has changed since the run was started; start it again")
    return data.load(raw, VALIDATION, text.tokens == "characters")
