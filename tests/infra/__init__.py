"""What the tests stand on: servers, networks, schedulers and disks that can be made to fail.

Everything here is part of this repository. What it starts (radosgw, Slurm, namespaces, ...) is listed, with the way to
install it, in `parts`.
"""
