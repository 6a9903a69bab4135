"""The console's texts in the languages of its readers.

The English text is the key: a text without a translation is shown in English, and a test fails for
it.
"""

from __future__ import annotations

from typing import Any

from persisting.ui.texts_zh import CHINESE

LANGUAGES = ("en", "zh")


class Translator:
    """Translates texts into one language."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._texts = CHINESE if language == "zh" else {}

    def __call__(self, text: str, /, **values: Any) -> str:
        """Return a text with its ``{placeholders}`` filled."""
        translated = self._texts.get(text, text)
        return translated.format(**values) if values else translated

    def n(self, count: int, one: str, many: str, /, **values: Any) -> str:
        """Return a text with a ``{count}``, in the singular or plural of the language.

        Chinese has one form, which is translated from the plural.
        """
        shown = f"{count:,}"
        if count == 1 and many not in self._texts:
            return one.format(count=shown, **values)
        return self(many, count=shown, **values)


def language_of(accept: str, chosen: str | None = None) -> str:
    """Return the language that a reader prefers, from an Accept-Language header or a choice."""
    if chosen is not None and chosen in LANGUAGES:
        return chosen
    best, best_weight = "en", 0.0
    for part in accept.split(","):
        name, _, parameters = part.strip().partition(";")
        language = name.strip().lower().partition("-")[0]
        weight = _weight(parameters)
        if language in LANGUAGES and weight > best_weight:
            best, best_weight = language, weight
    return best


def _weight(parameters: str) -> float:
    name, _, value = parameters.strip().partition("=")
    if name.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
