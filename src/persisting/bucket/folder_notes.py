"""The notes of a bucket in a folder, for their owner: see
:mod:`~persisting.bucket.handover_notes`."""

from __future__ import annotations

from pathlib import Path

from persisting.bucket import handover_notes, handover_watch
from persisting.bucket.handover_notes import Answer, Note, Status, Wakeable
from persisting.fs import FileSystem


class FolderNotes:
    """The notes of a bucket in a folder that this process owns."""

    def __init__(self, folder: Path, fs: FileSystem) -> None:
        self._folder, self._topic, self._fs = folder, folder.parent, fs
        self.place = str(folder)

    def names(self) -> list[str]:
        return handover_notes.note_names(self._folder, self._fs)

    def may_have_left_overs(self) -> bool:
        return handover_notes.has_any(self._topic)

    def note_place(self, name: str) -> str:
        return str(handover_notes.note_path(self._folder, name))

    def status(self, name: str) -> Status:
        # In this order: the process may decide and then end.
        alive = handover_notes.is_alive(self._topic, name)
        return Status(alive, handover_notes.is_decided(self._topic, name))

    def read(self, name: str) -> Note | None:
        return handover_notes.read_note(self._folder, name, self._fs)

    def read_answer(self, name: str) -> Answer | None:
        return handover_notes.read_answer(self._folder, name, self._fs)

    def write_answer(self, name: str, answer: Answer) -> None:
        handover_notes.write_answer(self._folder, name, answer, self._fs)

    def confirm_decision(self) -> None:
        handover_notes.sync_decision(self._topic, self._fs)

    def remove(self, name: str) -> None:
        handover_notes.remove_note(self._folder, name, self._fs)

    def clear(self) -> None:
        handover_notes.clear_answers(self._folder, self._fs)
        handover_notes.clear_finished(self._topic, self._fs)

    def writers(self) -> set[str]:
        return handover_notes.writers(self._folder, self._fs)

    def start(self, owner: Wakeable) -> None:
        handover_watch.add(self._topic, owner)

    def stop(self, owner: Wakeable) -> None:
        handover_watch.remove(self._topic, owner)
