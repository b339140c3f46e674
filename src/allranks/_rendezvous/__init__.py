"""Rendezvous: how the ranks of a job find the store, agree on their rank numbers, and detect that all have joined."""
