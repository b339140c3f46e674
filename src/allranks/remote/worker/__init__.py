"""A worker: executes the commands that the master has queued, in order, and answers if requested.

- main: a worker that does not run a user program.
- interpreter: decodes frames, and executes operators.  template: the worker's description of a call.
- generated: the functions that are generated from templates.
- commands: commands other than operators.  program: a captured step.
- state: the state that all of these read and change.  recording: executed commands, for the timeline.
"""
