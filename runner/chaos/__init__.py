"""`runner chaos`: run a job fault-free, then again under injected faults, and require bit-identical results.

campaign        the fault-free run, the runs under faults, and the comparison of their last checkpoints
round           one run under faults: drawing, injecting, checking
recovery        waiting for the run to notice a fault and to continue; the restarts that faults account for
faults          the catalog of faults
scene           what a fault is, what it may touch, and when it may be injected
sandbox         the run's own clock, memory, and way to its object store
run_under_test  the run's processes, seen from outside
invariants      what must hold after every fault, and at the end
compare         two checkpoints, bit for bit (the only module here that needs torch, in its own process)
verdict         what was found, as a table and as JSON
node_campaign   the same for the nodes of a run (node_faults) on machines (cluster) that a network connects
"""
