"""Where this process runs: its launcher or scheduler, its host, its network. Nothing here imports torch."""
