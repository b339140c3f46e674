"""The names by which torch and users know the backend."""

__all__ = ["INSTEAD_OF_GLOO", "NAME"]

NAME = "allranks"
INSTEAD_OF_GLOO = "ALLRANKS_INSTEAD_OF_GLOO"
