"""``allranks run``: starts the ranks of a job, shows what they print, and stops all when one fails.

The map, from words to processes. Nothing here imports torch: ``--help`` and errors are instant, and the launcher
works where torch is broken. Only ``ranks.preload`` imports it, by name, in the process that ranks are forked from.

- ``cli``         the command line -> an exit code
- ``call``        ``allranks.run``: a function in the place of a command line
- ``arguments``   words -> ``Options``, ours and torchrun's; how many ranks that means for each host
- ``job``         where a job runs: here, on other hosts, among callers, or in place
- ``local``       a job on this host, forked from this process
- ``spread``      a job on other hosts: agents are started or let in, and then rounds are run
- ``supervise``   the loop of a round: events in, signals in; stops the job
- ``blame``       which failure is the cause, and how it is told (pure)
- ``stacks``      where ranks are, from what they say of it (pure)
- ``error_file``  the cause, for whoever started torchrun
- ``signals``     handlers of launcher and agents
- ``job_control`` Ctrl-Z, and who may read the terminal
- ``messages``    what launchers and agents say to each other
- ``output``      bytes of many ranks -> one screen and many files
- ``ranks``       what runs on one host: an agent, its ranks, and all that is between them
- ``hosts``       what reaches other hosts: lines to agents, how they are started there, all of them as one

How ranks find each other is ``allranks._store``'s and ``allranks._rendezvous.rendezvous``'s business; the launcher only
keeps a store server for them.
"""
