"""The lowest layer of the package: errors, threads, forks, the console. No module of this layer imports torch."""
