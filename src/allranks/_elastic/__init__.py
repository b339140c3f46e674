"""Membership of a job after a loss, and training that continues. README.md follows a loss to the repeated step."""
