"""Commits versions of a table in an object store, under a fence.

A commit of Lance is atomic there and durable when it returns, but it does not keep a former owner
out: an append with an outdated handle is rebased and accepted. A **fence** does. It is a commit
that changes nothing, and that lands directly after the version that it read or fails. Lance
refuses appends, rewrites and changes of columns whose handle is older than the newest fence. Every
owner begins with one, and every commit carries the owner's term.

Some operations pass a fence and are not used on such tables: Restore, changes of the config, and
the creation of a table that exists, which with retries replaces its content. Others pass and do no
harm: an index of older rows, reserved fragment numbers. tests/store/test_lance_fence.py has the
whole matrix. A commit may also succeed at a version that no reader sees, if it was delayed while
others committed and removed old versions. So after anything but a commit directly after the version
that it read, and the newest now, the committer fences again and checks the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from persisting.errors import OwnershipLost, TableError
from persisting.records import EMPTY
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table import compaction, files, layout, properties, versions
from persisting.table.commit import Batch, Committer, view_of
from persisting.table.compaction import Run
from persisting.table.lance_errors import lance_errors_as, own_handle, reason
from persisting.table.properties import OPERATION, RESTORES, SEQUENCE, START, TERM
from persisting.table.view import TableView, sizes_of

log = logging.getLogger("persisting")

_FENCES = 20
"""Attempts to fence; each fails only because another commit came first."""


class NewerView(NamedTuple):
    """A version that was loaded for reading, and is not shown yet."""

    view: TableView
    properties: dict[str, str]


class FencedCommitter(Committer):
    """The newest version of the table at ``root``, and the only way to commit another.

    Not thread-safe: the caller holds the table.
    """

    root: StoreAddress  # type: ignore[assignment]

    def __init__(self, root: StoreAddress, options: StorageOptions) -> None:
        self.root, self.options = root, options
        self.view = TableView(None, EMPTY)
        self.properties: dict[str, str] = {}
        self.checksums_recorded = True
        self.undo_pending = False
        self.term = 0
        """The number of this process's ownership; 0 for a reader."""
        self._must_fence = False
        """Whether a commit of this process may have landed, or may still land, unseen."""

    @property
    def is_uncertain(self) -> bool:
        """Whether a commit of this process may have landed, or may still land, unseen."""
        return self._must_fence

    # Opening

    def load(self, version: int | None = None) -> Any | None:
        """Return a handle of a version, by default the newest; None if there is no table."""
        import lance

        with self._translated("open"):
            try:
                dataset = lance.dataset(
                    str(self.root), version=version, storage_options=self.options.for_lance
                )
            except ValueError as exc:
                if version is None and "was not found" in str(exc):
                    return None
                raise
            layout.logical_schema(dataset.schema, self.root)
            return dataset

    def follow_newest(self) -> bool:
        """Show the newest version; return whether that is another one than the view.

        One request if it is not.
        """
        newer = self.load_newer()
        return newer is not None and self.follow(newer)

    def load_newer(self, *, only_next: bool = False) -> NewerView | None:
        """Load the newest version for :meth:`follow`, None if that is the view's.

        Changes nothing. With ``only_next`` it asks only for the version with the next number, a
        cheaper request. That version may have been removed before it was asked for, so a follower
        of the table omits ``only_next`` from time to time.
        """
        dataset = self.view.dataset
        if dataset is not None:
            if only_next and self._store.size(files.manifest_name(dataset.version + 1)) is None:
                return None
            with self._translated("open"):
                if dataset.latest_version == dataset.version:
                    return None
        return self.load_newest()

    def load_newest(self) -> NewerView | None:
        """Load the newest version and its properties; None if there is no table."""
        newest = self.load()
        if newest is None:
            return None
        with self._translated("read"):
            kept = properties.read_from_store(newest)
        view = view_of(newest, self.root, properties.start_of(kept))  # type: ignore[arg-type]
        return NewerView(view, kept)

    def follow(self, newer: NewerView) -> bool:
        """Show a version that was loaded; return whether it is newer than the view."""
        if self.view.dataset is not None and newer.view.version <= self.view.version:
            return False
        self.view, self.properties = newer.view, newer.properties
        return True

    def take(self, term: int, load: Callable[[], NewerView | None] | None = None) -> None:
        """Fence the table for this ownership; a table that does not exist is created.

        ``load`` returns what :meth:`load_newest` has returned earlier, or raises what it raised. A
        former owner may have committed since, and removed that version: then the fence fails, and
        the newest version is loaded.
        """
        self.term = term
        self._fence(load)

    def _fence(self, load: Callable[[], NewerView | None] | None = None) -> None:
        """Commit a fence after the newest version, and show that.

        Versions of a later owner are never shown: a commit after its fence would pass it.
        """
        self._must_fence = True
        for _ in range(_FENCES):
            ahead, load = load, None
            try:
                if self._fence_version((ahead or self.load_newest)()):
                    self._must_fence = False
                    return
            except TableError:
                if ahead is None:
                    raise
        raise TableError(
            f"cannot fence the table {self.root}: other commits came first {_FENCES} times; is "
            "another program writing to it?"
        )

    def _fence_version(self, newest: NewerView | None) -> bool:
        """Commit a fence behind a version, and show that; False if that version is not the newest.
        Without a version, create the table."""
        if newest is None:
            self._create_empty()
            return False
        self._check_term(newest.properties)
        self.view, self.properties = newest
        return self._commit_fence()

    def _check_term(self, found: Mapping[str, str]) -> None:
        newest = properties.term_of(found)
        if newest > self.term:
            raise OwnershipLost(
                f"another process has taken over the table {self.root} (term {newest}; this "
                f"process has {self.term})",
                hint="open the topic again",
            )

    def _create_empty(self) -> None:
        """Commit the first version, without rows or fields.

        Without retries: Lance would repeat it on a table that another process has created and
        filled meanwhile, and replace everything in it.
        """
        import lance

        physical = layout.physical_schema(EMPTY, None)
        transaction = lance.Transaction(
            0,
            lance.LanceOperation.Overwrite(physical, []),
            transaction_properties=properties.sealed(
                {SEQUENCE: "0", TERM: str(self.term), OPERATION: "create"}
            ),
        )
        try:
            lance.LanceDataset.commit(
                str(self.root),
                transaction,
                enable_stable_row_ids=True,
                max_retries=0,
                storage_options=self.options.for_lance,
            )
        except Exception as exc:
            if self.load() is None:
                raise TableError(
                    f"cannot create the table {self.root}: {self._reason(exc)}"
                ) from None

    def _commit_fence(self) -> bool:
        """Commit a fence after the view; return whether it is the newest version now."""
        import lance

        view, kept = self.view, {**self.properties, TERM: str(self.term), OPERATION: "fence"}
        assert view.dataset is not None
        transaction = lance.Transaction(
            view.version,
            lance.LanceOperation.Merge(view.fragments, view.dataset.lance_schema),
            transaction_properties=properties.sealed(kept),
        )
        with self._translated("fence"):
            handle = own_handle(view.dataset)
            try:
                done = lance.LanceDataset.commit(handle, transaction, max_retries=0)
            except Exception as exc:
                if is_conflict(exc):
                    return False
                raise
            if not self._is_next(done):
                return False
        self.properties = kept
        self.adopt(done)
        return True

    def _is_next(self, dataset: Any) -> bool:
        """Whether a commit landed directly after the view, and is the newest version."""
        landed: bool = dataset.version == self.view.version + 1
        return landed and dataset.latest_version == dataset.version

    # Committing

    def fresh_handle(self) -> Any:
        """Return a handle of the version in view. Never of the newest: a former owner would get a
        handle that the fence does not stop."""
        self.complete_undo()
        return own_handle(self.view.dataset)

    def complete_undo(self) -> None:
        """Fence again if the outcome of an earlier commit is unknown."""
        if self._must_fence:
            self._fence()

    @contextmanager
    def fenced_after_failure(self) -> Iterator[None]:
        """Fence again if a commit of Lance's own, such as a change of columns, fails inside: it may
        have landed, or the fence of another owner has refused it, which then raises."""
        try:
            yield
        except OwnershipLost:
            raise
        except BaseException:
            self._must_fence = True
            with suppress(TableError):
                self.complete_undo()
            raise

    @property
    def is_bare(self) -> bool:
        view = self.view
        never_written = not self.sequence and not self.properties.keys() & {START, RESTORES}
        return never_written and not view.rows and len(view.schema) == 0

    def write(self, batches: Iterable[Batch], physical: pa.Schema) -> Any:
        """Write data files; return the transaction to :meth:`append`.

        That of the first append replaces the columns of the empty table. Lance refuses such a
        transaction while the version behind the one that it read exists. Once that is removed, it
        may land there, where nobody sees it: so :meth:`append` checks where it has landed.

        If this fails, its files stay: only names that a commit does not use may be deleted, and
        cleaning does that.
        """
        import lance

        rows = (layout.to_physical(batch, arrival, physical) for batch, arrival in batches)
        reader = pa.RecordBatchReader.from_batches(physical, rows)
        return lance.fragment.write_fragments(
            reader,
            own_handle(self.view.dataset),
            mode="overwrite" if self.is_bare else "append",
            return_transaction=True,
            storage_options=self.options.for_lance,
        )

    def append(self, transaction: Any, schema: pa.Schema, changed: Mapping[str, str]) -> None:
        """Commit what :meth:`write` wrote, with ``changed`` properties beside it."""
        lasting = {k: v for k, v in self.properties.items() if k in (START, RESTORES)}
        kept = {**lasting, **changed, TERM: str(self.term)}
        kept.pop(OPERATION, None)
        transaction.transaction_properties = properties.sealed(kept)
        try:
            dataset = self._commit(transaction)
            if self._is_next(dataset):
                sizes = self.view.sizes + sizes_of(transaction.operation.fragments)
                self.view = TableView(dataset, schema, sizes, self.view.start)
                self.properties = kept
                return
            failure: BaseException = TableError("it did not land after the version that it read")
        except Exception as exc:
            failure = exc
        self._resolve(failure, int(kept[SEQUENCE]))

    def _commit(self, transaction: Any) -> Any:
        import lance

        handle = own_handle(self.view.dataset)
        if isinstance(transaction.operation, lance.LanceOperation.Overwrite):
            return lance.LanceDataset.commit(
                handle, transaction, enable_stable_row_ids=True, max_retries=0
            )
        return lance.LanceDataset.commit(handle, transaction, enable_stable_row_ids=True)

    def _resolve(self, failure: BaseException, sequence: int) -> None:
        """Find out whether an append has landed: return if it has, else raise.

        The fence ends the uncertainty: afterwards the append is in the table or never will be.
        """
        self._must_fence = True
        self._fence()
        if self.sequence < sequence:
            raise TableError(
                f"cannot write to the table {self.root}: {self._reason(failure)}; the records stay "
                "in the log and are written again"
            ) from None

    def change(self, action: str, work: Callable[[Any], None], *, several: bool = False) -> None:
        """Have ``work`` commit to a handle of the version in view; then show the result."""
        self.complete_undo()
        with self._translated(action):
            dataset = self.fresh_handle()
            self._must_fence = True
            work(dataset)
            if dataset.version == self.view.version:
                self._must_fence = False
            else:
                self.publish(dataset)

    def commit(
        self,
        action: str,
        operation: Any,
        changed: Mapping[str, str],
        *,
        keep_properties: bool = True,
    ) -> None:
        """Commit an operation that a fence refuses to former owners, together with properties."""
        import lance

        self.complete_undo()  # it may bring other properties
        before = self.properties if keep_properties else {}
        kept = {**before, SEQUENCE: str(self.sequence), **changed, TERM: str(self.term)}
        kept.pop(OPERATION, None)
        if action == "restore":
            kept[OPERATION] = action
        with self._translated(action):
            dataset = self.fresh_handle()
            transaction = lance.Transaction(
                dataset.version, operation, transaction_properties=properties.sealed(kept)
            )
            self._must_fence = True
            committed = lance.LanceDataset.commit(
                dataset, transaction, enable_stable_row_ids=True, max_retries=0
            )
        if not self._is_next(committed):
            self._fence()
            raise TableError(f"cannot {action} the table {self.root}: another commit came first")
        self.properties = kept
        self.adopt(committed)
        self._must_fence = False

    def settle(self) -> bool:
        """Find out what a commit that failed has done: its answer may have been lost.

        Afterwards the view and the properties are those of the newest version, and the commit is
        in it or never will be: after a fence, even that of another owner, Lance refuses it.
        """
        try:
            self.complete_undo()
        except OwnershipLost:  # nothing can be committed to what is shown now
            self.follow_newest()
        return True

    def publish(self, dataset: Any) -> None:
        """Make the version that Lance committed the view, if it is the next one and the newest."""
        self._must_fence = True
        if not self._is_next(dataset):
            self._fence()  # raises if another process has taken over
            return
        self.adopt(own_handle(dataset))
        self._must_fence = False

    # What folders do differently

    def properties_of(self, dataset: Any) -> dict[str, str]:
        return properties.read_from_store(dataset)

    def compaction_run(self, dataset: Any) -> Run:
        """Objects are stored whole: nothing is to be signed or synced."""
        return lambda tasks: (compaction.write(dataset, task) for task in tasks)

    def checkpoint(self) -> None:
        """Fence again: a fence carries the properties."""
        self._fence()

    def restoring(self, target: TableView) -> Any:
        """Return an Overwrite by the fragments of the older version.

        Without retries Lance refuses it while the next version exists, unlike its Restore. It
        drops the indexes, which maintenance builds again.
        """
        import lance

        assert target.dataset is not None
        return lance.LanceOperation.Overwrite(target.dataset.lance_schema, target.fragments)

    def write_tag(self, name: str) -> None:
        with self._translated("tag"):
            tags = own_handle(self.view.dataset).tags
            if name in tags.list():  # an attempt whose answer was lost
                tags.update(name, self.view.version)
            else:
                tags.create(name, self.view.version)

    def remove_tag(self, name: str) -> None:
        with self._translated("remove a tag of"):
            own_handle(self.view.dataset).tags.delete(name)

    def outdated(self, keep_seconds: float) -> list[int]:
        """Return the versions that cleaning may remove.

        Ages are those that the store notes, counted back from the newest version: clocks of
        different machines are not compared, and one request lists all versions.
        """
        ages = self._manifest_ages()
        old = {version for version, age in ages.items() if age >= keep_seconds}
        with self._translated("clean up"):
            return versions.removable(self.view.dataset, sorted(ages), old)

    def _manifest_ages(self) -> dict[int, float]:
        """Return how many seconds before the newest version each version was committed."""
        written = {}
        for name, entry in self._store.entries(files.VERSIONS).items():
            version = files.version_of(name.rpartition("/")[2])
            if version is not None:
                written[version] = entry.modified
        newest = max(written.values(), default=0.0)
        return {version: newest - modified for version, modified in written.items()}

    def object_sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the table's objects below a prefix, by name."""
        return {name: entry.size for name, entry in self._store.entries(prefix).items()}

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.root, self.options)

    def remove_versions(self, numbers: list[int]) -> None:
        """Fence, then remove older versions: a fence works only while its version exists."""
        self._fence()
        with self._translated("clean up"):
            versions.remove(self.view.dataset, numbers)

    def erase(self) -> None:
        """Commit an empty version and a fence after it, then delete everything else."""
        import lance

        empty = lance.LanceOperation.Overwrite(layout.physical_schema(EMPTY, None), [])
        self.commit("erase", empty, {}, keep_properties=False)
        self._fence()
        kept = {files.manifest_name(self.view.version)}
        uuid = properties.transaction_id(self.view.dataset, self.view.version)
        names = [
            name
            for name in self._store.list("")
            if name not in kept and not (uuid and name.endswith(f"-{uuid}.txn"))
        ]
        self._store.delete(names)

    # What folders need

    def create(self, physical: pa.Schema, beside: Mapping[str, str]) -> None:
        """The fence has created the table."""

    def drop_untrusted_indexes(self) -> None:
        """Objects are stored whole or not at all: there is nothing to distrust."""

    def record_checksums(self) -> None:
        """The store keeps checksums of its objects."""

    # Errors

    @contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        with lance_errors_as(
            lambda exc: TableError(f"cannot {action} the table {self.root}: {self._reason(exc)}")
        ):
            try:
                yield
            except Exception as exc:
                if isinstance(exc, (OwnershipLost, TableError)):
                    raise
                # Not chained: the texts of Lance's errors may contain credentials.
                raise TableError(
                    f"cannot {action} the table {self.root}: {self._reason(exc)}"
                ) from None

    def _reason(self, exc: BaseException) -> str:
        return self.options.scrub(reason(exc))


def is_conflict(exc: BaseException) -> bool:
    """Whether Lance refused a commit because of another one."""
    text = str(exc)
    return "onflict" in text or "ncompatible" in text


def snapshot_of(committer: FencedCommitter, version: int) -> TableView:
    """Return the view of an older version."""
    dataset = committer.load(version)
    start = properties.start_of(properties.read_from_store(dataset))
    return view_of(dataset, committer.root, start)  # type: ignore[arg-type]
