"""What master and workers share.

- arguments: the grammar of a call's arguments.  wire: the messages.
- signature: what tensors look like, and results before they are there.
- flags: torch's own.  faults: what stands for a tensor that could not be made.
"""
