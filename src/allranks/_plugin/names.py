"""The names of the backend for torch and for users."""

__all__ = ["INSTEAD_OF_GLOO", "NAME"]

NAME = "allranks"
INSTEAD_OF_GLOO = "ALLRANKS_INSTEAD_OF_GLOO"
