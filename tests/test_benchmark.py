"""The benchmark: what is run, what is written, and what its numbers say."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import benchmark
import card
import replay
import results
from assemble import make_drafter
from drafters import ModelDrafter
from models import load_pair
from policy import FixedK
from shapes import Widths
from spec_decode import GenerationConfig, SpeculativeDecoder
from summary import ratio, summarize, table
from variants import VARIANTS, HuggingFace, Ours, Outcome

TASKS = [benchmark.Task(f"p{i}", "even" if i % 2 == 0 else "odd", (1, 2, i)) for i in range(4)]
NAMES = ("plain", "hf-greedy", "hf-assisted", "dynamic")
SECONDS = {"plain": 2.0, "hf-greedy": 4.0, "hf-assisted": 3.0, "dynamic": 1.0}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny models gain nothing from threads, and lose much where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fake:
    """A runner that returns chosen tokens in chosen seconds."""

    def __init__(self, seconds: float = 1.0, tokens: Sequence[int] = (7, 8, 9), bits: str = "a", interrupt: int = -1) -> None:
        self.seconds, self.tokens, self.bits, self.interrupt, self.calls = seconds, list(tokens), bits, interrupt, 0

    def __call__(self, prompt: Sequence[int], max_new_tokens: int) -> Outcome:
        self.calls += 1
        if self.calls == self.interrupt:
            raise KeyboardInterrupt
        return Outcome(list(self.tokens), self.seconds, self.seconds / 4, digests=[self.bits] * len(self.tokens),
                       figures={"acceptance_rate": None, "tokens_per_round": 1.0})


def fakes(**changes: Fake) -> dict[str, Fake]:
    return {name: changes.get(name.replace("-", "_"), Fake(SECONDS[name])) for name in NAMES}


def session(runners: dict[str, Fake], **changes) -> benchmark.Session:
    return benchmark.Session(TASKS, runners, changes.pop("reference", runners.get("plain") or Fake()), 3, **changes)


def arguments(path: Path, *flags: str):
    base = ("--pair", "tiny", "--dtype", "fp32", "--limit", "3", "--max-new-tokens", "6", "--output", str(path))
    return benchmark.complete(benchmark.parse_args([*base, *flags]))


def run_row(variant: str, prompt: str, seconds: float, tokens: int = 60, category: str = "code", repeat: int = 0, **more):
    return {"variant": variant, "label": variant, "family": VARIANTS[variant].family, "prompt_id": prompt,
            "category": category, "repeat": repeat, "new_tokens": tokens, "seconds": seconds,
            "first_token_seconds": seconds / 10, "acceptance_rate": None, "tokens_per_round": None, "same_ids": True,
            "same_bits": None} | more


class TestSummary:
    def test_ratios_by_hand(self) -> None:
        """An arithmetic mean, or a ratio of totals, would say 3.4 or 1.6 where the geometric mean of 0.5 and 8 is 2."""
        rows = [run_row("dynamic", "a", 6), run_row("hf-greedy", "a", 3), run_row("dynamic", "b", 1),
                run_row("hf-greedy", "b", 8)]
        found = summarize(rows)["ratio_vs_hf_greedy"]
        assert found["mean"] == pytest.approx(2)
        assert (found["low"], found["high"]) == (pytest.approx(0.5), pytest.approx(8))

    def test_rate_counts_tokens_not_only_seconds(self) -> None:
        """Comparing seconds alone favours the side that stopped earlier."""
        rows = [run_row("dynamic", "a", 2, tokens=10), run_row("plain", "a", 4, tokens=40)]
        assert summarize(rows)["ratio_vs_plain"]["mean"] == pytest.approx(0.5)

    def test_a_ratio_below_one_is_printed_as_such(self) -> None:
        """A benchmark that shows speed-ups only would hide the loss."""
        rows = [run_row("dynamic", "a", 4), run_row("hf-greedy", "a", 3), run_row("plain", "a", 2)]
        assert summarize(rows)["ratio_vs_plain"] == {"mean": pytest.approx(0.5), "low": pytest.approx(0.5),
                                                     "high": pytest.approx(0.5)}
        line = next(line for line in table(rows, NAMES).splitlines() if line.startswith("dynamic"))
        assert "0.75 (0.75-0.75)" in line
        assert "0.50 (0.50-0.50)" in line

    def test_a_missing_variant_has_no_ratio(self) -> None:
        """A made-up 1.0 for a variant that was not measured."""
        found = summarize([run_row("dynamic", "a", 4), run_row("plain", "b", 4)])
        assert found["ratio_vs_hf_greedy"] is None
        assert found["ratio_vs_plain"] is None  # no prompt in common
        assert "n/a" in table([run_row("dynamic", "a", 4)], NAMES)

    def test_categories_and_first_token(self) -> None:
        """A category's ratio taken from all prompts; a first-token ratio upside down."""
        rows = [run_row("dynamic", "a", 1), run_row("hf-assisted", "a", 4), run_row("dynamic", "b", 2, category="chat"),
                run_row("hf-assisted", "b", 2, category="chat")]
        found = summarize(rows)
        assert found["categories"]["code"]["ratio_vs_hf_assisted"]["mean"] == pytest.approx(4)
        assert found["categories"]["chat"]["ratio_vs_hf_assisted"]["mean"] == pytest.approx(1)
        assert found["first_token_ratio_vs_hf_assisted"]["mean"] == pytest.approx(0.5)

    def test_both_couplings_against_stock_sampling(self) -> None:
        """A last line without the figures that were asked for, or with greedy decoding's name on them."""
        seconds = {"hf-greedy": 6.0, "plain": 4.0, "dynamic": 2.0, "rejection": 1.5}
        rows = [run_row(name, prompt, took, sampled=True) for name, took in seconds.items() for prompt in ("p0", "p1")]
        found = summarize(rows)
        wanted = {"coupled": 3, "rejection": 4, "plain": 1.5}
        assert {name: found[f"{name}_ratio_vs_hf_sampling"]["mean"] for name in wanted} == pytest.approx(wanted)
        assert "vs HF sampling" in table(rows, list(seconds))
        assert not any("sampling" in key for key in summarize([run_row("dynamic", "p0", 1.0)]))

    def test_order_of_rows_is_irrelevant(self) -> None:
        """A bootstrap, or a sum over repeats, that depends on the order in which rows were written."""
        source = random.Random(1)
        rows = [run_row(name, f"p{i}", source.uniform(1, 9), category="xy"[i % 2], repeat=repeat)
                for name in NAMES for i in range(6) for repeat in range(3)]
        shuffled = source.sample(rows, len(rows))
        assert summarize(shuffled) == summarize(rows)
        assert table(shuffled, NAMES) == table(rows, NAMES)

    def test_interval_holds_the_mean(self) -> None:
        """Percentiles of another quantity than the one reported."""
        rows = [run_row(name, f"p{i}", 1 + i % 5 + (name == "plain")) for name in ("dynamic", "plain") for i in range(12)]
        found = ratio(rows, "dynamic", "plain")
        assert found is not None
        assert found["low"] < found["mean"] < found["high"]


