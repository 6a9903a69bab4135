"""The two glossary pages agree, and their words are those that the other pages use."""

from __future__ import annotations

from pathlib import Path

from support.doc_pages import both, chinese, english_pages, tables

ENGLISH, CHINESE = both("reference/glossary.md")


def words(page: Path) -> list[tuple[str, str]]:
    """Return each word of the page with its translation."""
    return [(row[0], row[2]) for table in tables(page) for row in table[1:]]


def text_of(pages: list[Path]) -> str:
    return "\n".join(page.read_text("utf-8") for page in pages).lower()


def test_both_glossaries_list_the_same_pairs_of_words():
    assert words(ENGLISH) == [(english, chinese) for chinese, english in words(CHINESE)]


def test_every_concept_has_one_word_and_every_word_one_concept():
    english = [word for word, _ in words(ENGLISH)]
    assert len(set(english)) == len(english)
    translated = [word for word, _ in words(CHINESE)]
    assert len(set(translated)) == len(translated)


def test_other_pages_use_the_words_of_the_glossary():
    others = [page for page in english_pages() if page != ENGLISH]
    english, translated = text_of(others), text_of([chinese(page) for page in others])
    assert [word for word, _ in words(ENGLISH) if word.lower() not in english] == []
    assert [word for word, _ in words(CHINESE) if word.lower() not in translated] == []
