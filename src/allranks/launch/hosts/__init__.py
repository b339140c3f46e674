"""What reaches other hosts.

- ``link``   messages over a pair of descriptors
- ``door``   where agents dial in, and how
- ``ways``   the commands that start an agent elsewhere: ssh, srun, ... (pure)
- ``serve``  an agent in a process of its own
- ``fleet``  all agents of a job, as one
"""
