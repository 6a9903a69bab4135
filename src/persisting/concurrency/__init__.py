"""Threads, timers and event loops: how blocking work is run and awaited.

``pool`` threads for blocking work · ``loop_bridge`` fast switches between an event loop and a
thread · ``timer`` one timer thread · ``coalesced`` background tasks that run one at a time ·
``await_first`` coroutines that nobody has awaited yet · ``closing`` what an ``async with`` block
closes.
"""
