"""The statistics behind `run_sampling.py --check`, its power, and the exit codes of its three modes."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import distribution
import run_sampling
from distribution import (
    CELLS,
    CONTROL,
    Cell,
    Finding,
    TableModel,
    Tally,
    cell,
    chi_square,
    count,
    exact,
    holm,
    judge,
    merged,
    together,
    two_sample,
)
from drafters import ModelDrafter, Proposal
from sampling import SamplingParams
from spec_decode import GenerationConfig

DRAWS = 500  # enough for these: a poor draft and a small table make mistakes show early
STRONG = replace(CONTROL, sampling=replace(CONTROL.sampling, temperature=0.4), vocab_size=4, noise=3.0)
HONEST = cell("as it should be", vocab_size=4, noise=3.0)
SmallCheck = Callable[[Cell, Cell], tuple[int, list[dict[str, Any]]]]


def test_survival_agrees_with_scipy() -> None:
    """Caught: the lower gamma function instead of the upper, or half the degrees; p would be 1 - p, or too small."""
    for degrees, statistic in itertools.product((1, 2, 7, 100, 1300), (0.0, 0.5, 3.0, 90.0, 1400.0)):
        wanted = stats.chi2.sf(statistic, degrees)
        assert distribution.survival(statistic, degrees) == pytest.approx(wanted, rel=1e-9, abs=1e-300)


def test_chi_square_agrees_with_scipy_where_nothing_is_rare() -> None:
    """Caught: degrees of freedom counted as the number of outcomes."""
    observed, probs = torch.tensor([40, 35, 25]), torch.tensor([0.5, 0.3, 0.2])
    wanted = stats.chisquare(observed.numpy(), (probs.double() * 100).numpy(), sum_check=False)
    fit = chi_square(observed, probs)
    assert (fit.statistic, fit.p) == pytest.approx((wanted.statistic, wanted.pvalue), rel=1e-6)


def test_two_samples_agree_with_scipy_where_nothing_is_rare() -> None:
    """Caught: expecting each histogram to be the other one, which doubles the weight of chance."""
    first, second = Counter({7: 30, 2: 50, 900: 20}), Counter({7: 60, 2: 70, 900: 70})
    wanted = stats.chi2_contingency([[50, 30, 20], [70, 60, 70]], correction=False)
    fit = two_sample(first, second)
    assert (fit.statistic, fit.degrees, fit.p) == pytest.approx((wanted.statistic, wanted.dof, wanted.pvalue))
    with pytest.raises(ValueError, match="always the same token"):
        two_sample(Counter({7: 100}), Counter({7: 100}))


def test_rare_outcomes_are_merged_and_impossible_ones_never_excused() -> None:
    """Caught: a token that top-k had dropped was merged with likely ones, and its coming up passed as chance."""
    expected = torch.tensor([0.0, 1.0, 30.0, 2.0, 2.5, 0.1, 60.0, 4.4])
    groups = merged(expected)
    assert (distribution.grouped(expected, groups) >= 5).all()
    assert groups.tolist() == [0, 0, 1, 0, 0, 0, 2, 1]
    probs = torch.tensor([0.5, 0.5, 0.0])
    assert chi_square(torch.tensor([50, 50, 0]), probs).p == 1
    assert chi_square(torch.tensor([50, 49, 1]), probs).p == 0
    with pytest.raises(ValueError, match="too few draws"):
        chi_square(torch.tensor([1, 1, 0]), probs)


def test_p_values_are_uniform_where_the_probabilities_are_right() -> None:
    """Caught: groups chosen by what was observed, or kept below 5, which makes p too small or too large on average."""
    probs = exact(cell("skewed", temperature=0.7)).flatten()
    generator = torch.Generator().manual_seed(1)
    p_values = [chi_square(torch.bincount(torch.multinomial(probs, 2000, True, generator=generator), minlength=len(probs)),
                           probs).p for _ in range(100)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_holm_corrects_step_by_step() -> None:
    """Caught: adjusted values that were not monotonic, so that a larger p was rejected and a smaller one was not."""
    assert holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_cells_together_are_as_uniform_as_each() -> None:
    """Caught: the three dependent findings of one cell counted three times; an impossible outcome drowned by the rest."""
    generator, p_values = torch.Generator().manual_seed(2), []
    for _ in range(100):
        found = []
        for tested in CELLS[:2]:
            probs = exact(tested).flatten()
            seen = torch.bincount(torch.multinomial(probs, 1000, True, generator=generator), minlength=len(probs))
            found += [Finding(tested, tokens, 1000, chi_square(seen, probs)) for tokens in ("1-2", "2-3")]
        p_values.append(together(found).p)
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert together(found).degrees == found[0].fit.degrees + found[2].fit.degrees
    assert together([*found, Finding(CONTROL, "1-4", 1000, distribution.Fit(0.0, 1, 0.0))]).p == 0


def test_both_couplings_share_50_000_draws() -> None:
    """Caught: a coupling with hardly any draws, or with one K, one temperature, or a warp that no cell has."""
    draws = dict(zip(CELLS, run_sampling.default_draws(CELLS), strict=True))
    for coupling in run_sampling.COUPLINGS:
        cells = [tested for tested in CELLS if tested.sampling.coupling == coupling]
        assert sum(draws[tested] for tested in cells) >= 25_000 and len({draws[tested] for tested in cells}) == 1
        assert len({tested.num_speculative_tokens for tested in cells}) >= 4
        assert len({tested.sampling.temperature for tested in cells}) >= 3
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            assert any(getattr(tested.sampling, name) != off for tested in cells), (coupling, name)


def test_exact_probabilities_are_a_distribution_and_end_at_the_end_token() -> None:
    """Caught: sequences that go on after the end token, so that the rest was compared with the wrong table."""
    ending = exact(cell("ends", end_token=3, vocab_size=5))
    assert float(ending.sum()) == pytest.approx(1)
    assert float(ending[3].sum()) == pytest.approx(float(ending[3, 3, 3, 3]))
    free = exact(cell("free", vocab_size=5))
    table = distribution.tables(5, 0.0)[0].double()
    by_hand = 1.0
    for before, last, token in zip((3, 0, 2, 1), (0, 2, 1, 4), (2, 1, 4, 4), strict=True):
        by_hand *= float(table[before, last].softmax(-1)[token])
    assert float(free[2, 1, 4, 4]) == pytest.approx(by_hand, rel=1e-5)


def test_a_table_model_sees_only_what_the_mask_shows() -> None:
    """Caught: a sibling's row computed after its neighbour in the pass instead of its parent in the chain."""
    table = torch.arange(64.0).view(4, 4, 4)
    model = TableModel(table)
    model.prefill(torch.tensor([0, 1, 2]))
    visible = torch.ones(4, 4, dtype=torch.bool).tril_()
    visible[3] = torch.tensor([True, False, False, True])  # a sibling that competes with the first draft token
    logits = model.forward(torch.tensor([3, 1, 2, 2]), torch.tensor([3, 4, 5, 4]), visible)
    assert torch.equal(logits, table[[2, 3, 1, 3], [3, 1, 2, 2]])
    model.crop(2)
    assert torch.equal(model.forward(torch.tensor([3])), table[1, 3].unsqueeze(0))


