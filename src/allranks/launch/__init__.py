"""``allranks run``: starts the ranks of a job, shows their output, and stops all ranks if one fails.

This list leads from words to processes. No module of this package imports torch, so ``--help`` and errors are instant,
and the launcher works if torch is broken. Only ``ranks.preload`` imports it, by name, in the process that ranks are
forked from.

- ``cli``, ``torchrun``  command lines -> an exit code
- ``call``        ``allranks.run``: a function instead of a command line
- ``progress``    ``allranks.progress``: the progress of a function of ``allranks.run``
- ``jobs``        the life of a job: its ranks are started, watched, stopped, blamed, restarted
- ``runtime``     the loop of a round, and the interface of what runs ranks
- ``policy``      state machines that decide what follows an event: signals, the cause, another round
- ``arguments``   words -> ``Options``, of allranks and of torchrun; number of ranks of each host
- ``agents``      starts and watches the ranks of other hosts, and connects to their agents
- ``output``      bytes of many ranks -> one screen and many files
- ``ranks``       the code of one host: an agent, its ranks, and the channels between them
- ``spec``        a job as data: ``Options``, the target, messages between launcher and agents
- ``signals``     handlers of launcher and agents
- ``reporter``    the launcher's own lines for the user

``allranks._rendezvous`` and ``allranks._store`` decide how ranks connect to each other. The launcher only runs a store
server for them.
"""
