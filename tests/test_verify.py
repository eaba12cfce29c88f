"""verify.py: speculative output equals plain decoding to the bit, and the check is able to say that it does not."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import acceptance
import assemble
import cli
import results
import tables
import verify
from comparison import first_difference
from crosscheck import Trace, cross_check
from findings import Findings
from models import load_pair
from proven_widths import SLOW_CANDIDATES
from sampling import SamplingParams
from shapes import CANDIDATES
from transformer import Decoder

BACKENDS = ("native", "torch")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths measured here must not become those of the user's engine; one thread: nothing here is large."""
    monkeypatch.setattr(assemble, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(tmp_path: Path, *flags: str, prompts: list[str] | None = None) -> tuple[int, dict]:
    """Exit code and the content of --json, for the tiny pair."""
    file = tmp_path / "prompts.jsonl"
    texts = prompts or ["def add(a, b):", "Count from 1 to 60: 1, 2, 3,"]
    file.write_text("".join(json.dumps({"id": f"p{i}", "category": "test", "prompt": text}) + "\n"
                            for i, text in enumerate(texts)))
    code = verify.main(["--pair", "tiny", "--raw", "--prompts", str(file), "--json", str(tmp_path / "out.json"),
                        "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "32", *flags])
    return code, json.loads((tmp_path / "out.json").read_text())


class TestExactness:
    @pytest.mark.parametrize(("backend", "dtype"), list(itertools.product(BACKENDS, ("bf16", "fp32"))))
    def test_greedy_output_is_plain_decoding_to_the_bit(self, tmp_path: Path, backend: str, dtype: str) -> None:
        """A pass of another width gave other bits, so accepted tokens were another model's (trial 1)."""
        code, found = run(tmp_path, "-K", "1,3,7,dynamic", "--dtype", dtype, "--backend", backend, "--no-cross-checks")
        assert (code, found["comparisons"], found["differences"]) == (0, 8, 0)
        by_count = {row["num_speculative_tokens"]: row for row in found["by_num_speculative_tokens"]}
        assert list(by_count) == ["1", "3", "7", "dynamic"]
        assert 0 < by_count["3"]["accepted"] < by_count["3"]["drafted"]  # both branches of the accept rule were taken

    @pytest.mark.parametrize("drafter", ["model", "lookup", "self"])
    def test_whoever_drafts(self, tmp_path: Path, drafter: str) -> None:
        """The drafter had a say in the output."""
        code, found = run(tmp_path, "-K", "4", "--drafter", drafter, "--no-cross-checks")
        assert (code, found["comparisons"], found["differences"]) == (0, 2, 0)

    @pytest.mark.parametrize(("backend", "length"), [*(("native", length) for length in range(509, 516)),
                                                     *(("torch", length) for length in (509, 511, 512, 513))])
    def test_prompts_that_end_around_a_block(self, tmp_path: Path, backend: str, length: int) -> None:
        """The visible length changes at 512 slots, in the middle of a pass or between two."""
        text = ("The quick brown fox jumps over the lazy dog. " * 12)[:length]
        code, found = run(tmp_path, "-K", "3,dynamic", "--max-new-tokens", "10", "--backend", backend, "--no-cross-checks",
                          prompts=[text])
        assert code == 0
        assert found["differences"] == 0
        assert results.read(tmp_path / "out.jsonl")[1][0]["prompt_tokens"] == length

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_generation_across_a_block(self, tmp_path: Path, backend: str) -> None:
        """A long generation crosses the block with rejected tokens behind it in the cache."""
        code, found = run(tmp_path, "-K", "7,dynamic", "--max-new-tokens", "40", "--backend", backend, "--no-cross-checks",
                          prompts=["a" * 490])
        assert (code, found["differences"]) == (0, 0)

    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_short_prompts_and_one_token(self, tmp_path: Path, dtype: str) -> None:
        """The first token came from another pass than that of plain decoding (trial 2); a one-token prompt (trial 3)."""
        prompts = ["x" * length for length in (1, 2, 3, 8, 17, 50)]
        for limit in ("1", "2", "6"):
            code, found = run(tmp_path, "-K", "5", "--max-new-tokens", limit, "--dtype", dtype, "--no-cross-checks",
                              prompts=prompts)
            assert (code, found["comparisons"], found["differences"]) == (0, 6, 0)

    def test_a_single_id_then_a_letter_on_one_engine(self) -> None:
        """Prompt ids [[10]], then "a", 64 tokens, K = 5: the cache of the first showed in the second (trial 3)."""
        args = verify.parse_args(["--pair", "tiny", "--max-new-tokens", "64"])
        pair = load_pair("tiny")
        assembled = assemble.assemble(pair, args)
        for ids in ([10], pair.encode("a", raw=True)):
            plain, spec = (verify.run_one(assembled, pair, args, ids, SamplingParams(), count) for count in (0, 5))
            assert plain.emitted == 64
            assert first_difference(plain, spec) is None

    def test_coupled_sampling(self, tmp_path: Path) -> None:
        """Sampled output depended on what was drafted; and the seeds must matter."""
        code, found = run(tmp_path, "-K", "1,4,dynamic", "--temperature", "0.8", "--seeds", "0,1,2")
        assert (code, found["comparisons"], found["differences"]) == (0, 18, 0)
        assert found["cross_checks"] == []

    def test_several_drafters_share_the_plain_decoding(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A draft of the one drafter in the cache of another; or plain decoding once per drafter and K: hours."""
        plain, run_one = [], verify.run_one
        monkeypatch.setattr(verify, "run_one", lambda *a, **k: plain.append(a[5]) or run_one(*a, **k))
        code, found = run(tmp_path, "-K", "1,4", "--temperature", "0.8", "--seeds", "3,4", "--drafters",
                          "model:int4,model:bf16,lookup,both,self:int8", prompts=["x y x y x y x y", "Count: 1, 2, 3,"])
        assert (code, found["comparisons"], found["differences"]) == (0, 2 * 2 * 5 * 2, 0)
        assert plain.count(0) == 4
        sums = {(row["drafter"], row["num_speculative_tokens"]): row for row in found["by_num_speculative_tokens"]}
        assert list(sums)[::2] == [(name, "1") for name in ("model, int4", "model, bf16", "lookup", "both, int4", "self, int8")]
        assert sums["model, int4", "4"]["accepted"] < sums["model, bf16", "4"]["accepted"], "each with its own weights"
        assert {row["seed"] for row in results.read(tmp_path / "out.jsonl")[1]} == {3, 4}

    def test_sampled_runs_have_a_file_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sampled run moved the greedy results aside, and the tables showed it in their place."""
        monkeypatch.setattr(results, "FOLDER", tmp_path)
        for flags in ([], ["--temperature", "0.8"]):
            assert verify.main(["--pair", "tiny", "--limit", "1", "-K", "2", "--max-new-tokens", "4", "--no-cross-checks",
                                *flags]) == 0
        assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == ["verify-sampling.jsonl", "verify.jsonl"]

    def test_sampling_with_everything_on(self, tmp_path: Path) -> None:
        """A penalty whose history kept rejected tokens."""
        code, found = run(tmp_path, "-K", "4", "--temperature", "1.2", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01",
                          "--repetition-penalty", "1.3", "--no-cross-checks")
        assert (code, found["comparisons"], found["differences"]) == (0, 2, 0)


    def test_settings_that_contradict_each_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Three seeds of greedy decoding compared the same output thrice; --drafter beside --drafters was ignored."""
        with pytest.raises(ValueError, match="--seeds repeats the same greedy decoding"):
            verify.sampling_of(verify.parse_args(["--seeds", "1,2"]))
        with pytest.raises(SystemExit):
            verify.parse_args(["--drafters", "lookup", "--drafter", "model"])
        assert "--drafters stands in place of --drafter" in capsys.readouterr().err


class TestTheCheckCanFail:
    def test_an_accept_rule_that_takes_a_wrong_token(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A check that passes whatever the engine does."""
        honest = acceptance.choose

        def broken(logits, tokens, drafted, chooser):
            return [*drafted, 5][:1 + len(drafted)] if len(drafted) > 1 else honest(logits, tokens, drafted, chooser)

        monkeypatch.setattr(acceptance, "choose", broken)
        code, found = run(tmp_path, "-K", "3", "--no-cross-checks")
        assert (code, found["differences"]) == (1, 2)
        assert found["difference_details"][0]["difference"]["kind"] == "token ids"

    def test_bits_that_depend_on_the_width(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Equal ids hid other logits: the difference shows as token ids only in some later, longer run."""
        honest = Decoder.forward

        def wider_is_different(self, token_ids: Tensor, *rest, **named) -> Tensor:
            logits = honest(self, token_ids, *rest, **named)
            return torch.nextafter(logits, torch.tensor(torch.inf)) if 2 <= len(token_ids) <= 10 else logits  # no prefill

        monkeypatch.setattr(Decoder, "forward", wider_is_different)
        code, found = run(tmp_path, "-K", "3", "--no-cross-checks", "--drafter", "self")
        assert code == 1
        assert found["difference_details"][0]["difference"]["kind"] == "logit bits"
        assert found["difference_details"][0]["difference"]["ids_equal"]

    def test_negative_control_finds_unproven_widths(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The widths are the reason for the exactness, not luck: without them the same comparison differs."""
        code, found = run(tmp_path, "--negative-control", "--dtype", "fp32", "-K", "3,7")
        assert code == 0
        assert found["differences"] > 0
        assert "--backend torch" in capsys.readouterr().err

    def test_negative_control_that_finds_nothing_fails(self, tmp_path: Path) -> None:
        """A control that cannot fail controls nothing: with one token there is no second pass to differ."""
        code, found = run(tmp_path, "--negative-control", "-K", "3", "--max-new-tokens", "1")
        assert (code, found["differences"]) == (1, 0)
        assert "found no difference" in found["verdict"]


class TestCrossChecks:
    def test_fp32_equals_hugging_face(self, tmp_path: Path) -> None:
        """Our decoder is self-consistent and wrong."""
        code, found = run(tmp_path, "-K", "3", "--dtype", "fp32", "--max-new-tokens", "16")
        assert code == 0
        assert [(check["against"], check["verdict"]) for check in found["cross_checks"]] == [
            ("Hugging Face generate", "equal")] * 2

    def test_a_wrong_model_is_called_a_bug(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A cross-check that finds an excuse for everything."""
        honest = Decoder.forward
        monkeypatch.setattr(Decoder, "forward", lambda self, *a, **k: honest(self, *a, **k).roll(1, -1))
        code, found = run(tmp_path, "-K", "3", "--max-new-tokens", "8")
        assert (code, found["differences"]) == (1, 0)
        assert found["bugs"] > 0
        assert found["verdict"].startswith("FAILED")

    def test_torch_backend_checks_width_one_too(self, tmp_path: Path) -> None:
        """Width-1 decoding was compared with itself."""
        code, found = run(tmp_path, "-K", "3", "--backend", "torch", "--max-new-tokens", "16", "--cross-check-prompts", "1")
        assert code == 0
        assert [check["against"] for check in found["cross_checks"]] == ["width-1 decoding", "Hugging Face generate"]

    @pytest.mark.parametrize(("behind", "dtype", "verdict"), [
        (0.2, torch.bfloat16, "near-tie"), (0.3, torch.bfloat16, "bug"), (0.2, torch.float32, "bug"),
        (0.0005, torch.float32, "near-tie")])
    def test_verdict(self, behind: float, dtype: torch.dtype, verdict: str) -> None:
        """The gap was looked at from one side only, so a model that was sure of another token passed."""
        ours = Trace([7, 1, 5], [[(7, -0.1), (2, -3.0)], [(1, -0.5), (2, -0.5 - 1e-4)], [(5, -0.1), (2, -3.0)]])
        theirs = Trace([7, 2, 9], [[(7, -0.1), (2, -3.0)], [(2, -0.5), (1, -0.5 - behind)], [(9, -0.1), (2, -3.0)]])
        for check in (cross_check("p", "x", ours, theirs, dtype), cross_check("p", "x", theirs, ours, dtype)):
            assert (check.verdict, check.position) == (verdict, 1)

    def test_an_output_that_stops_short_is_a_bug(self) -> None:
        """An output cut off counted as equal to its beginning."""
        top = [[(1, -0.1), (2, -0.2)]] * 3
        assert cross_check("p", "x", Trace([1, 1], top[:2]), Trace([1, 1, 1], top), torch.bfloat16).verdict == "bug"

    def test_a_token_far_down_is_a_bug(self) -> None:
        """The top-2 gap was small, and the token that the other side chose was neither of the two."""
        ours, theirs = Trace([1], [[(1, -1.0), (2, -1.1), (3, -4.0)]]), Trace([9], [[(9, -1.0), (1, -1.1)]])
        assert cross_check("p", "x", ours, theirs, torch.bfloat16).verdict == "bug"


class TestShapes:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_measured_widths_reach_the_engine(self, tmp_path: Path, backend: str) -> None:
        """The widths were stored under another key than the engine reads; and what it then does must be exact."""
        code, found = run(tmp_path, "--shapes", "--backend", backend, "--dtype", "fp32")
        rows = results.read(tmp_path / "out.jsonl")[1]
        assert code == 0
        assert rows == found["shapes"]
        assert [row["width"] for row in rows] == list(CANDIDATES if backend == "native" else SLOW_CANDIDATES)
        args = verify.parse_args(["--pair", "tiny", "--backend", backend, "--dtype", "fp32"])
        widths = assemble.assemble(load_pair("tiny"), args).engine.widths
        assert widths.any_width == (backend == "native")
        assert list(widths.seconds) == [row["width"] for row in rows if row["proven"]]
        code, found = run(tmp_path, "-K", "1", "--backend", backend, "--dtype", "fp32", "--no-cross-checks")
        assert (code, found["differences"]) == (0, 0)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_row_that_depends_on_its_place_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      backend: str) -> None:
        """All widths computed a position in the same row, so that they agreed whatever the row's place did to its bits."""
        honest = Decoder.forward
        monkeypatch.setattr(Decoder, "forward", lambda self, ids, *a, **k: (
            honest(self, ids, *a, **k) + (torch.arange(len(ids)) == 7)[:, None]))
        code, found = run(tmp_path, "--shapes", "--backend", backend, "--dtype", "fp32")
        assert not any(row["proven"] for row in found["shapes"] if row["width"] >= 8)
        assert code == (backend == "native")

    def test_the_other_backends_rows_are_kept(self, tmp_path: Path) -> None:
        """PyTorch's widths replaced those of the kernels in the one file that the report's table is made from."""
        path = tmp_path / "shapes.jsonl"
        for backend, dtype in (("native", "bf16"), ("torch", "bf16"), ("torch", "fp32"), ("native", "bf16")):
            run(tmp_path, "--shapes", "--backend", backend, "--dtype", dtype, "--output", str(path))
        header, rows = results.read(path)
        assert (header["backend"], header["weights"], header["draft"]) == ("native", "bf16", None)
        measured = [(row["backend"], row["weights"]) for row in rows if row["type"] == "shape"]
        assert {key: measured.count(key) for key in measured} == {
            ("torch", "bf16"): len(SLOW_CANDIDATES), ("torch", "fp32"): len(SLOW_CANDIDATES), ("native", "bf16"): len(CANDIDATES)}
        table = tables.shapes(Findings(tmp_path))
        assert all(f"| {backend} | {weights} |" in table for backend, weights in measured)
        assert table.count("tiny-target") == 3, "each part says how it was measured"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0].replace("tiny-target", "other").replace(header["target_digest"], "0"), *lines[1:]]))
        run(tmp_path, "--shapes", "--backend", "native", "--output", str(path))
        assert "other" not in path.read_text(), "another model's rows have no place beside these"

    def test_a_native_width_that_differs_is_a_bug(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel whose bits depend on the width went unnoticed, since the others agreed."""
        honest = Decoder.forward
        monkeypatch.setattr(Decoder, "forward", lambda self, ids, *a, **k: honest(self, ids, *a, **k) + (len(ids) == 6))
        code, found = run(tmp_path, "--shapes", "--backend", "native")
        assert (code, found["any_width"]) == (1, False)
        assert [row["width"] for row in found["shapes"] if not row["proven"]] == [6]


class TestFlagsAndFiles:
    def test_fields_that_others_rely_on(self, tmp_path: Path) -> None:
        """A renamed field makes a caller read 'no differences' out of nothing."""
        _, found = run(tmp_path, "-K", "1,3", "--limit", "1", "--no-cross-checks")
        assert (found["comparisons"], found["differences"]) == (2, 0)
        header, rows = results.read(tmp_path / "out.jsonl")
        assert header["mode"] == "verify"
        assert [(row["id"], row["num_speculative_tokens"], row["equal"]) for row in rows] == [
            ("p0", "1", True), ("p0", "3", True)]

    @pytest.mark.parametrize(("flags", "words"), [
        (["--temperature", "0.8", "--coupling", "rejection"], "run_sampling.py --check"),
        (["--drafter", "none"], "nothing to verify"),
        (["--backend", "torch", "-K", "15"], "--shapes")])
    def test_what_cannot_be_compared_is_refused(self, tmp_path: Path, flags: list[str], words: str) -> None:
        """A check that compares what need not be equal, or nothing at all."""
        with pytest.raises(ValueError, match=words):
            run(tmp_path, *flags)

    def test_an_interrupted_run_leaves_no_older_outcome(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The JSON of the run before was read as that of the one that was cut off."""
        run(tmp_path, "-K", "1", "--limit", "1", "--no-cross-checks")
        monkeypatch.setattr(verify, "compare_all", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "-K", "1")
        assert not (tmp_path / "out.json").read_text()

    @pytest.mark.parametrize("text", ["", "model:int2", "lookup,modle", "model;bf16"])
    def test_unknown_drafters_are_a_usage_error(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A misspelt drafter that shows after the models were loaded."""
        with pytest.raises(SystemExit):
            verify.parse_args(["--drafters", text])
        assert "is not DRAFTER" in capsys.readouterr().err

    def test_draft_counts(self) -> None:
        """'dynamic' and numbers in one list; nonsense is a usage error."""
        assert verify.parse_args(["-K", "1, 3,dynamic"]).num_speculative_tokens == [1, 3, None]
        with pytest.raises(SystemExit):
            verify.parse_args(["-K", "1,-3"])
        assert cli.load_prompts(verify.parse_args([]).prompts)
