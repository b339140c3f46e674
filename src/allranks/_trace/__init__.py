"""The record of calls: who waits for whom, who is late, where the time goes.

- memory: where this process records its calls.  reader: reads what a process has recorded, also of another process.

Imports no torch: the launcher reads what its ranks record.
"""
