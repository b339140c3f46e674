"""What the launcher decides, as pure state machines: no socket, no process, no clock, no signal handler.

- round: one round of a job, from the start of the ranks to the exit code.  job: the rounds, that is the restarts.
- root_cause: which failure is the cause of the others.  stack_request: stacks that ranks were asked for.
- interface: the events that ``round`` takes, besides those of ``spec/events``, and the actions that it returns.

``runtime/loop``, ``jobs/local`` and ``jobs/spread`` perform the actions. ``tests/launch/job_simulation.py`` runs this
loop on simulated hosts.
"""
