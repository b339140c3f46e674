"""Master-worker mode: one process drives all others, as one drives a GPU. docs/master_worker.md is for users.

- capture: a whole step as one command.  data_parallel: `torch.nn.DataParallel` on workers.
- master: the process that drives the others.
- torch_device: what makes ``worker:1`` a device of torch.
- worker: executes what the master has queued.
- bootstrap: how the processes come together, and how they end.
- protocol: what master and workers share.

Each package imports only those below it; ``.importlinter`` has the order inside the packages, too.
"""
