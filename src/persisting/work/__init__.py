"""Work groups: every record is leased, acknowledged, retried and given up on its own.

One process keeps a group: it holds the lock of the group's folder, the state in memory and the
journal on disk. All members, in this process or in others, call it. Records do not pass through
the keeper: it knows offsets, and a member reads the records of its leases as any reader does.

The state: ``open_records`` the columns of open records · ``state`` the pure state machine.

The keeper: ``journal`` operations and snapshots in a log · ``keeper`` calls, waiting members and
syncs · ``clock`` its time · ``feed`` the ends of the buckets and fields of records ·
``dead_letters`` the topic of the records that failed · ``breaker`` slows a failing group down ·
``kept_group`` all of these together.

The member: ``open_group`` checks before it joins · ``client`` the way to the keeper · ``reader``
what users open · ``delivery`` one leased record · ``run`` handlers with retries ·
``letter_search`` finds dead letters.
"""
