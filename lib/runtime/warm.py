"""Imported by the server: all of `lib`, and what judges answers, so that no rank has to; but nothing that has answers.

A module that cannot be imported (its file was edited) is skipped; the rank that needs it then raises the error.
"""

import contextlib
import gc
import importlib
import os
import pkgutil

import lib
from lib.runtime.places import ROOT

modules = [module.name for module in pkgutil.walk_packages(lib.__path__, "lib.", onerror=lambda name: None)]
# A rank imports the exercise that it runs; a grader's ranks, which come from here, must have no right program.
# A cluster has `lib` alone; a package called `course` that is elsewhere is not ours.
judge = pkgutil.iter_modules([os.path.join(ROOT, "course", "check")])
modules += [f"course.check.{module.name}" for module in judge if module.name != "catalogue"]
modules.append("torch._dynamo")  # the first step of an optimizer imports it, for 1.5 s
for name in modules:
    if not name.endswith("__main__"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)

# Imports leave garbage, such as copies of `sys.modules`. A rank that collects it writes into 8 MB of pages shared with
# the server: each page is copied first, which takes longer than any other step of starting a rank.
gc.collect()
gc.freeze()
