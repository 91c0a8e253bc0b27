# Run this cell first. It finds the book's library, here or in Colab, and leaves torch as it is.
import importlib.util, os, subprocess, sys, zipfile
from pathlib import Path

REPOSITORY = "https://example.invalid/parallel-by-hand"
BRANCH = "main"
os.environ["BOOK_PAGE"] = "tools/setup_cell.py"


HOW = "download parallel-by-hand.zip from the book's page 'Read it offline', put it beside this notebook"


def has_book(folder):
    init = Path(folder, "lib", "__init__.py")
    return init.is_file() and 'BOOK = "parallel-by-hand"' in init.read_text(encoding="utf-8")


def unpack(path, folder):
    """The zip's library, where it is newer than the folder's or some of it is missing; your files stay as they are."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        inits = [name for name in names if name.endswith("lib/__init__.py")]
        if not inits:
            raise ImportError(f"{path.name} is the wrong zip, without the library: {HOW}, and run this cell again.")
        top = min(inits, key=len)[: -len("lib/__init__.py")]
        files = {name[len(top) :]: name for name in names if name.startswith(top)}
        library = [name for name in files if name.startswith(("lib/", "course/", "book/"))]
        whole = has_book(folder) and all((folder / name).is_file() for name in library)
        old = not whole or path.stat().st_mtime > (folder / "lib" / "__init__.py").stat().st_mtime
        for name in sorted(files, key="lib/__init__.py".__eq__):  # that one last: until then it is no book
            if not (folder / name).is_file() or (old and name in library):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(archive.read(files[name]))
    return old


def find_book():
    for name in ("lib", "course", "book"):
        origin = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and not (origin and has_book(Path(origin).parents[1])):
            raise ImportError(
                f"Another package called {name} is imported already: restart, then run this cell first."
            )
    here, spec = Path.cwd(), importlib.util.find_spec("lib")
    installed = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    beside = here / "parallel-by-hand"
    for folder in [here, *here.parents, *installed]:
        if has_book(folder) and folder != beside:
            return str(folder)
    # A browser may have renamed the zip; parallel-by-hand-pages.zip is the site.
    zips = [path for path in here.glob("parallel-by-hand*.zip") if path.is_file() and "-pages" not in path.name]
    if zips:
        newest = max(zips, key=lambda path: path.stat().st_mtime)
        try:
            is_new = unpack(newest, beside)
        except ImportError:
            raise
        except Exception as error:  # of the zip, of the compression, of the disk
            how = "wait until it is uploaded, or upload it again, then run this cell again"
            size = newest.stat().st_size
            raise ImportError(f"{newest.name} ({size:,} bytes) cannot be unpacked ({error}): {how}.") from None
        if is_new and beside in installed:  # by an earlier run of this cell
            how = "restart the kernel, then run this cell first"
            raise ImportError(f"{newest.name} has a newer library, unpacked now: {how}.")
    unpacked = [lib.parent for deep in ("", "*/") for lib in sorted(here.glob(f"parallel-by-hand*/{deep}lib"))]
    for folder in [beside, *unpacked]:
        if has_book(folder):
            return str(folder)
    if "example.invalid" not in REPOSITORY and not zips:
        command = ["git", "clone", "-q", "--depth", "1", "--branch", BRANCH, REPOSITORY, "parallel-by-hand"]
        git = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if git.returncode:
            raise ImportError(f"The book could not be fetched from {REPOSITORY}: {' '.join(git.stdout.split())}")
    if not has_book(beside):
        site = next(here.glob("parallel-by-hand*-pages*.zip"), None)
        wrong = f"{site.name} is the wrong zip, with the pages" if site else "No library here"
        raise ImportError(f"{wrong}: {HOW}, and run this cell again.")
    return str(beside)


sys.path.insert(0, find_book())
import lib

lib.ready(sys.path[0])  # is this kernel new enough? cloudpickle is installed if it is missing, torch never
