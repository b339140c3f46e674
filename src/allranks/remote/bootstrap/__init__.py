"""How the master and its workers come together, and how they end.

- workers: the master gathers its workers.  worker_pool: those that it starts itself.
- worker_context: a worker finds the master.  endpoint: what the two send to each other first.
- group_registry: native groups among any of them.
"""
