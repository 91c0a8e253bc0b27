"""The book: its figures, and what builds its pages. It may import `lib` and `course`, which do not know it."""

from pathlib import Path

from lib.runtime.places import stands_on_lib

stands_on_lib(str(Path(__file__).parent))
