"""What starts and watches the ranks of other hosts: an agent on each.

- ``link``           messages over a pair of descriptors
- ``listener``           where agents connect to the launcher, and how
- ``agent_command``  the command of an agent, and why it did not come up (pure)
- ``serve``          an agent in a process of its own
- ``pool``          all agents of a job, as one
"""
