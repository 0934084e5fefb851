"""Files of this project in folders that others may write to: no link that somebody has put there is followed."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path


class ForeignLink(OSError):
    """In the place of a file of this project there is a link to another one; it was neither read nor changed."""

    def __init__(self, path: Path) -> None:
        text = f"{path.name} is a link that this run has not made; replace it by a copy, or remove it"
        super().__init__(errno.ELOOP, text, str(path))


def open_own(path: Path, flags: int, mode: int | None = None) -> int:
    """Open a file of this project, and return its descriptor.

    Args:
        path: The file.
        flags: As for open(2); without O_TRUNC, since a file is only truncated once it is known to be ours.
        mode: Of a new one; None for one that only this user reads, and the user's group where the umask shares files.

    Raises:
        ForeignLink: It is a symbolic link, or one of several names of its file.
        OSError: It cannot be opened.
    """
    try:
        # A pipe in its place is not waited for.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, private_mode() if mode is None else mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignLink(path) from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise ForeignLink(path)
    return fd


def make_own_folder(path: Path, *, parents: bool) -> None:
    """Make a folder that only this user reads, as `open_own` has it, unless there is one.

    Raises:
        ForeignLink: There is a symbolic link of that name that somebody else has made.
        OSError: It cannot be made.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(0o700 if private_mode() == 0o600 else 0o770, exist_ok=True)
    check_own_folder(path)


def check_own_folder(path: Path) -> None:
    """Check that a folder is no link that somebody else has made, to a folder of this user; raises ForeignLink."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
        raise ForeignLink(path)


def private_mode() -> int:
    """Return 0o600; 0o660 where the umask lets the group write new files, as on a volume that its members share."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return 0o660 if found is not None and not int(found[1], 8) & 0o060 else 0o600