def test_outcomes_do_not_depend_on_how_the_work_is_divided() -> None:
    """Caught: state of one generation leaking into the next, so that counts depended on chunks and processes."""
    for tested in (CELLS[3], CELLS[10]):
        halves = Tally()
        for generations in (range(15), range(15, 40)):
            halves += count(tested, generations)
        assert halves == count(tested, range(40))


def test_every_cell_speculates() -> None:
    """Caught: settings under which nothing was drafted or accepted, so that a cell passed without testing anything."""
    for tested in CELLS:
        tally = count(tested, range(60))
        assert 0 < tally.accepted < tally.drafted, tested.name
        assert tally.suggestions > 0 or tested.drafter == "lookup", tested.name
        tally.counts(tested.vocab_size)


def drop_what_looks_wrong(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The old mistake of adapted K: the token that ends the draft is itself thrown away because it is unlikely."""
    propose = ModelDrafter.propose

    def dropping(self: ModelDrafter, *args: Any, **kwargs: Any) -> Proposal:
        proposal = propose(self, *args, **kwargs)
        if proposal.confidences and proposal.confidences[-1] < 0.4:
            for column in ("tokens", "confidences", "chances", "draft_probs", "alternatives"):
                getattr(proposal, column).pop()
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", dropping)
    return replace(HONEST, num_speculative_tokens=1)


def recover_from_the_target(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The recovered token drawn from the target's distribution instead of the residual."""
    monkeypatch.setattr("acceptance.residual", lambda target_probs, draft_probs: target_probs)
    return HONEST


def repeat_the_noise(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The same Gumbel noise at two positions: each token alone is distributed as it should be, two together are not."""
    noise = distribution.probabilities.__globals__["gumbel_noise"]
    monkeypatch.setattr("drafters.gumbel_noise", lambda seed, position, size: noise(seed, position // 2, size))
    return replace(HONEST, sampling=replace(HONEST.sampling, coupling="gumbel"))


def misrecord(_: pytest.MonkeyPatch) -> Cell:
    """The control of --check itself."""
    return STRONG


@pytest.mark.parametrize("mutation", [drop_what_looks_wrong, recover_from_the_target, repeat_the_noise, misrecord])
def test_known_mistakes_are_noticed(mutation: Callable[[pytest.MonkeyPatch], Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a check that cannot fail. Each of these mistakes is rejected after few draws."""
    broken = mutation(monkeypatch)
    [finding] = judge(broken, count(broken, range(DRAWS)))
    assert finding.fit.p < 1e-6


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SmallCheck:
    """Run --check on two given cells, in this process; exit code and rows."""

    def run(tested: Cell, control: Cell) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(run_sampling, "CELLS", (tested,))
        monkeypatch.setattr(run_sampling, "CONTROL", control)
        output = tmp_path / "check.jsonl"
        code = run_sampling.main(["--check", "--draws", str(DRAWS), "--threads", "1", "--output", str(output)])
        return code, rows_of(output)

    monkeypatch.setattr(run_sampling, "count", functools.cache(count))  # a cell that comes again need not run again
    return run


def test_the_exit_code_of_the_check(small_check: SmallCheck) -> None:
    """Caught: an exit code of 0 when a cell was off, or when the control had gone unnoticed."""
    code, rows = small_check(HONEST, STRONG)
    assert (code, [row["type"] for row in rows]) == (0, ["header", "cell", "control", "coupling", "verdict"])
    assert rows[1]["p_adjusted"] > 1e-3 > 1e-6 > rows[2]["p"]
    assert small_check(HONEST, HONEST)[0] == 1
    assert small_check(STRONG, STRONG)[0] == 1


TINY = ["--pair", "tiny", "--threads", "1", "--output"]


def test_both_couplings_beside_plain_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a coupled output that was not plain sampling's went unreported, or rows that lacked a variant."""
    arguments = ["--limit", "2", "--max-new-tokens", "12", "-K", "3", *TINY, str(tmp_path / "s.jsonl")]
    assert run_sampling.main(arguments) == 0
    rows = rows_of(tmp_path / "s.jsonl")[1:]
    assert [row["variant"] for row in rows] == ["plain", "gumbel", "rejection"] * 2
    assert [row["same_as_plain"] for row in rows] == [None, True, None] * 2
    assert all(row["drafted"] for row in rows if row["variant"] != "plain")
    assert "2/2" in capsys.readouterr().out
    monkeypatch.setattr(run_sampling, "variant_config", other_seeds(run_sampling.variant_config))
    assert run_sampling.main([*arguments, "--coupling", "gumbel"]) == 1
    assert [row["variant"] for row in rows_of(tmp_path / "s.jsonl")[1:]] == ["plain", "gumbel"] * 2


def other_seeds(variant_config: Callable[..., GenerationConfig]) -> Callable[..., GenerationConfig]:
    """Configurations in which plain sampling has another seed and temperature than the rest."""

    def changed(args: Any, pair: Any, sampling: SamplingParams, name: str, **settings: Any) -> GenerationConfig:
        if name == "plain":
            sampling = replace(sampling, seed=sampling.seed + 1000, temperature=0.05)
        return variant_config(args, pair, sampling, name, **settings)

    return changed


def test_the_exit_code_of_the_two_sample_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a test of the pair in which nothing was drafted, or one that another temperature passed."""
    arguments = ["--two-sample", "--draws", "50", *TINY, str(tmp_path / "t.jsonl")]
    assert run_sampling.main(arguments) == 0
    rows = rows_of(tmp_path / "t.jsonl")[1:]
    assert [(row["variant"], row["drafted"] > 0) for row in rows] == [("plain", False), ("gumbel", True), ("rejection", True)]
    with pytest.raises(ValueError, match="nothing was drafted"):
        run_sampling.main([*arguments, "--drafter", "none"])
    monkeypatch.setattr(run_sampling, "variant_config", other_seeds(run_sampling.variant_config))
    assert run_sampling.main(arguments) == 1
