"""`runner chaos`: run a job fault-free, then again under injected faults, and require bit-identical results.

campaign        the fault-free run, the runs under faults, and the comparison of their last checkpoints
round           one run under faults: setting up, injecting, checking
draw            which fault comes next, and at which moment
moments         waiting for a moment (start-up, restore, step, save)
recovery        waiting for the run to notice a fault and to continue
progress        what a journal says about a run, and the restarts that the injected faults account for
faults          the catalog of faults
scene           what a fault may touch, and when it may be injected
run_under_test  the run's processes, seen from outside
invariants      what must hold after every fault, and at the end
compare         two checkpoints, bit for bit (the only module here that needs torch, in its own process)
verdict         the table and the JSON file
"""
