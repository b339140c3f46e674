"""How the master and its workers connect, and how they terminate.

- workers: the master gathers its workers.  worker_pool: the workers that it starts itself.
- worker_context: a worker finds the master.  endpoint: the first messages between master and worker.
- group_registry: native groups among any of the processes.
"""
