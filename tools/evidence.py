"""Write lib/planner/evidence.json: how far the planner misses published runs. Used by `make evidence` and `make lint`.

tools/evidence.py            # after a change of the planner, or a new row in book/published
tools/evidence.py --check    # write nothing, fail if a number of it is not of today's planner and rows
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from book.published.missed import all_missed  # noqa: E402
from lib.planner.evidence import EVIDENCE  # noqa: E402


def main(args: list[str]) -> int:
    if args not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    lines = (f"{json.dumps(name)}: {json.dumps(of, ensure_ascii=False)}" for name, of in all_missed().items())
    now = "{\n" + ",\n".join(lines) + "\n}\n"
    kept = EVIDENCE.read_text(encoding="utf-8") if EVIDENCE.exists() else ""
    if args:
        if now != kept:
            print(f"{EVIDENCE.relative_to(ROOT)} is not of today's planner and rows: make evidence", file=sys.stderr)
        return now != kept
    EVIDENCE.write_text(now, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
