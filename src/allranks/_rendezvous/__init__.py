"""How the ranks of a job find each other: where the store is, who is which rank, and when all have joined."""
