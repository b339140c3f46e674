"""Definitions that master and workers share.

- arguments: the grammar of a call's arguments.  wire: the messages.
- signature: the shape, dtype and strides of tensors, and of results before they exist.
- flags: the flags of torch.  faults: the placeholder for a tensor that could not be computed.
"""
