"""A worker: executes what the master has queued, in order, and answers where it is asked.

- main: a worker that runs no program of the user's.
- interpreter: decodes frames, and executes operators.  template: what a worker knows of a call.
- generated: the functions that are made of templates.
- commands: what it does beside operators.  program: a captured step.
- state: what all of these read and change.  recording: what has been executed, for the timeline.
"""