class TestSession:
    def test_each_variant_runs_each_prompt_once(self) -> None:
        """A rotation that drops or repeats a variant."""
        for turn in range(20):
            for names in (benchmark.QUICK, benchmark.DEFAULT, tuple(VARIANTS), ("dynamic",), ("hf-lookup", "dynamic")):
                assert sorted(benchmark.order(names, turn)) == sorted(names)

    def test_references_run_first_and_sides_take_turns(self) -> None:
        """An output compared before its reference is known; one side always on the warmed-up machine."""
        orders = [benchmark.order(benchmark.DEFAULT, turn) for turn in range(8)]
        assert all(names.index("plain") < min(names.index(k) for k in ("k2", "k11", "dynamic")) for names in orders)
        assert all(names.index("hf-greedy") < names.index("hf-assisted") for names in orders)
        first = [names.index("hf-assisted") < names.index("dynamic") for names in orders]
        assert 2 <= sum(first) <= 6

    def test_equal_outputs_make_no_difference(self) -> None:
        """The control of the tests below."""
        rows = list(session(fakes()).run())
        assert len(rows) == 16
        assert summarize(rows)["differences"] == 0
        assert all(row["same_ids"] for row in rows)

    def test_broken_output_is_counted(self) -> None:
        """A variant with wrong tokens that goes unnoticed."""
        rows = list(session(fakes(dynamic=Fake(tokens=(7, 8, 1)))).run())
        assert summarize(rows)["differences"] == len(TASKS)
        assert not any(row["same_ids"] for row in rows if row["variant"] == "dynamic")

    def test_wrong_bits_are_counted(self) -> None:
        """The same ids from other logits pass for exact."""
        rows = list(session(fakes(dynamic=Fake(bits="b"))).run())
        found = [(row["same_ids"], row["same_bits"]) for row in rows if row["variant"] == "dynamic"]
        assert found == [(True, False)] * len(TASKS)
        assert summarize(rows)["differences"] == len(TASKS)

    def test_hugging_face_is_compared_with_its_own_greedy_output(self) -> None:
        """Stock assisted generation held against our bits, or its mismatch counted as ours."""
        rows = list(session(fakes(hf_greedy=Fake(tokens=(1,)), hf_assisted=Fake(tokens=(2,)))).run())
        assert [row["same_ids"] for row in rows if row["family"] == "hf"] == [True, False] * len(TASKS)
        assert summarize(rows)["differences"] == 0

    def test_reference_is_decoded_when_plain_is_not_measured(self) -> None:
        """Without plain among the variants nothing is compared and every output passes."""
        runners = fakes(dynamic=Fake(tokens=(7, 8, 1)))
        del runners["plain"]
        reference = Fake()
        rows = list(session(runners, reference=reference, repeats=2).run())
        assert summarize(rows)["differences"] == 2 * len(TASKS)
        assert reference.calls == len(TASKS)

    def test_samples_of_another_stream_are_not_compared(self) -> None:
        """Rejection sampling, or Hugging Face's, called wrong for drawing other tokens than coupled sampling."""
        runners = fakes(hf_assisted=Fake(tokens=(3,))) | {"rejection": Fake(tokens=(4,))}
        rows = list(session(runners, sampled=True).run())
        assert {row["variant"] for row in rows if row["same_ids"] is None} == {"hf-greedy", "hf-assisted", "rejection"}
        assert {row["label"] for row in rows if row["variant"] in ("hf-greedy", "dynamic", "plain")} == {
            "Hugging Face sampling", "dynamic K, coupled sampling", "plain sampling"}
        assert summarize(rows)["differences"] == 0

    def test_resumed_rows_are_not_measured_again(self) -> None:
        """A resumed run that repeats finished work, or forgets the reference of an earlier one."""
        done = list(session(fakes()).run())
        runners = fakes(dynamic=Fake(tokens=(7, 8, 1)))
        again = session(runners, rows=done[:5])
        assert len(list(again.run())) == 11
        assert sum(runner.calls for runner in runners.values()) == 11
        assert {(r["variant"], r["prompt_id"]) for r in again.rows} == {(r["variant"], r["prompt_id"]) for r in done}
        assert summarize(again.rows)["differences"] == 3 + (done[3]["variant"] != "dynamic")


