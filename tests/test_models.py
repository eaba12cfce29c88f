"""Models are found, refused and converted as documented. No test reaches a network; every model here is tiny."""

import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoint
import models
import packaged
import tiny
from checkpoint import WEIGHTS, ModelError
from models import load_pair

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache, a hub and a package index that do not answer, and a cache folder of the test's own."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network in tests")

    def no_pip(command: list[str], **kwargs: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: Retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(packaged.subprocess, "run", no_pip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(name: str, folder: Path, **kwargs: Any) -> Path:
    """The tiny target or draft as a folder that save_pretrained() wrote."""
    pair = tiny.tiny_pair()
    which = pair.target if name == "target" else pair.draft
    assert which
    which.hf_model(torch.float32).save_pretrained(folder, **kwargs)
    pair.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save("target", root / "target")
    save("draft", root / "draft")
    return root


@pytest.fixture
def folders(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Fresh copies of a target's and a draft's folder, to damage at will."""
    for name in ("target", "draft"):
        shutil.copytree(saved / name, tmp_path / name)
    return tmp_path / "target", tmp_path / "draft"


def refusal(*args: Any, **kwargs: Any) -> str:
    """The text of the refusal, which must be one line and come soon."""
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_pair(*args, **kwargs)
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestTinyPair:
    def test_same_pair_at_every_call_and_the_callers_random_state_is_untouched(self) -> None:
        """A manual_seed in the constructor would reset every caller's random numbers."""
        torch.manual_seed(5)
        state = torch.get_rng_state()
        first, second = load_pair("tiny"), load_pair("tiny")
        assert first.draft and second.draft
        first.target.hf_model(torch.float32)
        assert torch.equal(torch.get_rng_state(), state)
        assert (first.target.digest, first.draft.digest) == (second.target.digest, second.draft.digest)
        assert first.target.digest != first.draft.digest

    def test_draft_agrees_on_some_tokens_and_not_on_all(self) -> None:
        """A draft that is always or never right hides bugs of the other path."""
        pair = load_pair("tiny")
        assert pair.draft
        target: Any = pair.target.hf_model(torch.float32)
        draft: Any = pair.draft.hf_model(torch.float32)
        ids = torch.tensor([pair.encode("def f(x):")])
        with torch.no_grad():
            text = target.generate(ids, max_new_tokens=80, do_sample=False)  # (1, prompt + 80)
            guesses = draft(text).logits.argmax(-1)
        agreement = (guesses[0, ids.shape[1] - 1 : -1] == text[0, ids.shape[1] :]).float().mean().item()
        assert 0.3 < agreement < 0.9
        assert text.shape[1] == ids.shape[1] + 80

    def test_any_text_survives_its_tokenizer(self) -> None:
        """A byte alphabet in the wrong order decodes to other letters."""
        pair = load_pair("tiny")
        text = "naïve 你好 👩‍👩‍👧\n\tend"
        ids = pair.encode(text, raw=True)
        assert ids == pair.tokenizer.encode(text)
        assert len(ids) == len(text.encode())
        assert pair.tokenizer.decode(ids) == text


class TestEncode:
    def test_template_unless_raw(self) -> None:
        """A chat model without its template rambles; a raw prompt with one is not what was asked."""
        pair = load_pair("tiny")
        assert pair.tokenizer.decode(pair.encode("hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert pair.tokenizer.decode(pair.encode("hi", raw=True)) == "hi"

    def test_empty_is_refused_but_blank_is_a_prompt(self) -> None:
        """An empty prompt crashed deep inside the first forward pass."""
        pair = load_pair("tiny")
        with pytest.raises(ValueError, match="empty"):
            pair.encode("")
        assert all(pair.encode(text, raw=raw) for text in (" ", "\n") for raw in (False, True))

    def test_half_an_emoji_from_stdin(self) -> None:
        """Lone surrogates made the tokenizer raise a Unicode traceback."""
        assert load_pair("tiny").encode("a\udcf0", raw=True) == load_pair("tiny").encode("a\ufffd", raw=True)


class TestFolders:
    def test_tensors_are_those_of_the_stock_model(self, folders: tuple[Path, Path]) -> None:
        """A tensor under another name or from another file gives plausible nonsense."""
        pair = load_pair(target=str(folders[0]), draft=str(folders[1]))
        stock = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
        assert pair.target.tensors().keys() == stock.keys()
        assert all(torch.equal(pair.target.tensors()[key], value) for key, value in stock.items())
        assert pair.target.num_parameters == sum(value.numel() for value in stock.values())
        assert pair.description.endswith("(as given)")
        assert pair.warnings == ()

    def test_sharded(self, tmp_path: Path, folders: tuple[Path, Path]) -> None:
        """Only the first shard was read."""
        save("target", tmp_path / "sharded", max_shard_size="100KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
        whole, shards = (load_pair(target=str(path)).target for path in (folders[0], tmp_path / "sharded"))
        assert all(torch.equal(whole.tensors()[key], shards.tensors()[key]) for key in whole.tensors())
        (tmp_path / "sharded" / shards.weights.files[-1].name).unlink()  # type: ignore[attr-defined]
        assert "is missing" in refusal(target=str(tmp_path / "sharded"))

    def test_digest_tells_weights_apart(self, folders: tuple[Path, Path]) -> None:
        """Cached measurements of one model were used for its fine-tuned twin of the same shape."""
        before = load_pair(target=str(folders[0])).target.digest
        assert before == load_pair(target=str(folders[0])).target.digest
        data = bytearray((folders[0] / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (folders[0] / WEIGHTS).write_bytes(data)
        assert before != load_pair(target=str(folders[0])).target.digest

    def test_stock_model_stops_on_every_end_token(self, folders: tuple[Path, Path]) -> None:
        """A chat model ran past its turn because only one of its end tokens was known."""
        (folders[0] / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
        target = load_pair(target=str(folders[0])).target
        assert target.end_token_ids == (258, 256)
        assert target.hf_model(torch.bfloat16).generation_config.eos_token_id == [258, 256]

    def test_end_tokens_from_all_sources(self, folders: tuple[Path, Path]) -> None:
        """The tokenizer's end token was forgotten when the config had another one."""
        config = folders[0] / "config.json"
        config.write_text(config.read_text().replace('"eos_token_id": 258', '"eos_token_id": 256'))
        (folders[0] / "generation_config.json").write_text('{"eos_token_id": 257}')
        assert load_pair(target=str(folders[0])).target.end_token_ids == (257, 256, 258)

    @pytest.mark.parametrize("damage", ["truncated", "garbage", "config", "tokenizer", "index"])
    def test_damaged_file_is_one_line(self, damage: str, folders: tuple[Path, Path]) -> None:
        """A truncated download ended in a traceback, or worse, in a model of random weights."""
        file = {"config": "config.json", "tokenizer": "tokenizer.json", "index": checkpoint.INDEX}.get(damage, WEIGHTS)
        path = folders[0] / file
        content = b"\x00junk" if damage in ("garbage", "index") else path.read_bytes()[:-7]
        path.write_bytes(content)
        message = refusal(target=str(folders[1]), draft=str(folders[0]))
        assert str(folders[0]) in message
        assert "is the folder of a model, and complete" in message and "delete" not in message, "it may hold other things"

    def test_only_a_cache_is_to_be_deleted(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A mistyped --target named as a folder to be deleted."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        hub = tmp_path / "hub" / "models--Qwen--Q"
        for folder, words in ((hub / "snapshots" / "abc", f"delete the folder {hub} "),
                              (tmp_path / "speculative-decoding" / "packaged", "delete the folder"), (tmp_path, "check that")):
            assert checkpoint.get_again(folder).startswith(words)

    def test_missing_tensor_is_not_made_up(self, folders: tuple[Path, Path]) -> None:
        """The library fills a missing tensor with random numbers and only warns."""
        from safetensors.torch import load_file, save_file

        tensors = load_file(folders[0] / WEIGHTS)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folders[0] / WEIGHTS, {"format": "pt"})
        with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            load_pair(target=str(folders[0])).target.hf_model(torch.float32)

    def test_pickles_are_never_loaded(self, folders: tuple[Path, Path]) -> None:
        """A .bin file runs code when it is loaded."""
        (folders[0] / WEIGHTS).rename(folders[0] / "pytorch_model.bin")
        assert "pickled" in refusal(target=str(folders[0]))

    def test_larger_draft_warns(self, folders: tuple[Path, Path]) -> None:
        """Target and draft swapped by mistake looked like a slow machine."""
        (warning,) = load_pair(target=str(folders[1]), draft=str(folders[0])).warnings
        assert "larger" in warning


class TestSharedTokenizer:
    def test_permuted_map_of_the_same_size_is_refused(self, folders: tuple[Path, Path]) -> None:
        """Equal vocabulary sizes were taken for equal vocabularies: every draft token meant something else."""
        path = folders[1] / "tokenizer.json"
        text = path.read_text("utf-8")
        path.write_text(text.replace('"A": 32,', '"A": 33,').replace('"B": 33,', '"B": 32,'), "utf-8")
        message = refusal(target=str(folders[0]), draft=str(folders[1]))
        assert "token id 32 is 'A' in the target and 'B' in the draft" in message
        assert str(folders[0]) in message
        assert str(folders[1]) in message

    def test_same_map_in_other_bytes_is_accepted(self, folders: tuple[Path, Path]) -> None:
        """Comparing files instead of maps refused a draft whose tokenizer.json had other line ends."""
        path = folders[1] / "tokenizer.json"
        path.write_text(path.read_text("utf-8").replace("\n", "\r\n"), "utf-8")
        assert load_pair(target=str(folders[0]), draft=str(folders[1])).draft

    def test_draft_with_too_few_embedding_rows_is_refused(
        self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The embedding lookup read out of bounds on the first special token."""
        pair = load_pair(target=str(folders[0]), draft=str(folders[1]))
        assert pair.draft
        monkeypatch.setattr(pair.draft.config, "vocab_size", 200)
        with pytest.raises(ModelError, match="200 embedding rows"):
            checkpoint.check_shared_tokenizer(pair.target, pair.draft, pair.tokenizer)


class TestNames:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"pair": "qwen3"}, ["unknown pair 'qwen3'", "qwen2.5-instruct"]),
            ({"draft": "x"}, ["--draft x", "--target"]),
            ({"pair": "tiny", "target": "x"}, ["exclude each other"]),
            ({"target": "no such/folder/here"}, ["no such/folder/here", "check the path"]),
            ({"target": "missing.gguf"}, ["missing.gguf", "no such file"]),
            ({"target": "organisation/model"}, ["organisation/model", "not reachable", "--pair packaged"]),
            ({"target": "packaged:other"}, ["packaged:other", "qwen2.5-coder-1.5b-instruct"]),
            ({"target": __file__}, [".gguf"]),
            ({"pair": "qwen2.5"}, ["Qwen/Qwen2.5-1.5B", "--pair packaged"]),
            ({"pair": "auto"}, ["packaged model qwen2.5-coder-1.5b-instruct", "No matching distribution", "--target"]),
        ],
    )
    def test_refused_in_one_line_with_a_remedy(self, arguments: dict[str, str], words: list[str]) -> None:
        """A mistyped name or a missing network ended in forty lines of another library's traceback."""
        message = refusal(**arguments)
        assert all(word in message for word in words), message

    def test_bad_draft_is_refused_before_the_target_is_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A typo in --draft was reported after three gigabytes of target."""
        monkeypatch.setattr(packaged, "prepare", lambda *args: pytest.fail("downloaded first"))
        assert "bad draft" in refusal(target="packaged:qwen2.5-coder-1.5b-instruct", draft="./bad draft")


class TestHub:
    @staticmethod
    def hub_tree(hub: Path, name: str, source: Path) -> Path:
        root = hub / f"models--{name.replace('/', '--')}"
        shutil.copytree(source, root / "snapshots" / ("0" * 40))
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        return root

    def test_auto_prefers_what_the_hub_cache_holds(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """A machine with the models but without network downloaded the packaged pair."""
        for name, source in zip(models.HUB_PAIRS["qwen2.5"], folders, strict=True):
            self.hub_tree(tmp_path / "hub", name, source)
        pair = load_pair()
        assert pair.target.name == "Qwen/Qwen2.5-1.5B"
        assert "cache" in pair.description

    def test_cache_folder_itself_as_target(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """A models--organisation--name folder has no config.json at its top."""
        root = self.hub_tree(tmp_path / "elsewhere", "some/model", folders[0])
        assert load_pair(target=str(root)).target.folder == root / "snapshots" / ("0" * 40)

    def test_incomplete_snapshot_is_not_taken_for_a_model(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """An interrupted download counted as cached."""
        root = self.hub_tree(tmp_path / "hub", "some/model", folders[0])
        (root / "snapshots" / ("0" * 40) / WEIGHTS).unlink()
        assert "not in the Hugging Face cache" in refusal(target="some/model")

    def test_hf_home_and_offline_mode_from_the_environment(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """The cache was looked for in the default place only."""
        self.hub_tree(tmp_path / "home" / "hub", "some/model", folders[0])
        code = "import models; p = models.load_pair(target='some/model'); print(p.target.num_parameters)"
        environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_HUB_CACHE", None)
        done = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        assert int(done.communicate()[0]) == load_pair(target=str(folders[0])).target.num_parameters

    def test_silent_network_is_given_up_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A network that swallows packets held the start for minutes."""
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: time.sleep(30))
        assert models.HUB_PROBE_SECONDS + 0.5 < 5
        monkeypatch.setattr(models, "HUB_PROBE_SECONDS", 0.1)
        start = time.monotonic()
        assert models.hub_status("some/model") == "is not reachable"
        assert time.monotonic() - start < 2

    def test_auto_falls_back_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The user could not tell which models ran, nor why."""
        monkeypatch.setattr(models, "packaged_pair", lambda cache, reason: reason)
        assert load_pair() == "the hub is not reachable"  # type: ignore[comparison-overlap]
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in str(load_pair())

    def test_download_takes_no_pickles_and_no_code(
        self, monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """snapshot_download without patterns fetches .bin and .py files too."""
        asked: dict[str, Any] = {}

        def download(name: str, local_files_only: bool = False, **kwargs: Any) -> str:
            if local_files_only:
                raise FileNotFoundError
            asked.update(kwargs)
            return str(folders[0])

        Info, File = namedtuple("Info", "siblings"), namedtuple("File", "rfilename")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: Info([File(WEIGHTS)]))
        assert load_pair(target="some/model").target.folder == folders[0]
        assert all(pattern.endswith((".safetensors", ".json", ".txt", ".jinja")) for pattern in asked["allow_patterns"])
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: Info([File("a.bin")]))
        assert "no safetensors" in refusal(target="some/model")
