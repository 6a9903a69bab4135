"""The contracts of topics that are both queues and tables."""

from __future__ import annotations

from support.queue_contract import QueueContract
from support.restore_contract import LoggedRestoreContract, RestoreContract
from support.retention_contract import RetentionContract
from support.table_contract import TableContract
from support.tag_contract import TagContract


class TopicContract(QueueContract, TableContract):
    """All contracts: pytest collects these classes in each test class that inherits them."""

    TestTags = TagContract
    TestRetention = RetentionContract
    TestRestore = RestoreContract
    TestLoggedRestore = LoggedRestoreContract
