"""Imported by the server: all of `lib`, so that no rank has to.

What cannot be imported (a file was edited) is left to the rank that asks for it, which then says why.
"""

import contextlib
import importlib
import pkgutil

import lib

for module in pkgutil.walk_packages(lib.__path__, "lib.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
