"""The training loop that survives losses, and its promise.

The promise: after a loss, the training has the same bits as a run without a loss (if a process replaces the rank). It
covers the following state. Each line names the module that restores it.

- Parts of the State: parameters, buffers, gradients, optimizer states, plain values: ``coverage``.
- Variables that the loop carries from one step to the next: ``variables``.
- Values that differ between ranks (``own``, diverged buffers and variables): ``backups``. A backup rank stores them.
- Random numbers: ``seeds``. They follow from the position of the step.
- The position in the data: ``batches``, with a DistributedSampler, or a source that can be iterated again.
- Results of calls before the loop: ``_elastic/replay``.

How it is checked:

- The first steps observe everything that the program changes (``learning``, ``audit``). State that nothing above covers
  is an error on every rank. It names the variable and the line to add.
- After a recovery, the ranks compare hashes of everything that they have in common. They repeat this every some steps,
  in less than 0.5 % of the time (``step_commit``). A difference is a ``StateLostError`` on every rank.
- ``allranks run --rehearse`` kills ranks on purpose and compares the results (``rehearsal``).

Not covered: objects declared as ``local``, files that the program writes, and results of functions whose order of
additions is not fixed, such as some CUDA kernels. With fewer ranks than before, batches are distributed differently, so
the result is correct but has other bits.
"""
