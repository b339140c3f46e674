"""Words in, ``Options`` out.

- ``options``   the arguments of ``allranks run``
- ``meeting``   those about how hosts meet, shared with torchrun
- ``torchrun``  the arguments of torchrun and torch.distributed.launch, in terms of the above
- ``layout``    how many ranks each host gets
"""
