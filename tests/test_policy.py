"""How long to draft: within the bounds, near the best in hindsight, anew in each call."""

import math
import random

import pytest

from policy import PROBE_AFTER_AT_MOST, Calibration, ConfidenceStop, DynamicK, FixedK, Heuristic, Policy
from shapes import Widths

FLAT = Widths({1: 0.10, 8: 0.12, 16: 0.16})  # seconds of a target pass: reading the weights dominates


def draft(policy: Policy, confidence: float, draft_seconds: float, room: int = 99) -> int:
    """How many tokens the policy drafts in one round if each has this confidence and there is room for so many."""
    chances: list[float] = []
    limit = min(room, policy.limit())
    while len(chances) < limit and policy.goes_on(chances, draft_seconds, limit - len(chances)):
        chances.append(policy.chance(confidence))
    return len(chances)


def simulate(policy: Policy, acceptance: float, draft_seconds: float, rounds: int = 600, seed: int = 0,
             anew: bool = True) -> tuple[float, float]:
    """A world where each draft token is right with this chance -> (tokens per second, mean tokens drafted)."""
    if anew:
        policy.begin()
    rng, tokens, seconds, drafted = random.Random(seed), 0, 0.0, 0
    for _ in range(rounds):
        num = draft(policy, acceptance, draft_seconds)
        accepted = next((i for i in range(num) if rng.random() >= acceptance), num)
        spent = num * draft_seconds + FLAT.cost(num + 1)
        policy.observe(num, [acceptance] * num, accepted, accepted + 1, spent, FLAT.cost(num + 1))
        tokens, seconds, drafted = tokens + accepted + 1, seconds + spent, drafted + num
    return tokens / seconds, drafted / rounds


@pytest.mark.parametrize(("acceptance", "draft_seconds"), [(0.95, 0.01), (0.8, 0.02), (0.6, 0.01), (0.4, 0.03), (0.2, 0.02)])
def test_dynamic_k_is_within_a_few_percent_of_the_best_fixed_k(acceptance: float, draft_seconds: float) -> None:
    """Caught: a rule that drafts on while a token is likely, whatever it costs, or that never finds its level."""
    rates = {num: simulate(FixedK(num, FLAT), acceptance, draft_seconds)[0] for num in range(16)}
    ours, _ = simulate(DynamicK(FLAT), acceptance, draft_seconds)
    assert ours > 0.95 * max(rates.values()), rates
    assert min(rates.values()) < 0.8 * max(rates.values()), "the control: K matters in this world"


def test_dynamic_k_looks_across_a_step_in_the_cost_of_a_pass() -> None:
    """Caught: a seventh row dearer than any one token, although it opens a tile in which five more cost nothing."""
    tiles = Widths({1: 0.10, 6: 0.10, 7: 0.14, 12: 0.14})
    for confidence, accepted, fewest, most in ((0.99, 5, 11, 11), (0.5, 2, 1, 5)):
        policy = DynamicK(tiles)
        for _ in range(30):
            policy.observe(5, [confidence] * 5, accepted, accepted + 1, 0.125, 0.10)
        assert fewest <= draft(policy, confidence, 0.005) <= most
        assert draft(policy, confidence, 0.005, room=6) <= 5, "a seventh row does not pay where no eighth can follow"


def test_dynamic_k_stops_drafting_where_it_does_not_pay() -> None:
    """Caught: at least one token drafted in every round, although a draft step costs as much as a target pass."""
    assert simulate(DynamicK(FLAT), 0.3, 0.09)[1] < 0.3
    assert simulate(DynamicK(FLAT), 0.95, 0.002)[1] > 8


def test_dynamic_k_tries_again_after_a_while() -> None:
    """Caught: a policy that once stopped drafting and never learned that the text had become easy."""
    policy = DynamicK(FLAT)
    simulate(policy, 0.05, 0.09, rounds=100)
    for _ in range(PROBE_AFTER_AT_MOST):
        policy.observe(0, [], 0, 1, 0.1)
    assert policy.goes_on([], 0.09, 15) and not policy.goes_on([policy.chance(0.05)], 0.09, 14)


