"""The life of a job: its ranks are started, watched, stopped, blamed and restarted.

- job: selects the kind of job from the place of this process.  local: a job on this host.
- multi_host: a job on several hosts.
- error_file: the file that torchelastic's callers read.  rehearsal: ``--rehearse``.
"""
