"""Topics: records divided into buckets, written and read as one queue.

``config`` the topic file · ``routing`` records to buckets · ``registry`` backends by name ·
``port`` what is needed of a bucket · ``local`` buckets owned by this process · ``stored`` buckets
on disk, read only · ``writer`` · ``reader`` · ``groups`` · ``opening`` how they come together.
"""
