"""Processes that share a topic by its socket, compared with one process and with SQLite."""
