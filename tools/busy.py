"""Runs a command on a machine that is busy: python tools/busy.py make book

Beside it run three endless loops, and a program that sends itself 50 MB/s over the loopback interface, as a laptop's
other programs do. No claim, test or build may depend on a machine that does nothing else. The neighbours end with the
command, or when this process is gone.
"""

import subprocess
import sys

LOOPS = 3
WATCH = "import os, socket, threading, time\nparent = os.getppid()\n"
LOOP = WATCH + "while os.getppid() == parent: sum(range(100_000))"
TRAFFIC = (
    WATCH
    + """
listens = socket.create_server(("127.0.0.1", 0))
sends = socket.create_connection(listens.getsockname())
takes, _ = listens.accept()

def take():
    while takes.recv(2**20):
        pass

threading.Thread(target=take, daemon=True).start()
due_s = time.monotonic()
while os.getppid() == parent:
    sends.sendall(bytes(10**6))
    due_s = max(due_s + 0.02, time.monotonic() - 1)
    time.sleep(max(0, due_s - time.monotonic()))
"""
)


def main(command: list[str]) -> int:
    neighbours = [subprocess.Popen([sys.executable, "-c", program]) for program in [LOOP] * LOOPS + [TRAFFIC]]
    try:
        return subprocess.run(command).returncode
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
