"""Serialisation of objects sent to ranks and returned by them: pickled, the bytes of tensors stored separately.

The problem: a pickled tensor takes its full storage along, even if it is a small slice of it; and two tensors on one
storage (weights tied through `.data`) become separate.
The idea: the pickle only names storages. Each is written once, and only the stretch that the sent tensors use. The
receiver allocates the full size, so all offsets hold; bytes that were not sent are never touched, and take no memory.
"""

import io
import pickle
import sys
import types
from collections.abc import Callable

import cloudpickle
import torch
from torch.storage import TypedStorage, UntypedStorage


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.stretches: dict[int, tuple[UntypedStorage, int, int]] = {}  # by the storage's address in C++
        self._globals = self.globals_ref[id(vars(sys.modules["__main__"]))] = {}  # cloudpickle fills it

    def reducer_override(self, thing: object) -> tuple:
        """Code keeps the name of its file, for tracebacks and reports: cloudpickle 3.1.3 leaves it out."""
        if isinstance(thing, types.CodeType):
            make, args = self.dispatch_table[types.CodeType](thing)
            return _code, (thing.co_filename, make, args)
        return super().reducer_override(thing)

    def persistent_id(self, thing: object) -> tuple | None:
        """The name of a storage, or of the globals of `__main__`; None for an object pickled as usual."""
        if thing is self._globals:
            return "__main__", dict(thing)
        if isinstance(thing, torch.Tensor):
            if thing.device.type == "cpu" and thing.layout is torch.strided:
                first = thing.storage_offset()
                last = first + sum((n - 1) * stride for n, stride in zip(thing.shape, thing.stride(), strict=True))
                end = last + 1 if thing.numel() else first
                self._needs(thing.untyped_storage(), first * thing.element_size(), end * thing.element_size())
            return None
        storage = thing._untyped_storage if isinstance(thing, TypedStorage) else thing
        if not isinstance(storage, UntypedStorage) or storage.device.type != "cpu":
            return None
        if storage is thing or storage._cdata not in self.stretches:  # the storage itself is sent
            self._needs(storage, 0, storage.nbytes())
        return storage._cdata, getattr(thing, "dtype", None)

    def _needs(self, storage: UntypedStorage, start: int, end: int) -> None:
        _, first, last = self.stretches.get(storage._cdata, (storage, start, end))
        self.stretches[storage._cdata] = storage, min(first, start), max(last, end)


def _code(file: str, make: Callable, args: tuple) -> types.CodeType:
    return make(*args).replace(co_filename=file)


class Pickled:
    """A packed object of `size_bytes`; an error of pickling is raised here."""

    def __init__(self, thing: object) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(thing)
        self._body, self._stretches = file.getbuffer(), pickler.stretches
        self.size_bytes = len(self._body) + sum(end - start for _, start, end in self._stretches.values())

    def write(self, path: str) -> None:
        with open(path, "wb") as file:
            rows = [(name, storage.nbytes(), *ends) for name, (storage, *ends) in self._stretches.items()]
            pickle.dump(rows, file)
            for storage, start, end in self._stretches.values():
                file.write(_bytes(storage)[start:end])
            file.write(self._body)


class _Unpickler(pickle.Unpickler):
    storages: dict[int, UntypedStorage]
    main: dict[str, object]

    def persistent_load(self, name: tuple) -> TypedStorage | UntypedStorage | dict:
        if name[0] == "__main__":
            self.main.update(name[1])
            return self.main
        storage, dtype = self.storages[name[0]], name[1]
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True) if dtype else storage


def read(path: str, main: dict[str, object]) -> object:
    """Read a packed object; functions that were defined in `__main__` get `main` as their globals."""
    with open(path, "rb") as file:
        unpickler = _Unpickler(file)
        unpickler.storages, unpickler.main = {}, main
        for name, n_bytes, start, end in pickle.load(file):
            storage = unpickler.storages[name] = UntypedStorage(n_bytes)
            file.readinto(_bytes(storage)[start:end])
        return unpickler.load()


def _bytes(storage: UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy())
