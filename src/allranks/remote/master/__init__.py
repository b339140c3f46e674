"""The process that drives the workers.

- start: turns a program into a master.  master: the `Master` that it receives.
- connections: commands and answers.  operator_cache: the calls with templates on workers.
- transfers: tensors that move.  device_table: the workers and groups that devices stand for.
- groups: one handle for many workers.  functions: any Python function on a worker.
"""
