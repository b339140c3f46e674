"""Starts and watches the ranks of other hosts: one agent on each host.

- ``link``           messages over a pair of descriptors
- ``inquiries``      answers commands that request the state of the ranks
- ``agent_command``  the command of an agent, and why an agent did not start (pure)
- ``serve``          an agent in a separate process
- ``hosts``          one host of a job
- ``agent_links``    the links to all agents: descriptors, messages, the loss of a host
- ``host_admission`` hosts that are started, that connect, and that return after a loss
- ``agent_pool``     all agents of a job, behind the interface of one agent
"""
