"""Predictions beside measurements: `python -m book.published FILE.json`, of rows as in `book/published/runs.json`."""

import argparse
import json

from book.published import RUNS
from book.published.rows import predict, read_rows, rows_json, rows_text


def main(argv: list[str] | None = None) -> None:
    about = "Predict the steps of published runs, and print the errors."
    parser = argparse.ArgumentParser(prog="python -m book.published", description=about)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("rows", nargs="?", default=RUNS, metavar="FILE.json", help="default: those of the book")
    parser.add_argument("--json", action="store_true", help="plain data instead of text")
    args = parser.parse_args(argv)
    try:
        predictions = [predict(row) for row in read_rows(args.rows)]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(rows_json(predictions), indent=1) if args.json else rows_text(predictions))


if __name__ == "__main__":
    main()
