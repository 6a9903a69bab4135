"""The base of the parts that a bucket owns and that work on it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket


class BucketPart:
    """A part with a weak reference to its bucket, so that a dropped bucket is freed at once."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket_ref = weakref.ref(bucket)

    @property
    def _bucket(self) -> Bucket:
        bucket = self._bucket_ref()
        if bucket is None:
            raise ReferenceError("the bucket was dropped")
        return bucket
