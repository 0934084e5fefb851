"""`runner chaos`: a job is run once in peace, then again under faults, and both must end in the same bits.

campaign    the two runs, which fault when, and what is expected of each
faults      the catalog of what can be done to a training
subject     a training as it is seen from outside
invariants  what must hold after every fault, and at the end
compare     two checkpoints, bit for bit (the one module here that needs torch, in a process of its own)
verdict     the table and the JSON file
"""
