"""Every figure is what its definition says, also for calls that were cut short or emitted nothing."""

import json

import pytest
from scripted import VOCAB, ScriptedModel, decoder, drafter, engine, recite, run

from metrics import Round, Statistics, common_prefix


def prefill(token: int = 7, seconds: float = 2.0, reason: str = "") -> Round:
    return Round([token], ["prefill"], seconds=seconds, verify_seconds=seconds, finish_reason=reason)


def checked(draft: list[int], num_accepted: int, seconds: float = 0.5, **kwargs: object) -> Round:
    """A round in which `num_accepted` of the draft's tokens were right."""
    last = "plain" if not draft else "bonus" if num_accepted == len(draft) else "corrected"
    return Round([*draft[:num_accepted], 99], ["accepted"] * num_accepted + [last], "model", draft, num_accepted,
                 seconds=seconds, draft_seconds=0.2, verify_seconds=0.25, **kwargs)  # type: ignore[arg-type]


def test_rates_follow_their_definitions() -> None:
    """Caught: prefill's token counted as a round's, acceptance over emitted tokens, or time without prefill."""
    statistics = Statistics([prefill(), checked([1, 2, 3], 3), checked([4, 5], 0), checked([], 0, finish_reason="length")])
    assert (statistics.emitted, statistics.drafted, statistics.accepted, statistics.target_passes) == (7, 5, 3, 3)
    assert statistics.tokens == [7, 1, 2, 3, 99, 99, 99]
    assert statistics.acceptance_rate == 3 / 5
    assert statistics.tokens_per_round == 6 / 3
    assert statistics.tokens_per_second == 7 / 3.5
    assert statistics.decode_tokens_per_second == 6 / 1.5
    assert statistics.first_token_seconds == 2.0
    assert statistics.as_dict()["rest_seconds"] == pytest.approx(3 * 0.05)
    assert statistics.finish_reason == "length"


def test_a_position_after_the_first_wrong_one_is_not_judged() -> None:
    """Caught: acceptance by position over all drafted tokens, which falls with K whatever the draft."""
    statistics = Statistics([prefill(), checked([1, 2, 3], 3), checked([4, 5, 6], 1), checked([7, 8, 9], 0), checked([], 0)])
    assert statistics.acceptance_by_position() == [(2, 3), (1, 2), (1, 1)]


def test_a_draft_token_behind_the_end_is_not_judged_either() -> None:
    """Caught: the token after an end token inside a run counted as a wrong draft."""
    cut = Round([1, 2], ["accepted"] * 2, "model", [1, 2, 3, 4], 2, finish_reason="end")
    assert Statistics([prefill(), cut]).acceptance_by_position() == [(1, 1), (1, 1)]
    target = ScriptedModel(recite([1, 2, 3, 4, 5, 6, 7, 8], 10))
    statistics = run(engine(target, ScriptedModel(target.script)), [0], 20, 5, end_token_ids=[4])
    assert statistics.tokens == [1, 2, 3, 4] and statistics.acceptance_by_position() == [(1, 1)] * 3


def test_an_empty_call_has_readable_statistics() -> None:
    """Caught: a division by zero, or a rate of 0 where there is none, for max_new_tokens 0 (trial 13)."""
    empty = Statistics()
    for name in ("acceptance_rate", "tokens_per_round", "tokens_per_second", "decode_tokens_per_second", "first_token_seconds"):
        assert getattr(empty, name) is None
    assert empty.as_dict()["emitted"] == 0 and empty.tokens == [] and empty.acceptance_by_position() == []
    assert empty.finish_reason == "length"


def test_only_the_prefill_ran() -> None:
    """Caught: tokens per round or decode speed made up from the prefill; rate 0 instead of 'n/a' (trial 45)."""
    statistics = Statistics([prefill(reason="length")])
    assert statistics.target_passes == 0 and statistics.tokens_per_second == 0.5
    assert statistics.tokens_per_round is statistics.decode_tokens_per_second is statistics.acceptance_rate is None
    stopped = Statistics([Round([], [], seconds=2.0, verify_seconds=2.0, finish_reason="stop")])
    assert stopped.target_passes == 0, "a prefill whose token was cut away is still the prefill"
    assert stopped.as_dict()["rest_seconds"] == 0


def test_statistics_can_be_written_as_json() -> None:
    """Caught: a tensor or a NaN in the figures, which json writes but nobody reads back."""
    for num in (0, 3, None):
        statistics = run(engine(decoder(), drafter("model"), VOCAB), [10, 20, 30], 12, num)
        loaded = json.loads(json.dumps(statistics.as_dict(), allow_nan=False))
        assert loaded["emitted"] == 12 and loaded["largest_draft"] <= (15 if num is None else num)
        assert (loaded["acceptance_rate"] is None) == (num == 0)
        assert loaded["rest_seconds"] >= 0
        assert loaded["seconds"] == pytest.approx(sum(loaded[f"{part}_seconds"] for part in (
            "first_token", "draft", "verify", "rest")))


def test_common_prefix() -> None:
    """Caught: a common prefix longer than the shorter of the two, or 0 where one is empty."""
    assert [common_prefix(*pair) for pair in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([2], [1]))] == [0, 2, 1, 0]
