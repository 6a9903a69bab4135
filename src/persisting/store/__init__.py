"""Object stores: the seam for everything that a topic keeps in S3, Google Cloud Storage or Azure.

``storage_options`` credentials and settings, which are never shown · ``object_store`` the calls:
get, create, swap, list, delete, and those of backups for large objects · ``probe`` whether a store
obeys the conditions that everything rests on · ``register`` a small JSON object changed by
compare-and-swap.

Folders keep their own seam, :mod:`persisting.fs`: a folder has locks, appends and syncs, and an
object store has conditional writes. Neither imitates the other.
"""
