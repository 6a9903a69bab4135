"""Encoding of stream offsets, and division of a trigger's limit."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from persisting.spark.stream_offsets import StreamPlace, decode, divide_limit, encode

PLACES = st.dictionaries(
    st.integers(0, 50), st.builds(StreamPlace, st.integers(0, 2**62), st.integers(0, 3)), max_size=8
)
LAGS = st.dictionaries(st.integers(0, 50), st.integers(0, 1000), min_size=1, max_size=8)


class TestOffsets:
    def test_offsets_are_encoded_by_bucket(self) -> None:
        assert encode({1: StreamPlace(900), 0: StreamPlace(1200)}) == {"0": 1200, "1": 900}

    def test_offsets_have_the_epoch_of_restored_buckets(self) -> None:
        assert encode({0: StreamPlace(5, 2), 1: StreamPlace(7)}) == {
            "0": 5,
            "1": 7,
            "epochs": {"0": 2},
        }

    def test_equal_offsets_have_equal_json(self) -> None:
        """Spark compares offsets as JSON to see whether there is anything new."""
        one = encode({0: StreamPlace(5, 1), 2: StreamPlace(1), 1: StreamPlace(3, 1)})
        other = encode({1: StreamPlace(3, 1), 2: StreamPlace(1), 0: StreamPlace(5, 1)})
        assert json.dumps(one) == json.dumps(other)

    def test_offsets_of_many_buckets_are_in_numeric_order(self) -> None:
        assert list(encode({bucket: StreamPlace(0) for bucket in (10, 9, 2)})) == ["2", "9", "10"]

    @given(PLACES)
    def test_offsets_survive_the_checkpoint(self, places: dict[int, StreamPlace]) -> None:
        assert decode(json.loads(json.dumps(encode(places)))) == places


class TestDivideLimit:
    def test_all_rows_are_taken_without_a_limit(self) -> None:
        assert divide_limit({0: 5, 1: 0}, None) == {0: 5, 1: 0}

    def test_limit_of_rows_is_divided_evenly_among_buckets(self) -> None:
        assert divide_limit({0: 100, 1: 100}, 10) == {0: 5, 1: 5}

    def test_unused_share_of_a_bucket_goes_to_the_others(self) -> None:
        assert divide_limit({0: 100, 1: 1, 2: 100}, 11) == {0: 5, 1: 1, 2: 5}

    @given(LAGS, st.integers(1, 3000))
    def test_limit_of_rows_is_used_up_but_never_exceeded(
        self, lags: dict[int, int], most: int
    ) -> None:
        taken = divide_limit(lags, most)
        assert set(taken) == set(lags)
        assert all(0 <= taken[bucket] <= lags[bucket] for bucket in lags)
        assert sum(taken.values()) == min(most, sum(lags.values()))

    @given(LAGS, st.integers(1, 100))
    def test_repeated_triggers_take_all_rows(self, lags: dict[int, int], most: int) -> None:
        triggers = 0
        while any(lags.values()):
            taken = divide_limit(lags, most)
            lags = {bucket: lag - taken[bucket] for bucket, lag in lags.items()}
            triggers += 1
        assert triggers <= 8 * 1000 // most + 1

    @given(LAGS, st.integers(1, 100))
    def test_no_bucket_waits_while_another_takes_more(
        self, lags: dict[int, int], most: int
    ) -> None:
        taken = divide_limit(lags, most)
        waiting = [taken[bucket] for bucket in lags if taken[bucket] < lags[bucket]]
        if waiting:
            assert max(taken.values()) - min(waiting) <= 1
