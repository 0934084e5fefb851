"""Writes checkpoints as an agent does, in a process that may die: writer.py LOCATION begin:1 commit:2 remove:1 aside:2

Says what it does, and when it is done with it.
"""

from __future__ import annotations

import sys

from support import LARGE_BYTES, PART_BYTES, commit, commit_split, commit_together  # type: ignore[import-not-found]

from checkpointing.commit import replicated_save as split
from checkpointing.errors import CheckpointError
from checkpointing.storage import open_storage, s3_multipart


def main(location: str, *operations: str) -> None:
    s3_multipart._PART_BYTES = PART_BYTES
    split.PATIENCE_S = 1.0
    storage, attempt = open_storage(location), 1
    for operation in operations:
        print("doing", operation, flush=True)
        name, _, number = operation.partition(":")
        try:
            match name:
                case "begin":
                    attempt = int(number)
                    storage.begin_attempt(attempt)
                case "commit":
                    commit(storage, int(number), attempt)
                case "commit-large":
                    commit(storage, int(number), attempt, LARGE_BYTES)
                case "commit-together":
                    commit_together(location, int(number), attempt)
                case "commit-split":
                    commit_split(location, int(number), attempt)
                case "remove":
                    storage.remove(int(number))
                case "aside":
                    storage.quarantine(int(number), "superseded")
                case _:
                    raise ValueError(operation)
        except (CheckpointError, OSError) as error:
            print("failed", operation, str(error).replace("\n", " "), flush=True)
            if name == "begin":
                # It is over before it began; the supervisor starts the next.
                attempt += 1
                storage.begin_attempt(attempt)
        else:
            print("done", operation, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
