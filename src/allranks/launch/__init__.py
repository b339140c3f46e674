"""``allranks run``: starts the ranks of a job, shows what they print, and stops all when one fails.

The map, from pure to worldly. Nothing here imports torch: ``--help`` and errors are instant, and the launcher
works where torch is broken. Only ``job.preload`` imports it, by name, in the process that ranks are forked from.

- ``cli``        the command line -> an exit code
- ``options``    arguments -> ``Options``
- ``target``     what to run (script, module, command), checked before anything starts
- ``environ``    what a rank's environment says
- ``messages``   what an agent tells its launcher: output, failure report, exit
- ``output``     bytes of many ranks -> lines of one screen (pure)
- ``collapse``   the same line of many ranks -> one line (pure)
- ``stacks``     where ranks are, from what they say of it (pure)
- ``placement``  which CPUs and which GPU each rank of a host gets
- ``blame``      which failure is the cause, and how it is told (pure)
- ``outlet``     one of this process's own descriptors, written without ever blocking
- ``logs``       log files, in torchrun's layout too
- ``screen``     this process's stdout and stderr, and the log files
- ``wires``      the pipes and terminals between a rank and its agent
- ``guard``      kills the ranks' process groups when the launcher is killed
- ``rank``       what a rank does before, around and after the user's program
- ``agent``      starts the ranks of this host and reports what they do
- ``supervise``  the loop: events in, signals in; stops the job
- ``job``        puts the above together

How ranks find each other is ``allranks._store``'s and ``allranks._rendezvous``'s business; the launcher only
keeps a store server for them.
"""
