"""The environment of this process: its launcher or scheduler, its host, its network. Does not import torch."""
