"""Environments that come with the library."""
