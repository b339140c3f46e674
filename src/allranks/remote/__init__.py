"""Master-worker mode: one process drives all others, as one drives a GPU. docs/master_worker.md is for users.

How the processes come together, and how they end:

- start: a program becomes a master.  meet: master and workers find each other.  crew: those that the master starts.
- board: native groups among any of them.  serve: a worker's main.

What torch sees, on the master:

- device: the name ``worker``.  torch_worker: the module ``torch.worker``, and ``torch.accelerator``.
- tensor: handles, and how operations on them are queued.
- signature: shapes that are known before an operation has run.  lines: the program's line that an operation is from.
- composites, modules, saving, compilers: where torch's own code would treat a handle otherwise than a tensor of a CPU.
- autocast, generators, flags: what torch keeps for a device, or for a process, and its kernels go by.
- groups: one handle, many workers.  functions: any Python there.  capture: a whole step as one command.

Between them:

- master: queues and asks.  wire: the messages.  worker: runs and answers (a package of its own).
- faults: what stands for a tensor that could not be made.
"""
