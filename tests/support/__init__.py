"""Helpers that several test files share. README.md lists them."""
