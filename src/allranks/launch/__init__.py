"""``allranks run``: starts the ranks of a job, shows what they print, and stops all when one fails.

The map, from words to processes. Nothing here imports torch: ``--help`` and errors are instant, and the launcher
works where torch is broken. Only ``ranks.preload`` imports it, by name, in the process that ranks are forked from.

- ``cli``, ``torchrun``  command lines -> an exit code
- ``call``        ``allranks.run``: a function in the place of a command line
- ``jobs``        what happens to a job when: started, watched, stopped, blamed, started again
- ``arguments``   words -> ``Options``, ours and torchrun's; how many ranks that means for each host
- ``agents``      what starts and watches the ranks of other hosts, and the connections to them
- ``output``      bytes of many ranks -> one screen and many files
- ``ranks``       what runs on one host: an agent, its ranks, and all that is between them
- ``spec``        a job as data: ``Options``, what is run, messages between launcher and agents
- ``stacks``      where ranks are, from their tracebacks (pure)
- ``signals``     handlers of launcher and agents
- ``reporter``       what the launcher reports to the user

``allranks._rendezvous`` and ``allranks._store`` decide how ranks find each other. The launcher only keeps a store
server for them.
"""
