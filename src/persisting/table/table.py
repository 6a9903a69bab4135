"""The Lance table of one bucket: opened with care, appended to durably.

Plain blocking code without a lock of its own; one writer at a time calls :meth:`Table.append`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError, TableError
from persisting.fs import FileSystem
from persisting.records import EMPTY
from persisting.table import checksums, files, layout, properties, schema_change
from persisting.table.lance_errors import indices_of, translated
from persisting.table.properties import RESTORES, SEQUENCE, START, Restored
from persisting.table.versions import NOTHING
from persisting.table.view import Size, TableView, sizes_of

log = logging.getLogger("persisting")

FOLDER = "data.lance"
NEWEST = "newest"
SIGNATURE = ("version", "manifest")
""":meth:`Table.signature` says these of the table that is left."""


class Torn(TableError):
    """The newest version cannot be read, as a crash in the middle of its commit leaves it."""


class Table:
    """The table in ``folder``; it comes into being with the first append."""

    def __init__(
        self,
        folder: Path,
        fs: FileSystem,
        *,
        compression: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = folder / FOLDER
        self.view = TableView(None, EMPTY)
        self.properties: dict[str, str] = {}
        """What the last append kept beside its rows."""
        self.fs, self._compression, self._defaults = fs, compression, defaults or {}
        self.noted = True
        """Whether the checksums of all files in use were kept."""
        self._undo = False
        self._long_rows = False
        self._found = 0

    # Opening

    def open(self, *, left_clean: bool) -> None:
        """Open for writing: check the newest version, take a torn one back, sync what is there."""
        files.finish_cleaning(self.fs, self.root)
        version = self._found = files.newest_version(self.root)
        if version:
            self._check_note(version)
            try:
                dataset = self._load_whole(version)
            except Torn as exc:
                dataset = self._step_back(version, left_clean, exc)
            if dataset is not None:
                self._set_torn_aside(dataset.version)
                self.properties = properties.read(dataset)
                self._adopt(dataset)
                if not left_clean:
                    self._sync_all()
                self._finish_evolution()
                if not left_clean:
                    self.vouch()

    @property
    def sequence(self) -> int:
        """The last log sequence whose records the table holds."""
        return int(self.properties.get(SEQUENCE, 0))

    @property
    def restores(self) -> list[Restored]:
        """How often, and to which end, the table went back to an older version."""
        return properties.restores_of(self.properties)

    @property
    def touched(self) -> bool:
        """Whether anything was written since the opening began."""
        return self._undo or files.newest_version(self.root) != self._found

    def refresh(self) -> None:
        """Open, or reopen, for reading only: follow the newest version."""
        version = files.newest_version(self.root)
        if version and version != self.view.version:
            dataset = self._load(version)
            self.properties = properties.read(dataset)
            self._adopt(dataset)

    def signature(self) -> dict[str, Any]:
        """The newest version and the checksum of its manifest, for the next owner."""
        if self.view.dataset is None:
            return {}
        path = files.manifest_path(self.root, self.view.version)
        return dict(zip(SIGNATURE, (self.view.version, checksums.crc_of(path)), strict=True))

    def check_signature(self, left: Mapping[str, Any]) -> None:
        """Raise if the manifest is not the one that the last owner left."""
        self._found = files.newest_version(self.root)
        version, crc = (left.get(name) for name in SIGNATURE)
        if not isinstance(version, int) or not 0 < version >= self._found:
            return  # nothing was left, or somebody has committed since with other tools
        path = files.manifest_path(self.root, version)
        if not path.exists() or checksums.crc_of(path) != crc:
            raise TableError(
                f"the manifest {path} is not the one that was written: it is damaged. Restore "
                f"{self.root} from a copy"
            )

    def at(self, version: int) -> TableView:
        """The view of an older version."""
        if version == NOTHING:
            return TableView(None, EMPTY)
        dataset = self._load(version)
        start = properties.start_of(properties.read(dataset))
        schema = layout.logical_schema(dataset.schema, self.root)
        return TableView(dataset, schema, _sizes(dataset), start)

    def _load(self, version: int) -> Any:
        import lance

        try:
            dataset = lance.dataset(str(self.root), version=version)
        except BaseException as exc:
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            raise _torn_or_not(exc, self.root) from exc
        try:
            if dataset.version != version:
                raise Torn(f"the manifest of version {version} of {self.root} is damaged")
            schema = layout.logical_schema(dataset.schema, self.root)
            if not layout.agrees(dataset.schema, schema):
                raise Torn(f"version {version} of {self.root} lacks columns of its own schema")
        except layout.UnreadableSchema as exc:
            raise Torn(str(exc)) from exc
        except StorageError:
            raise
        except BaseException as exc:
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            raise _torn_or_not(exc, self.root) from exc
        return dataset

    def _load_whole(self, version: int) -> Any:
        """The newest version, with all it refers to; :class:`Torn` if a crash cut it short.

        An append syncs its data before its manifest exists, so there a bad data file is damage.
        """
        dataset = self._load(version)
        try:
            kept = properties.own(dataset, version)
        except TableError:
            raise  # its seal is broken: that is no torn write
        except BaseException as exc:
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            raise _torn_or_not(exc, self.root) from exc
        try:
            files.check_data(self.root, (f.metadata for f in dataset.get_fragments()))
        except TableError as exc:
            if kept is not None:
                raise
            raise Torn(str(exc)) from exc
        return dataset

    def _step_back(self, version: int, left_clean: bool, why: Torn) -> Any | None:
        """Without its newest version, which a crash tore before it was acknowledged.

        Every version is synced before the next is begun, so that only the newest can be torn; but
        for changes in which Lance commits several versions, which are announced beforehand.
        """
        if left_clean:
            raise TableError(
                f"{why}. The bucket had been closed cleanly, so this is damage to stored data, not "
                f"a torn write; restore {self.root} from a copy"
            ) from why
        floor = min(files.changing_since(self.root, self.fs), version - 1)
        torn = [(version, why)]
        while True:
            older = self._next_older(torn[-1][0])
            try:
                dataset = self._load_whole(older) if older else None
                break
            except Torn as exc:
                if older <= floor:
                    raise
                torn.append((older, exc))
        self.fs.remove(self.root.parent / NEWEST)
        for number, reason in torn:
            files.set_manifest_aside(self.fs, self.root, number, reason)
        return dataset

    def _set_torn_aside(self, version: int) -> None:
        """Of a change in which Lance committed several versions, an earlier one may be torn."""
        floor = files.changing_since(self.root, self.fs)
        for older in files.versions_on_disk(self.root):
            if floor < older < version:
                try:
                    self._load_whole(older)
                except Torn as exc:
                    files.set_manifest_aside(self.fs, self.root, older, exc)

    def _drop_untrusted_indexes(self) -> None:
        """Lance commits an index before its files are synced: after a crash only those count
        whose checksums were noted, which was after the sync. Upkeep builds the others anew."""
        for name in checksums.untrusted_indexes(self.root, self.view.dataset):
            self.change("drop an index of", methodcaller("drop_index", name))

    def _next_older(self, version: int) -> int:
        for candidate in range(version - 1, 0, -1):
            if files.manifest_path(self.root, candidate).exists():
                return candidate
        return 0

    def _adopt(self, dataset: Any) -> None:
        schema = layout.logical_schema(dataset.schema, self.root)
        start = properties.start_of(self.properties)
        self.view = TableView(dataset, schema, _sizes(dataset), start)

    def _sync_all(self) -> None:
        """Sync all that the newest version names: its writer may have died before it did."""
        with translated("sync", self.root):
            self.fs.make_folder(self.root / files.DATA)  # a copy of a table without rows has none
            fragments = (f.metadata for f in self.view.dataset.get_fragments())  # type: ignore[union-attr]
            files.sync_data(self.fs, self.root, files.data_paths(fragments))
            floor = files.changing_since(self.root, self.fs)
            for version in files.versions_on_disk(self.root):
                if version > floor or version == self.view.version:
                    files.sync_version(self.fs, self.root, version)
            files.sync_root(self.fs, self.root)

    # Writing

    def append(
        self,
        batches: Iterable[tuple[pa.RecordBatch, pa.Array]],
        schema: pa.Schema,
        sequence: int,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Commit batches (with the arrival of each row), the log sequence and what ``beside`` says.

        Either everything is durable when this returns, or it raises and the table is as it was.
        """
        self._complete_undo()
        batches = list(batches)
        with translated("write to", self.root):
            if self.view.dataset is not None:
                self.evolve(schema)
            try:
                transaction = self._write_or_clean_up(batches, schema)
            except Exception as exc:
                if "Mini-block cannot encode" not in str(exc) or self._long_rows:
                    raise
                self._leave_long_rows_plain()
                transaction = self._write_or_clean_up(batches, schema)
            kept = {**self._lasting(), SEQUENCE: str(sequence), **(beside or {})}
            transaction.transaction_properties = properties.sealed(kept)
            dataset = self._commit(transaction)
            with self._undone_if_it_fails():
                self._sync_commit(dataset.version, transaction.uuid)
        self._adopt_appended(dataset, transaction, schema)
        self._note_newest()
        self.properties = kept

    def begin(self, transaction: Any) -> None:
        """Commit the first version, of a table without rows."""
        self.fs.make_folder(self.root / files.DATA)
        dataset = self._commit(transaction)
        with self._undone_if_it_fails():
            self._sync_commit(dataset.version, transaction.uuid)
        self.properties = {SEQUENCE: "0"}
        self._adopt(dataset)

    def _lasting(self) -> dict[str, str]:
        """The properties that hold until a commit changes them."""
        return {k: v for k, v in self.properties.items() if k in (START, RESTORES)}

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """What was committed and cannot be made durable is taken back."""
        try:
            yield
        except BaseException:
            self._undo = True
            self._complete_undo()
            raise

    def _write_or_clean_up(
        self, batches: list[tuple[pa.RecordBatch, pa.Array]], schema: pa.Schema
    ) -> Any:
        before = files.data_on_disk(self.root)
        try:
            return self._write(batches, schema)
        except BaseException:
            files.remove_new_data(self.fs, self.root, before)
            raise

    def _leave_long_rows_plain(self) -> None:
        """Lance's compressed layout holds some 32,000 nested values in a row: go on without it."""
        log.warning(
            "table %s: a row holds a list too long for Lance's compressed layout; lists are stored "
            "without %s from here on",
            self.root,
            self._compression,
        )
        self._long_rows = True
        self.set_compression()

    def physical(self, schema: pa.Schema) -> pa.Schema:
        return layout.physical_schema(schema, self._compression, plain_lists=self._long_rows)

    def _write(self, batches: Iterable[tuple[pa.RecordBatch, pa.Array]], schema: pa.Schema) -> Any:
        import lance

        write_fragments = lance.fragment.write_fragments
        physical = self.physical(schema)
        reader = pa.RecordBatchReader.from_batches(physical, _physical(batches, physical))
        dataset = self.view.dataset
        if dataset is None:
            self.fs.make_folder(self.root)
            transaction = write_fragments(
                reader,
                str(self.root),
                mode="create",
                return_transaction=True,
                enable_stable_row_ids=True,
            )
        else:
            transaction = write_fragments(reader, dataset, mode="append", return_transaction=True)
        operation: Any = transaction.operation
        operation.fragments = checksums.signed_metadata(self.fs, self.root, operation.fragments)
        files.sync_data(self.fs, self.root, files.data_paths(operation.fragments))
        if dataset is None:
            files.sync_root(self.fs, self.root)
        return transaction

    def _data_in_use(self) -> set[str]:
        if self.view.dataset is None:
            return set()
        return set(files.data_paths(f.metadata for f in self.view.dataset.get_fragments()))

    def _commit(self, transaction: Any) -> Any:
        import lance

        target = self.view.dataset if self.view.dataset is not None else str(self.root)
        try:
            return lance.LanceDataset.commit(target, transaction, enable_stable_row_ids=True)
        except Exception:
            landed = self._landed(transaction.uuid)
            if landed is None:
                raise
            return landed

    def _landed(self, uuid: str) -> Any | None:
        """The version a transaction made, if its commit went through although it raised."""
        version = files.newest_version(self.root)
        if version <= self.view.version:
            return None
        dataset = self._load(version)
        return dataset if dataset.read_transaction(version).uuid == uuid else None

    def _sync_commit(self, version: int, uuid: str | None = None) -> None:
        files.check_whole(files.manifest_path(self.root, version))
        files.sync_version(self.fs, self.root, version, uuid)
        if version == 1:
            files.sync_root(self.fs, self.root)
        properties.own(self._load(version), version)  # what a transaction says must be readable

    def _note_newest(self) -> None:
        """Say which manifest is durable, without a sync: a kill leaves the note, and after power
        loss it is there or not. Where it is, a broken manifest is damage, no torn write."""
        with suppress(OSError):  # an old note, or none, does no harm
            crc = checksums.crc_of(files.manifest_path(self.root, self.view.version))
            note = f"{self.view.version} {crc}"
            self.fs.write_note(self.root.parent / NEWEST, f"{note} {_seal(note)}".encode())

    def _check_note(self, version: int) -> None:
        """Raise if the newest manifest was durable once and is another now."""
        try:
            said = self.fs.read(self.root.parent / NEWEST).decode(errors="replace").split()
        except FileNotFoundError:
            return
        whole = len(said) == 3 and said[2] == _seal(f"{said[0]} {said[1]}")
        if whole and said[0] == str(version):
            self.check_signature(dict(zip(SIGNATURE, (version, said[1]), strict=True)))

    def _complete_undo(self) -> None:
        """Take back every version above the view: a later sync could not prove its bytes."""
        if self._undo:
            with translated("take back an unsynced version of", self.root):
                self.fs.remove(self.root.parent / NEWEST)
                for version in range(files.newest_version(self.root), self.view.version, -1):
                    self.fs.remove(files.manifest_path(self.root, version))
                self.fs.sync_folder(self.root / files.VERSIONS)
            self._undo = False

    def _adopt_appended(self, dataset: Any, transaction: Any, schema: pa.Schema) -> None:
        sizes = self.view.sizes + sizes_of(transaction.operation.fragments)
        self.view = TableView(dataset, schema, sizes, self.view.start)

    def change(self, action: str, work: Callable[[Any], None], *, several: bool = False) -> None:
        """Let ``work`` commit to a fresh handle of the newest version; then make that durable.

        ``several`` says that Lance may commit more than one version in it.
        """
        self._complete_undo()
        with translated(action, self.root):
            dataset = self._fresh()
            if several:
                files.announce_change(self.fs, self.root, self.view.version)
            before = files.data_on_disk(self.root)
            try:
                with self._undone_if_it_fails():
                    work(dataset)
                self._settle(dataset)
            except BaseException:
                if not self._undo:  # else a version still names the new files
                    files.remove_new_data(self.fs, self.root, before)
                    files.change_done(self.fs, self.root)
                raise
            if several:
                files.change_done(self.fs, self.root)

    def commit(
        self, action: str, operation: Any, changed: Mapping[str, str], *, only: bool = False
    ) -> None:
        """Commit an operation of Lance's, and our properties with ``changed`` ones, as one.

        With ``only`` no others are kept.
        """
        import lance

        kept = {**({} if only else self.properties), SEQUENCE: str(self.sequence), **changed}

        def work(dataset: Any) -> None:
            transaction = lance.Transaction(
                dataset.version, operation, transaction_properties=properties.sealed(kept)
            )
            committed = lance.LanceDataset.commit(dataset, transaction)
            dataset.checkout_latest()
            if dataset.version != committed.version:
                raise OSError("another writer has committed; is the bucket open twice?")
            self.properties = kept

        before = self.properties
        try:
            self.change(action, work)
        except BaseException:
            self.properties = before
            raise

    def vouch(self) -> None:
        """Do without the indexes that nobody vouched for, and keep the checksums of all others."""
        self.noted = False
        self._drop_untrusted_indexes()
        self.note_checksums()

    def note_checksums(self) -> None:
        """Keep the checksums of files whose name cannot carry one."""
        self.noted = False
        with translated("read", self.root):
            changes = checksums.changes(self.root, self.view.dataset)
        if changes is not None:
            self.change("note checksums in", lambda dataset: dataset.update_config(changes))
        self.noted = True

    # Changing the schema

    def evolve(self, schema: pa.Schema) -> None:
        """Bring the columns to a changed schema of the records."""
        target = self.physical(schema)
        same_columns = not any(schema_change.steps(self.view.dataset.schema, target))  # type: ignore[union-attr]
        if same_columns and schema.equals(self.view.schema):
            return
        self._finish_evolution()
        dataset = self._fresh()
        added, replaced = schema_change.steps(dataset.schema, target)
        if added:
            # A field that was known and had no type so far holds Nones that were put as such.
            known = set(self.view.schema.names)
            fresh = {k: v for k, v in self._defaults.items() if k not in known and v is not None}
            empty = [field for field in added if field.name not in fresh]
            if empty:
                schema_change.add(dataset, empty)
                self._settle(dataset)
            for field in added:
                if field.name in fresh:
                    schema_change.write_default(dataset, field, fresh)
                    self._settle(dataset)
                    schema_change.name_default(dataset, field)
                    self._settle(dataset)
        for field in replaced:
            schema_change.write_wide(dataset, field)
            self._settle(dataset)
            schema_change.swap(dataset, field)
            self._settle(dataset)
            dataset.drop_columns(schema_change.leftovers(dataset.schema))
            self._settle(dataset)
        schema_change.replace_metadata(dataset, schema)
        self._settle(dataset)
        self.note_checksums()

    def _finish_evolution(self) -> None:
        """Drop the spare columns that an interrupted widening left."""
        with translated("finish a schema change of", self.root):
            dataset = self._fresh()
            spare = schema_change.leftovers(dataset.schema)
            if spare:
                dataset.drop_columns(spare)
                self._settle(dataset)

    def _fresh(self) -> Any:
        """A handle of our own: Lance changes it in place, and readers hold the view's."""
        import lance

        return lance.dataset(str(self.root))

    def _settle(self, dataset: Any) -> None:
        """Sync what one or more commits of Lance's brought, and make it the view."""
        with self._undone_if_it_fails():
            known = self._data_in_use()
            now = {
                file.path: file.file_size_bytes
                for fragment in dataset.get_fragments()
                for file in fragment.metadata.files
                if file.path not in known
            }
            for name, size in now.items():
                files.check_whole(self.root / files.DATA / name, size)
            files.sync_data(self.fs, self.root, now)
            indices = self._new_indices(dataset)
            files.check_indices(self.root, indices)
            files.sync_indices(self.fs, self.root, indices)
            for version in range(self.view.version + 1, dataset.version + 1):
                if files.manifest_path(self.root, version).exists():
                    self._sync_commit(version)
            self._adopt(dataset.checkout_version(dataset.version))
        self._note_newest()

    def _new_indices(self, dataset: Any) -> set[str]:
        def names(of: Any) -> set[str]:
            return {s.uuid for index in indices_of(of) for s in index.segments}

        return names(dataset) - names(self.view.dataset)

    def set_compression(self) -> None:
        """Let later writes use the option, on a table that was made with another one."""
        dataset = self.view.dataset
        if dataset is None:
            return
        target = self.physical(self.view.schema)
        changes = layout.encoding_changes(dataset.schema, target)
        if changes:
            with translated("change the compression of", self.root):
                dataset = self._fresh()
                dataset.update_field_metadata(changes)
                self._settle(dataset)


def _torn_or_not(exc: BaseException, root: Path) -> TableError:
    """What a failure to open means: the operating system's errors say nothing of the manifest."""
    text = str(exc)
    if "os error" in text and "No such file" not in text:
        return TableError(f"cannot open the table {root}: {text}; nothing was changed")
    return Torn(f"the newest manifest of {root} cannot be read: {text}")


def _physical(
    batches: Iterable[tuple[pa.RecordBatch, pa.Array]], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for batch, arrival in batches:
        yield layout.to_physical(batch, arrival, schema)


def _sizes(dataset: Any) -> tuple[Size, ...]:
    return sizes_of(fragment.metadata for fragment in dataset.get_fragments())


def _seal(note: str) -> str:
    return f"{zlib.crc32(note.encode()):08x}"
