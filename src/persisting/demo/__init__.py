"""The demonstration: five minutes of an agent team's data, made, lost, found and used.

``trajectories`` the records · ``producer`` a process that puts them · ``story`` what happens, and
what it shows · ``charts`` throughput and latency, in the terminal and as a page.
"""
