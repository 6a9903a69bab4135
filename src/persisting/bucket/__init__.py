"""The backends: ``backend`` is the async shell, ``bucket`` the synchronous core below it.

``chunk`` accepted records on their way · ``snapshot`` a consistent view · ``journal`` the use of
the log · ``flushing`` what goes to the table · ``waiters`` consumers that wait.
"""
