"""What happens to a job when: ranks are started, watched, stopped, blamed and started again.

- job: where this process is, and so what is left to do.  local: a job on this host.  spread: a job on several.
- supervise: one round, from the first rank's start to the last one's end.  root_cause: which failure came first.
- job_control: the keys of a terminal.  error_file: what torchelastic's callers read.
"""
