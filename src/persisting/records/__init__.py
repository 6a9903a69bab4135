"""Records and their types: Python values to Arrow and back, and how a schema may change.

``names`` which names a field may have · ``values`` one Python value · ``rules`` two types become
one · ``checks`` and ``shaper`` many records, fast · ``arrow`` Arrow data and older schemas.
All of it is pure: nothing here touches a file.
"""

from persisting.records.encoder import EMPTY, RecordEncoder, Rules

__all__ = ["EMPTY", "RecordEncoder", "Rules"]
