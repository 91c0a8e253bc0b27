"""The course: it judges answers, grades homeworks, and packs them. It may import `lib`, which does not know it."""

from pathlib import Path
from pkgutil import iter_modules

from lib.runtime.places import stands_on_lib

_HERE = Path(__file__).parent
# What judges answers is in every rank from its start. The catalogue is not, because a grader's ranks must hold no right
# program: a rank imports the one exercise that it runs.
_CHECK = (module.name for module in iter_modules([str(_HERE / "check")]))
stands_on_lib(str(_HERE), *(f"course.check.{name}" for name in _CHECK if name != "catalogue"))