@pytest.mark.parametrize(("acceptance", "draft_seconds"), [(0.1, 0.09), (0.3, 0.09), (0.5, 0.09), (0.5, 0.2), (0.9, 0.2)])
def test_probes_cost_little_where_nothing_pays(acceptance: float, draft_seconds: float) -> None:
    """Caught: a probe every eight rounds for ever, 11% of the time where a draft step takes longer than a target pass."""
    plain, _ = simulate(FixedK(0, FLAT), acceptance, draft_seconds, rounds=96)
    ours = [simulate(DynamicK(FLAT), acceptance, draft_seconds, rounds=96, seed=seed) for seed in range(8)]
    assert sum(rate for rate, _ in ours) / 8 > 0.95 * plain
    assert draft_seconds < FLAT.cost(1) or not any(drafted for _, drafted in ours), "even a certain token would not pay"


@pytest.mark.parametrize("factor", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_seconds_on_file_may_be_of_a_busier_machine(acceptance: float, factor: float) -> None:
    """Caught: passes measured while another program ran: all rows looked so dear that nothing was ever drafted again."""
    wrong = DynamicK(Widths({width: factor * seconds for width, seconds in FLAT.seconds.items()}))
    right, _ = simulate(DynamicK(FLAT), acceptance, 0.015, rounds=100)
    assert simulate(wrong, acceptance, 0.015, rounds=100)[0] > 0.95 * right


def test_a_pass_costs_what_the_calls_passes_take() -> None:
    """Caught: the seconds of a wide pass held against those on file for one row."""
    policy = DynamicK(FLAT)
    for drafted in (0, 4, 11):
        policy.observe(drafted, [], 0, 1, 9.0, 7 * FLAT.cost(drafted + 1))
    assert policy.pace == pytest.approx(7) and policy.cost(3) == pytest.approx(7 * FLAT.cost(3))


def test_probes_find_a_text_that_has_become_easy() -> None:
    """Caught: a wait that only grows, so that a draft that has become good is used much too late."""
    for seed in range(8):
        policy = DynamicK(FLAT)
        simulate(policy, 0.05, 0.05, rounds=48, seed=seed)
        assert simulate(policy, 0.95, 0.05, rounds=200, seed=seed + 1, anew=False)[1] > 1, seed


def test_every_policy_starts_anew_in_each_call() -> None:
    """Caught: one user's text deciding how the next one's is drafted, so that outputs' timing depends on history."""
    for policy in (DynamicK(FLAT), FixedK(5, FLAT), Heuristic(FLAT), ConfidenceStop(FLAT)):
        fresh = simulate(policy, 0.5, 0.02, rounds=40)
        simulate(policy, 0.99, 0.001, rounds=80)
        assert simulate(policy, 0.5, 0.02, rounds=40) == fresh, type(policy)


def test_dynamic_k_keeps_to_its_bounds() -> None:
    """Caught: more rows than the largest proven width, or no bound at all when everything is accepted."""
    for widths, most in ((FLAT, 15), (Widths({2: 1, 4: 1}, any_width=False), 3), (Widths({1: 1.0, 64: 1.0}), 15),
                         (Widths.fixed(), 7)):
        policy = DynamicK(widths)
        for _ in range(100):
            num = draft(policy, 1.0, 1e-9)
            assert num <= policy.limit() == most
            policy.observe(num, [1.0] * num, num, num + 1, 1.0)
    assert DynamicK(Widths({1: 1.0})).limit() == 0


def test_fixed_k_is_fixed() -> None:
    """Caught: a confidence or a rate that cuts a fixed K short; a K that no width can hold found out in mid-run."""
    for num in (0, 1, 3, 8):
        assert draft(FixedK(num, FLAT), 0.01, 9.9) == num
    with pytest.raises(ValueError, match="use 0 for plain decoding or more"):
        FixedK(-1, FLAT)
    assert FixedK(7, Widths.fixed(8)).limit() == 7
    with pytest.raises(ValueError, match="8 speculative tokens need a pass of 9 rows; the largest width in use is 8"):
        FixedK(8, Widths.fixed(8))


def test_the_heuristic_of_hugging_face() -> None:
    """Caught: +2 after a round without a draft, below one, beyond the widths, or the last call's K at the start."""
    policy = Heuristic(FLAT, num_tokens=5)
    for drafted, accepted, after in ((5, 5, 7), (7, 6, 6), (6, 0, 5), (0, 0, 5), (5, 5, 7)):
        policy.observe(drafted, [], accepted, accepted + 1, 1.0)
        assert policy.limit() == after
    for _ in range(20):
        policy.observe(3, [], 0, 1, 1.0)
    assert policy.limit() == 1
    for _ in range(20):
        policy.observe(policy.limit(), [], policy.limit(), policy.limit() + 1, 1.0)
    assert policy.limit() == 20
    narrow = Heuristic(Widths.fixed(8))
    for _ in range(20):
        narrow.observe(narrow.limit(), [], narrow.limit(), narrow.limit() + 1, 1.0)
    assert narrow.limit() == 7, "a pass holds 8 rows"
    narrow.begin()
    assert narrow.limit() == 5


def test_the_confidence_stop_of_hugging_face() -> None:
    """Caught: a stop before the unsure token is drafted (there it is still proposed), or on the mean of all."""
    policy = ConfidenceStop(FLAT, threshold=0.4, num_tokens=15)
    assert policy.goes_on([], 0.1, 15) and policy.goes_on([0.9, 0.4], 0.1, 13) and not policy.goes_on([0.9, 0.39], 0.1, 13)
    assert draft(policy, 0.9, 0.1) == 15 and draft(policy, 0.1, 0.1) == 1


def test_calibration_counts_what_was_judged() -> None:
    """Caught: draft tokens after the first wrong one counted as wrong, or confidence 1.0 beyond the last bin."""
    calibration = Calibration()
    for _ in range(400):
        calibration.observe([0.95, 1.0, 0.30, 0.95], 2)  # two right, one wrong, the last never judged
    assert calibration(0.95) > 0.95 and calibration(1.0) > 0.95
    assert calibration(0.30) < 0.05
    assert calibration.average == pytest.approx(2 / 3, abs=0.02)
    assert calibration(0.6) == Calibration()(0.6), "nothing was seen there"
    assert [Calibration()(x / 10) for x in range(10)] == sorted(Calibration()(x / 10) for x in range(10))


def test_calibration_counts_the_drafts_own_tokens_only() -> None:
    """Caught: a suggestion of the target's, right and 0.97 sure, in the top bin; or the tokens after it judged one place off."""
    for num_accepted, judged in ((0, []), (1, [(0.3, 0)]), (2, [(0.3, 1), (0.6, 0)]), (3, [(0.3, 1), (0.6, 1)])):
        found, expected = Calibration(), Calibration()
        found.observe([None, 0.3, 0.6], num_accepted)
        for confidence, right in judged:
            expected.observe([confidence], right)
        assert found == expected, num_accepted


def test_calibration_learns_that_a_confident_draft_is_wrong() -> None:
    """Caught: taking the draft's probability for the chance of acceptance."""
    policy = DynamicK(FLAT)
    before = draft(policy, 0.99, 0.02)
    for _ in range(60):
        policy.observe(2, [0.99, 0.99], 0, 1, 0.2)
    assert before > draft(policy, 0.99, 0.02) and policy.chance(0.99) < 0.2


def test_lookup_pays_when_its_match_beats_the_rate() -> None:
    """Caught: looked-up tokens preferred however unlikely, or refused although they cost no draft step."""
    policy = DynamicK(FLAT)
    assert policy.lookup_pays(0.95, 10) and not policy.lookup_pays(0.05, 10) and not policy.lookup_pays(0.99, 0)
    for _ in range(200):
        policy.observe(15, [], 15, 16, 0.2)
    assert not policy.lookup_pays(0.6, 10), "the model yields 80 tokens a second here"


def test_a_sibling_pays_by_its_chance() -> None:
    """Caught: rows filled with siblings that are never hit where a row has a price."""
    policy = DynamicK(Widths({1: 0.1, 8: 0.17}))
    assert policy.sibling_pays(0.5, 4) and not policy.sibling_pays(0.001, 4)
    pays = [policy.sibling_pays(chance / 100, 4) for chance in range(100)]
    assert pays == sorted(pays)


@pytest.mark.parametrize("widths", [Widths({2: 1.0}, any_width=False), Widths({4: 1.0}, any_width=False), Widths({1: 1.0})])
def test_few_or_narrow_widths_are_enough_to_begin(widths: Widths) -> None:
    """Caught: the prior asked for the cost of 5 rows where the largest proven width is 4."""
    for policy in (DynamicK(widths), FixedK(0, widths), ConfidenceStop(widths), Heuristic(widths, 1)):
        assert policy.limit() < widths.most_rows
        assert math.isfinite(policy.rate)
