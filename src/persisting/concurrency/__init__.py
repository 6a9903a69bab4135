"""Threads, timers and event loops: how blocking work is run and awaited."""
