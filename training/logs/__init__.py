"""Loggers: each writes what it is told of a run in a thread of its own, so that no step waits for a file."""
