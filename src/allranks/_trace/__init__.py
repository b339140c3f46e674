"""The record of calls: who waits for whom, who is late, where the time goes.

- memory: where this process records its calls.  reader: reads what a process has recorded, also of another process.
- files: trace files.  matching: which calls of several processes belong together.  clocks: how their clocks differ.
- timeline: all of it on one clock.  chrome, page, picture: draw that; colours.
- flight_recorder: calls as torch's tool reads them.

Imports no torch: the launcher reads what its ranks record.
"""
