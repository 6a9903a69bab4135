"""Records and their types: Python values to Arrow and back, and how a schema may change.

``field_names`` the names a field may have · ``values`` one Python value · ``evolution`` the common
type of two types · ``type_checks``, ``vectors`` and ``encoder`` many records, fast · ``arrow``
Arrow data and batches of older schemas · ``arrow_casts`` arrays to wider types ·
``record_columns`` records on their way to another process. Nothing here touches a file.
"""

from persisting.records.encoder import EMPTY, RecordEncoder, Rules

__all__ = ["EMPTY", "RecordEncoder", "Rules"]
