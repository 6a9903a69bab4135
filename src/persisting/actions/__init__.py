"""Plans, checks and reads with typed results, shared by the command line and the console.

- ``text_values``: durations, sizes and times as people write them.
- ``record_window``: records of a bucket with their positions and timestamps.
- ``group_reset``, ``restore_plan``, ``retention_plan``: what a change would do, before it is done.
- ``verification``: the files and logs of a topic compared with what was written.
"""
