"""A whole step as one command.

- capture: records a step, verifies it and replays it.  recording: the calls that a step has queued.  replay: the
  workers' programs.
- watch: the values that a step reads from Python.
"""
