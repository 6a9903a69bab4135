"""Topics shared by processes of one user on one machine, without a cluster.

A bucket has one owner, the process that holds its lock, or its lease in an object store. The owner
listens on a Unix socket, which the lock's note or the lease names. Other processes send it the
cluster's requests (``cluster.wire``) and use the cluster's client: only the transport and the way
to find an owner are different.

The owning side: ``server`` answers the connections of one topic · ``loop_thread`` its event loop ·
``open_buckets`` the services of the buckets that this process has open · ``quick_puts`` small puts
and short lists, past the services.

The calling side: ``open_shared`` opens writers and readers · ``shared_topic`` a topic that this
process may own in part · ``shared_reader`` a topic that it only reads · ``forwarding_client`` the
calls of a bucket that are the same for both · ``loop_topic`` the owners elsewhere, as one event
loop reaches them · ``put_turns`` the order of puts that wait for an owner · ``owner_notes`` who
owns a bucket, by locks or leases · ``socket_locator`` the way to that process · ``connection``
calls and streams over one socket.

Between them: ``frames`` messages as bytes · ``addresses`` where sockets are · ``peers`` who may
connect · ``open_sockets`` keeps them out of forked processes.

``socket_groups`` has both sides of work groups: one process keeps a group, the others call it.
"""
