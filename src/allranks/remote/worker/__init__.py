"""A worker: runs what the master has queued, in order, and answers where it is asked.

- interpreter: decodes frames, and runs operators.  template: what a worker knows of a call.
- orders: what it does beside operators.  program: a captured step.
- state: what all of these read and change.
"""
