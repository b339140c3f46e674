"""What every other room stands on: errors, threads, forks, the console. Nothing here imports torch."""
