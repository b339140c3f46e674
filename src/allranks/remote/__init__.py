"""Master-worker mode: one process drives all others, as one drives a GPU.

- start: a program becomes a master.  meet, board, crew: how the processes come together, and how they end.
- device, tensor: what torch sees.  signature: shapes that are known before an operation has run.  lines: whose it is.
- master: queues and asks.  wire: in which words.  worker, orders: runs and answers.  faults: what went wrong.
- groups: one handle, many workers.  functions: any Python there.  capture: a whole step as one command.
"""
