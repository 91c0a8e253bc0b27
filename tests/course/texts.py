"""The texts of a file: those of archives in it, of strings in JSON and compiled Python, behind escapes and base64."""

import base64
import binascii
import gzip
import html
import importlib.util
import io
import json
import marshal
import re
import tarfile
import types
import zipfile
from collections.abc import Iterator
from typing import Any

BASE64 = re.compile(rb"[A-Za-z0-9+/]{40,}={0,2}")
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\[nrt]")
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")


def texts(data: bytes) -> Iterator[str]:
    """Each text that somebody who has the file can read in it."""
    if members := of_archive(data):
        for content in members.values():
            yield from texts(content)
        return
    if data.startswith(importlib.util.MAGIC_NUMBER):
        yield "\n".join(_constants(marshal.loads(data[16:])))
        return
    text = data.decode(errors="ignore")
    yield text
    if ESCAPED.search(text):
        yield ESCAPED.sub(lambda match: chr(int(match[1] or match[2] or "20", 16)), text)
    if text.lstrip().startswith(("{", "[")):
        try:
            strings = [*_strings(json.loads(text))]
        except ValueError:  # it only begins so
            strings = []
        yield "".join(strings)  # a notebook may hold a cell as a list of its lines
        data = "\n".join(re.sub(r"\s", "", one) for one in strings).encode()  # and base64 in lines
    for encoded in BASE64.findall(data):
        try:
            decoded = base64.b64decode(encoded)
            decoded if of_archive(decoded) else decoded.decode()  # a picture is no text
        except (binascii.Error, UnicodeDecodeError):
            continue
        yield from texts(decoded)


def of_archive(data: bytes) -> dict[str, bytes]:
    """Name → content of the files in an archive; empty if it is none."""
    if data.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {one: archive.read(one) for one in archive.namelist()}
    if data.startswith(b"\x1f\x8b"):
        return {"": gzip.decompress(data)}
    if data[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            return {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}
    return {}


def letters(text: str) -> str:
    """The letters and digits of a text, which stay when a format adds tags and marks, or breaks lines elsewhere."""
    return re.sub(r"[\W_]+", "", html.unescape(TAG.sub("", text))).casefold()


def _constants(code: types.CodeType) -> Iterator[str]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _constants(one)
        else:
            yield str(one)


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | dict):
        for one in node.values() if isinstance(node, dict) else node:
            yield from _strings(one)
