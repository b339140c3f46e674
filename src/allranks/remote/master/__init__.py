"""The process that drives the workers.

- start: a program becomes a master.  master: the `Master` that it gets.
- connections: commands and answers.  operator_cache: the calls that workers know.  transfers: tensors that move.
  device_table: the workers and groups that devices mean.
- groups: one handle for many workers.  functions: any Python function on a worker.
"""
