"""The code that runs on one host.

- ``environ``    the environment of a rank
- ``placement``  the CPUs and the GPU of each rank
- ``preload``    imports torch into the process that ranks are forked from
- ``imports``    the imports of a program, read from its source
- ``pipes``      the pipes and terminals between a rank and its agent
- ``terminal``   the launcher's terminal, and the process group that may read it
- ``guard``      kills the ranks' process groups when their agent is killed
- ``rank``       the steps of a rank before, around and after the user's program
- ``function``   a function on its way to the ranks, and results and exceptions on their way back
- ``recording``  the memory in which a rank records its calls
- ``rank_processes``  the processes of the ranks: their output, their state, signals to them
- ``agent``      starts the ranks, restarts them, and reports their events
- ``host_round``  the preparation and the start of a round, in the required order
- ``template``   the process from which ranks are replaced
"""
