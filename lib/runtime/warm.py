"""Imported by the server: all of `lib`, so that no rank has to.

What cannot be imported (a file was edited) is left to the rank that asks for it, which then says why.
"""

import contextlib
import gc
import importlib
import pkgutil

import lib

modules = [module.name for module in pkgutil.walk_packages(lib.__path__, "lib.", onerror=lambda name: None)]
modules.append("torch._dynamo")  # which an optimizer's first step imports, for 1.5 s
for name in modules:
    if not name.endswith("__main__"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)

# Imports leave garbage, such as copies of `sys.modules`. A rank that collects it writes into 8 MB of pages that it
# shares with the server: each is copied first, and that takes longer than anything else at a rank's start.
gc.collect()
gc.freeze()
