"""The decisions of the launcher, as pure state machines: no socket, no process, no clock, no signal handler.

- round: one round of a job, from the start of the ranks to the exit code.  job: the rounds, including the restarts.
- root_cause: selects the failure that caused the others.  stack_request: requested stacks of ranks.
- interface: the events that ``round`` receives, besides those of ``spec/events``, and the actions that it returns.

``runtime/loop``, ``jobs/local`` and ``jobs/multi_host`` perform the actions. ``tests/launch/job_simulation.py`` runs
this loop on simulated hosts.
"""
