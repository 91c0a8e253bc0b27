"""What each kernel of .venv reads first; `make setup` puts it there.

A kernel warns that what it says to its notebook is not encrypted. It is said on this machine only, and a build of the
book starts a kernel for each chapter.
"""

import logging

logging.getLogger("IPKernelApp").addFilter(lambda record: "without encryption" not in str(record.msg))
