"""What runs on one host.

- ``environ``    the environment of a rank
- ``placement``  which CPUs and which GPU each rank gets
- ``preload``    imports torch into the process that ranks are forked from
- ``imports``    what a program imports, told from its source
- ``pipes``      the pipes and terminals between a rank and its agent
- ``terminal``   the launcher's terminal, and who may read it
- ``guard``      kills the ranks' process groups when their agent is killed
- ``rank``       what a rank does before, around and after the user's program
- ``function``   a function on its way to the ranks, and results and exceptions on their way back
- ``recording``  the memory in which a rank records its calls
- ``agent``      starts the ranks and reports what they do
- ``template``   the process from which ranks are replaced
"""
