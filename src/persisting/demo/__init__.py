"""The demo: agents store trajectories, one is killed, and their data is recovered and used.

``trajectories`` the records · ``producer`` a process that puts them · ``story`` the steps and the
claims they check · ``report_charts`` throughput and latency, in the terminal and as a page.
"""
