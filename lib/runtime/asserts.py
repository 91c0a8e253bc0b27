"""Asserts of tests, which show values in a rank as they do in pytest.

The problem: pytest compiles the asserts of a test's module so that their error shows values. A rank that imports the
module gets them as Python compiles them, and a test fails there with `AssertionError` and no word.
The idea: the caller says which modules pytest compiled, and a rank imports these with pytest's own function.
"""

import ast
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Collection

_HOOK = "_pytest.assertion.rewrite"


def modules_of_tests() -> list[str]:
    """The modules of this process that pytest compiled; none without pytest."""
    if _HOOK not in sys.modules:
        return []
    modules = list(sys.modules.items())
    return [name for name, module in modules if type(getattr(module, "__loader__", None)).__module__ == _HOOK]


class _Finder:
    """Finds the modules of tests where Python finds them, and lets pytest compile them."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: list[str] | None = None, target: object = None) -> object:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.names else None
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_Loader(name, spec.origin))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name: str) -> types.CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts  # pytest has no public name for it

        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def import_with_values(names: Collection[str]) -> None:
    """Import these modules so, from now on."""
    if names:
        sys.meta_path.insert(0, _Finder(names))
