"""The device ``worker`` of torch, on the master: handles, and how operations on them are queued.

- device: registers the device with torch.  torch_worker: the module ``torch.worker``, and ``torch.accelerator``.
- tensor: `RemoteTensor`.  handle: its state, and its calls.  devices: the workers of a device.
- dispatch: queues an operation.  special: the operators that are not simply queued.
- exchange: a group's tensor and its workers' tensors, as autograd sees them.
- call_site: the line of the program that an operation comes from.
- composites, modules, saving, compilers: code of torch that would treat a handle differently from a CPU tensor.
- autocast, generators: the state that torch keeps for a device.
"""
