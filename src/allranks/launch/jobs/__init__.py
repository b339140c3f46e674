"""What happens to a job when: ranks are started, watched, stopped, blamed and started again.

- job: where this process is, and so what is left to do.  local: a job on this host.  spread: a job on several.
- error_file: what torchelastic's callers read.  rehearsal: ``--rehearse``.
"""
