"""Bytes of many ranks -> one screen and many files.

- ``lines``        bytes of many ranks -> lines of one screen (pure)
- ``collapse``     the same line of many ranks -> one line (pure)
- ``nonblocking``  one of this process's own descriptors, written without blocking
- ``logs``         log files, including torchrun's layout
- ``bar``          the progress bar of ``allranks.run``
- ``screen``       this process's stdout and stderr, and the log files
"""
