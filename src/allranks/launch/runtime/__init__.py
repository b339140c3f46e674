"""The loop that runs every round of a job.

- loop: `RoundLoop` passes events to ``policy/round`` and performs the actions that it returns.
- agents: the interface of the object that runs the ranks: this host's agent, or the agents of several hosts.
- job_control: the terminal.  statistics, last_calls, summaries: what the launcher prints about a round.
"""
