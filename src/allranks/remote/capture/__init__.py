"""A whole step as one command.

- capture: records a step, verifies it and replays it.  recording: what a call has queued.  replay: what workers know.
- watch: what a step reads from Python.
"""
