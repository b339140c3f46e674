"""The device ``worker`` of torch, on the master: handles, and how operations on them are queued.

- device: registers the device with torch.  torch_worker: the module ``torch.worker``, and ``torch.accelerator``.
- tensor: `RemoteTensor`.  handle: its state, and the calls that workers know.  devices: which workers a device means.
- dispatch: how an operation is queued.  special: the operators that are not simply queued.
- exchange: a group's tensor and its workers', as autograd sees them.
- call_site: the program's line that an operation comes from.
- composites, modules, saving, compilers: where torch's own code would treat a handle otherwise than a tensor of a CPU.
- autocast, generators: what torch keeps for a device.
"""
