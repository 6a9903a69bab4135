"""Threads, timers and the bridge between event loops and threads."""
