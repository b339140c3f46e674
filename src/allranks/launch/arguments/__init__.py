"""Parses command lines: words in, ``Options`` out.

- ``options``     the arguments of ``allranks run``
- ``rendezvous``  the arguments for the rendezvous of hosts, shared with torchrun
- ``torchrun``    the arguments of torchrun and torch.distributed.launch, translated to those of ``allranks run``
- ``layout``      the number of ranks of each host
"""
