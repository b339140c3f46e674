"""The record of calls: which ranks wait for which, which ranks are late, and how the time is spent.

- memory: the memory in which this process records its calls.  reader: reads the record of this or another process.
- files: trace files.  matching: finds the calls of several processes that belong together.  clocks: differences of
clocks.
- timeline: all calls on one clock.  chrome, page, picture: draw the timeline; colours.
- flight_recorder: writes calls in the format of torch's tool.

Imports no torch, because the launcher reads the records of its ranks.
"""