class TestFile:
    @pytest.fixture(autouse=True)
    def _runners(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runners = fakes()
        monkeypatch.setattr(benchmark, "make_runners", lambda args, pair: (self.runners, self.runners["plain"]))

    def test_interrupted_and_resumed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Ctrl-C that loses finished rows, leaves a broken file, or a resumed run that starts over."""
        path, pair = tmp_path / "r.jsonl", load_pair("tiny")
        self.runners["dynamic"] = Fake(interrupt=3)  # the warm-up is its first call
        with pytest.raises(KeyboardInterrupt):
            benchmark.compare(arguments(path, "--quick"), pair)
        assert "dynamic K" in capsys.readouterr().err
        _, before = results.read(path)
        assert {row["type"] for row in before} == {"run"}
        assert 0 < len(before) < 12
        self.runners["dynamic"] = Fake()
        assert benchmark.compare(arguments(path, "--quick", "--resume"), pair) == 0
        _, rows = results.read(path)
        assert rows[:len(before)] == before
        assert len(rows) == 13
        printed = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert rows[-1] == {"type": "summary"} | printed
        assert printed == summarize(rows[:-1])

    def test_a_cut_off_line_is_mended(self, tmp_path: Path) -> None:
        """The next row glued to half a row of a killed run: the file never parses again."""
        path, pair = tmp_path / "r.jsonl", load_pair("tiny")
        benchmark.compare(arguments(path, "--quick"), pair)
        path.write_text(path.read_text()[:-700])
        assert not path.read_text().endswith("\n")
        benchmark.compare(arguments(path, "--quick", "--resume"), pair)
        rows = results.read(path)[1]
        assert [row["type"] for row in rows] == ["run"] * 12 + ["summary"]
        assert rows[-1]["runs"] == 12

    def test_resuming_a_finished_run_leaves_one_summary(self, tmp_path: Path) -> None:
        """A reader that takes the first of two summaries."""
        path, pair = tmp_path / "r.jsonl", load_pair("tiny")
        benchmark.compare(arguments(path, "--quick"), pair)
        old = path.read_text()
        benchmark.compare(arguments(path, "--quick", "--resume"), pair)
        assert path.read_text() == old

    @pytest.mark.parametrize("flags", [("--max-new-tokens", "5"), ("--limit", "2"), ("--variants", "plain,dynamic"),
                                       ("--no-digests",), ("--temperature", "0.5", "--variants", ",".join(NAMES))])
    def test_other_settings_are_refused(self, tmp_path: Path, flags: tuple[str, ...]) -> None:
        """Rows of two experiments under one header."""
        path, pair = tmp_path / "r.jsonl", load_pair("tiny")
        benchmark.compare(arguments(path, "--quick"), pair)
        with pytest.raises(ValueError, match="cannot be resumed"):
            benchmark.compare(arguments(path, "--quick", "--resume", *flags), pair)

    def test_the_header_names_the_models_that_were_loaded(self, tmp_path: Path) -> None:
        """A draft model in the caption of a run that never loaded one."""
        pair = load_pair("tiny")
        for names, draft in (("plain,hf-greedy,hf-lookup,dynamic-lookup,dynamic-self", None), ("plain,k2", "tiny-draft"),
                             ("hf-assisted", "tiny-draft")):
            header = benchmark.settings(arguments(tmp_path / "r.jsonl", "--variants", names), pair, TASKS)
            assert (header["target"], header["draft"]) == ("tiny-target", draft)
            assert (header["draft_digest"] is None) == (draft is None)

    def test_older_results_are_kept(self, tmp_path: Path) -> None:
        """A new run, interrupted at once, that has already destroyed the old file."""
        path, pair = tmp_path / "r.jsonl", load_pair("tiny")
        benchmark.compare(arguments(path, "--quick"), pair)
        old = path.read_text()
        self.runners["plain"] = Fake(interrupt=1)
        with pytest.raises(KeyboardInterrupt):
            benchmark.compare(arguments(path, "--quick"), pair)
        assert [file.read_text() for file in (tmp_path / "older").iterdir()] == [old]


class TestFlags:
    def test_sizes(self) -> None:
        """--quick that measures everything, or an own prompt file that is silently cut to 24."""
        def chosen(*flags: str):
            args = benchmark.complete(benchmark.parse_args(flags))
            return args.limit, args.max_new_tokens, len(args.variants)

        assert chosen() == (24, 96, 8)
        assert chosen("--quick") == (4, 48, 4)
        assert chosen("--full") == (None, 96, len(VARIANTS) - 1)
        assert chosen("--prompts", "mine.jsonl") == (None, 96, 8)
        assert chosen("--temperature", "0.8") == (24, 96, 9)

    def test_rejection_needs_a_temperature(self) -> None:
        """A greedy run in a column called rejection sampling."""
        with pytest.raises(ValueError, match="temperature"):
            benchmark.complete(benchmark.parse_args(["--variants", "plain,rejection"]))

    def test_a_sampled_run_has_a_file_of_its_own(self) -> None:
        """The greedy results, from which the tables are made, were moved aside by a run at a temperature."""
        for flags, name in (([], "benchmark"), (["--temperature", "0.8"], "benchmark-sampling"), (["--card"], "card")):
            assert benchmark.complete(benchmark.parse_args(flags)).output == results.FOLDER / f"{name}.jsonl"

    def test_unknown_variant(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A misspelt variant that fails after the models were loaded."""
        with pytest.raises(SystemExit):
            benchmark.parse_args(["--variants", "plain,dynamc"])
        assert "dynamc" in capsys.readouterr().err


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    """All variants on one prompt of the tiny pair, in fp32, where both sides decode alike."""
    pair, args = load_pair("tiny"), arguments(tmp_path_factory.mktemp("v") / "r.jsonl", "--full")
    sides = {"hf": HuggingFace(pair, args), "ours": Ours(pair, args)}
    prompt = pair.encode("Count to three: one, two, one, two")
    return {name: sides["hf" if VARIANTS[name].family == "hf" else "ours"].runner(VARIANTS[name])(prompt, 12)
            for name in args.variants}


class TestVariants:
    def test_all_decode_the_same(self, outcomes: dict[str, Outcome]) -> None:
        """Two sides that differ in prompt, end tokens or length are not comparable."""
        assert all(outcome.tokens == outcomes["plain"].tokens for outcome in outcomes.values())
        assert len(outcomes["plain"].tokens) == 12

    def test_bits_of_ours_are_recorded(self, outcomes: dict[str, Outcome]) -> None:
        """A comparison of bits between two empty lists."""
        assert len(outcomes["plain"].digests) == 12
        ours = [outcome for name, outcome in outcomes.items() if VARIANTS[name].family == "ours"]
        assert len(ours) == 14
        assert all(outcome.digests == outcomes["plain"].digests for outcome in ours)

    def test_the_stopping_rule_stops(self, outcomes: dict[str, Outcome]) -> None:
        """A variant called 'confidence stop' that drafts as our own rule says: a draft without confidence is one token long."""
        depth = {name: len(outcomes[name].figures["acceptance_by_position"]) for name in ("stop-int4", "stop-bf16", "k4-bf16")}
        assert depth["stop-int4"] == depth["stop-bf16"] == 1 < depth["k4-bf16"]

    def test_passes_of_both_sides(self, outcomes: dict[str, Outcome]) -> None:
        """Tokens per round that count the prefill, or a first pass whose tokens are lost."""
        for name in ("plain", "hf-greedy"):
            assert (outcomes[name].figures["target_passes"], outcomes[name].figures["tokens_per_round"]) == (11, 1.0)
        assert outcomes["hf-assisted-k4"].figures["target_passes"] < 11
        assert all(0 < outcome.first_token_seconds < outcome.seconds for outcome in outcomes.values())

    def test_rows_fit_json(self, outcomes: dict[str, Outcome]) -> None:
        """NaN or a tensor in a row: the file cannot be written."""
        for name, outcome in outcomes.items():
            json.dumps(VARIANTS[name].row() | outcome.row(), allow_nan=False)


class TestReplay:
    widths = Widths({1: 10.0, 16: 10.0})
    trace = replay.Trace("p", tuple(replay.Position((0.9,) * min(12, 8 - i), min(2, 8 - i)) for i in range(9)))

    def rows(self) -> dict[str, dict]:
        return {row["policy"]: row for row in replay.compare([self.trace], 1.0, self.widths)}

    def test_known_trace(self) -> None:
        """Two of any draft are right: K = 2 takes 3 rounds of 12 s, plain decoding 9 of 10 s."""
        rows = self.rows()
        assert rows["fixed-2"]["tokens_per_second"] == pytest.approx(9 / 36)
        assert rows["fixed-2"]["regret"] == 0
        assert rows["fixed-0"]["tokens_per_second"] == pytest.approx(9 / 90)
        assert rows["fixed-0"]["regret"] == pytest.approx(0.6)
        assert rows["fixed-3"]["tokens_per_second"] == pytest.approx(9 / 38)  # the last round has room for two
        assert rows["fixed-3"]["mean_k"] == pytest.approx(8 / 3)
        assert rows["fixed-2"]["tokens_per_round"] == 3

    def test_every_policy_is_bounded_by_the_trace(self) -> None:
        """A policy that drafts on where the trace ends, or is paid for tokens beyond the limit."""
        assert set(self.rows()) >= {"dynamic", "confidence-stop", "heuristic", "fixed-12"}
        for make in replay.policies(self.widths).values():
            assert replay.play(self.trace, make(), 1.0, self.widths).tokens == 9

    def test_policies_start_anew_with_each_prompt(self) -> None:
        """What one prompt taught must not help the next: the engine forgets it too."""
        for make in replay.policies(self.widths).values():
            policy = make()
            assert replay.play(self.trace, policy, 1.0, self.widths) == replay.play(self.trace, policy, 1.0, self.widths)

    def test_replay_is_what_the_engine_does(self, tmp_path: Path) -> None:
        """A trace off by one position, or a draft cache that was not cropped: other rounds than in real decoding."""
        pair = load_pair("tiny")
        ours = Ours(pair, arguments(tmp_path / "r.jsonl"), digests=False)
        draft, prompt = ours.draft("model", "int4"), pair.encode("Name three colours, please")
        output = ours.runner(VARIANTS["plain"])(prompt, 32).tokens
        trace = replay.Recorder(draft, len(pair.tokenizer)).record("p", prompt, output)
        assert len(trace.positions) == 31
        for k in (1, 3, 6):
            drafter = make_drafter("model", draft)
            assert isinstance(drafter, ModelDrafter)
            engine = SpeculativeDecoder(ours.target, drafter, vocab_size=len(pair.tokenizer), widths=ours.widths)
            generation = engine.generate(prompt, GenerationConfig(32, k, siblings=False))
            assert generation.run() == output
            earned = replay.play(trace, FixedK(k, ours.widths), 1.0, ours.widths)
            found = generation.statistics
            assert (earned.rounds, earned.drafted) == (found.target_passes, found.drafted)


class TestCard:
    def test_prediction_by_hand(self) -> None:
        """Acceptance 0.5, a draft step of 1, a pass of 10: K = 2 earns 1.75 / 12, K = 3 1.875 / 13, K = 4 1.9375 / 14."""
        found = card.predict(0.5, 1.0, Widths({1: 10.0, 16: 10.0}))
        assert (found["k"], found["width"], found["advice"]) == (2, 3, "K = 2")
        assert found["tokens_per_second"] == pytest.approx(1.75 / 12)
        assert found["speedup"] == pytest.approx(1.75 / 1.2)

    def test_no_speculation_where_it_does_not_pay(self) -> None:
        """A card that always recommends something."""
        assert card.predict(0.9, 10.0, Widths({1: 10.0, 16: 10.0}))["advice"] == "do not speculate"

    def test_widths_that_are_not_proven_are_not_recommended(self) -> None:
        """K = 9 where every pass has 8 rows."""
        found = card.predict(0.95, 0.01, Widths.fixed(8))
        assert (found["k"], found["width"]) == (7, 8)

    def test_read_bandwidth_is_plausible(self) -> None:
        """Bytes taken for elements, or a read that the chunks do not cover."""
        assert 0.5 < card.read_gbps(torch.device("cpu"), 1 << 24) < 5000
