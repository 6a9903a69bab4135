"""Work groups: every record is leased, acknowledged, retried and given up on its own.

One process keeps a group: it holds the lock of the group's folder, the state in memory and the
journal on disk. All members, in this process or in others, call it. Records do not pass through
the keeper: it knows offsets, and a member reads the records of its leases as any reader does.

The state: ``group_values`` what keeper, members and journal exchange · ``state`` the pure state
machine · ``bucket_state`` its part for one bucket · ``open_records`` the columns of open records ·
``record_order`` when and in which order records are delivered · ``turns`` the bucket that a claim
begins with · ``numbered_claims`` claims that can be repeated · ``letter_numbers`` numbers of dead
letters.

The keeper: ``keeper`` calls, waiting members and syncs · ``journal`` operations and snapshots in a
log · ``group_storage``, ``store_group`` the group in a folder, in an object store · ``group_place``
the groups of a topic · ``members`` what is known of each member · ``group_numbers`` what is in
flight · ``clock`` its time · ``feed`` the ends of the buckets and fields of records ·
``dead_letters`` the topic of the records that failed · ``breaker`` slows a failing group down ·
``kept_group`` all of these together.

The member: ``open_group`` checks before it joins · ``group_client`` the way to the keeper ·
``work_reader`` what users open · ``session`` one member for all readers of an event loop ·
``fetches`` their fetches in few calls · ``leased_records``, ``near_reads`` reading the records of
leases · ``record_cache`` records that are read ahead · ``delivery`` one leased record · ``run``
handlers with retries · ``letter_search`` finds dead letters.
"""
