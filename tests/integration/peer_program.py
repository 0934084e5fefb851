"""One side of a connection between two runners, as a program: prints the time of every change.

python peer_program.py leader|member HOST PORT SECONDS
"""

from __future__ import annotations

import sys
import time
from typing import Any

from runner.peers.link import Leader, Member
from runner.peers.messages import Hello
from runner.system.event_loop import EventLoop

SECRET = b"the secret of this test"


def main() -> None:
    role, host, port, seconds = sys.argv[1:]
    loop, address = EventLoop(), (host, int(port))
    side: Any
    if role == "leader":
        side = Leader(address, 2, loop, lambda number, message: None, secret=SECRET)
    else:
        side = Member(address, Hello(node_rank=1), loop, lambda message: None, read_secret=lambda: SECRET)
    loop.every(0.5, side.check)
    was, until = False, time.monotonic() + float(seconds)
    while time.monotonic() < until:
        loop.pump(0.1)
        connected = bool(side.present) if role == "leader" else side.connected
        if connected != was:
            was = connected
            print("connected" if was else "lost", time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
