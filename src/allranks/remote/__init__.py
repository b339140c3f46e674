"""Master-worker mode: one process drives all others like GPUs. The user guide is docs/master_worker.md.

- capture: a whole step as one command.  data_parallel: `torch.nn.DataParallel` on workers.
- master: the process that drives the others.
- torch_device: registers ``worker:1`` as a device of torch.
- worker: executes the commands that the master has queued.
- bootstrap: how the processes connect, and how they terminate.
- protocol: the definitions that master and workers share.

Each package imports only those below it in this list. ``.importlinter`` also defines the order inside the packages.
"""
