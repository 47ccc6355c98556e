"""The `ola` command as people use it: what it prints, what it refuses, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.cli import main
from pipeline.readers import list_datasets

OLA = [sys.executable, "-m", "pipeline.cli"]


@pytest.fixture
def lines_file(tmp_path) -> Path:
    file = tmp_path / "lines.txt"
    file.write_text("The river did not flood.\n\nYes, it did.\r\nNobody knew why.\n", encoding="utf-8")
    return file


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def list_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")} if folder.exists() else {}


def materialize(model: Path, corpus: str, store: Path, *arguments: object) -> int:
    return run("materialize", "--model", model, "--corpus", corpus, "--store", store, *arguments)


def test_materialize_ends_with_a_table_and_the_lines_that_read_it(tiny_bert, lines_file, store, capsys):
    assert materialize(tiny_bert, f"text:{lines_file}", store) == 0
    printed = capsys.readouterr().out
    assert "tiny-bert/lines/all@v1" in printed
    assert "1 blank lines skipped" in printed
    code = printed.split("Read it:\n")[1].replace("\n  ", "\n").strip()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 (1, 2, 3) torch.Size([3, ")
    assert done.stdout.strip().endswith("The river did not flood.")


def test_a_second_materialize_is_up_to_date_and_imports_no_engine(tiny_bert, lines_file, store):
    assert materialize(tiny_bert, f"text:{lines_file}", store) == 0
    before = list_files(store)
    code = (
        "import sys; from pipeline.cli import main\n"
        f"code = main(['materialize', '--model', {str(tiny_bert)!r}, '--corpus', 'text:{lines_file}',"
        f" '--store', {str(store)!r}])\n"
        "assert not {'torch', 'transformers', 'zarr'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout
    assert list_files(store) == before


def test_ls_show_and_verify_agree(tiny_bert, lines_file, store, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store, "--tag", "first")
    capsys.readouterr()
    assert run("ls", "--json", "--store", store) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["ref"] == "tiny-bert/lines/all@v1"
    assert entry["tags"] == ["first"]
    assert run("show", "tiny-bert/lines/all@first", "--json", "--store", store) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["fingerprint"] == entry["fingerprint"]
    assert manifest["counts"]["samples"] == entry["samples"] == 3
    assert sum(stored["num_bytes"] for stored in manifest["objects"].values()) == entry["bytes"]
    assert run("show", entry["ref"], "--store", store) == 0
    assert "tiny-bert/lines/all@v1" in capsys.readouterr().out
    assert run("verify", entry["ref"], "--recompute", 3, "--model", tiny_bert, "--store", store) == 0
    assert "3 samples recomputed" in capsys.readouterr().out


def test_an_empty_store_lists_nothing(store, capsys):
    assert run("ls", "--json", "--store", store) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert not store.exists()


def test_registries_are_listed(capsys):
    assert run("models", "--json") == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"minilm-l6", "smollm2-135m", "gemma3-270m", "bert-base", "llama-3.1-8b"} <= names
    assert run("corpora", "--json") == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert names == {"sample", "ud-ewt", "conll2000", "semeval2010-task8", "wnut17"}


def test_verify_reports_damage_with_exit_code_1(tiny_bert, lines_file, store, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store)
    (shard,) = store.glob("tiny-bert/lines/all/*/order_2/c/0/0")
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    assert run("verify", "tiny-bert/lines/all", "--store", store) == 1
    assert str(shard) in capsys.readouterr().err


def test_recompute_finds_maps_of_another_model(tiny_bert, build_model, lines_file, store, tmp_path, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store)
    other = build_model(tmp_path / "other" / "tiny-bert", "bert", initializer_range=0.5)
    assert run("verify", "tiny-bert/lines/all", "--recompute", 1, "--model", other, "--store", store) == 2
    assert "revision" in capsys.readouterr().err


def test_dry_run_says_what_would_be_done_and_touches_nothing(tiny_llama, lines_file, store, capsys):
    assert materialize(tiny_llama, f"text:{lines_file}", store, "--dry-run") == 0
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.split()[:3] == ["would", "make", "samples"]
    assert row.split()[:2] == ["tiny-llama/lines/all", "3"]
    assert not store.exists()


def test_plot_draws_a_sample(tiny_bert, lines_file, store, tmp_path, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store)
    for name, magic in (("map.png", b"\x89PNG"), ("map.svg", b"<?xml")):
        assert run("plot", "tiny-bert/lines/all", "--sample", 1, "--output", tmp_path / name, "--store", store) == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert run("plot", "tiny-bert/lines/all", "--sample", 3, "--store", store) == 2
    assert "samples 0 to 2" in capsys.readouterr().err


REFUSED = {
    "order 0": (["--maps", "0"], "order 0 cannot be stored"),
    "a negative order": (["--maps=-1"], "order -1 cannot be stored"),
    "more orders than layers": (["--maps", "1,4"], "order 4 of tiny-bert does not exist"),
    "an unknown baseline": (["--maps", "1,entropy"], "unknown map 'entropy'"),
    "no map": (["--maps", ","], "no map requested"),
    "a length over the positions": (["--max-length", "65"], "maximum length 65 is over the 64 positions"),
    "a length below one": (["--max-length", "0"], "maximum length 0 is too small"),
    "a length without room": (["--max-length", "2"], "leaves no room"),
    "an unknown split": (["--split", "train"], "train"),
    "an unknown unit": (["--text-unit", "paragraph"], "paragraph"),
    "an unknown form": (["--text-form", "upper"], "upper"),
    "a limit of zero": (["--limit", "0"], "limit is 0"),
    "partitions of nothing": (["--partition-samples", "0"], "partition_samples is 0"),
    "batches of nothing": (["--batch-tokens", "0"], "batch-tokens is 0"),
    "a device that is not here": (["--device", "cuda:63"], "cuda:63"),
    "a tag that reads as a version": (["--tag", "v3"], "tag 'v3' is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_setting_is_refused_before_the_store_is_touched(case, tiny_bert, lines_file, store, capsys):
    settings, message = REFUSED[case]
    assert materialize(tiny_bert, f"text:{lines_file}", store, *settings) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert printed.count("ola: ") == 1
    assert not store.exists()


def test_an_existing_store_is_untouched_by_a_refusal(tiny_bert, lines_file, store):
    materialize(tiny_bert, f"text:{lines_file}", store)
    before = list_files(store)
    assert materialize(tiny_bert, f"text:{lines_file}", store, "--maps", "1,9") == 2
    assert materialize(tiny_bert, "text:no-such-file.txt", store) == 2
    assert list_files(store) == before


CORPUS_FAULTS = {
    "missing": (None, "no corpus file"),
    "empty": (b"", "lines.txt"),
    "blank": (b"\n \n\n", "lines.txt"),
    "binary": (b"\x7fELF\x00\x00", "lines.txt"),
    "not utf-8": ("Zürich\n".encode("latin-1"), "lines.txt"),
}


@pytest.mark.parametrize("fault", CORPUS_FAULTS)
def test_a_bad_text_file_is_refused_by_name(fault, tiny_bert, tmp_path, store, capsys):
    content, message = CORPUS_FAULTS[fault]
    file = tmp_path / "lines.txt"
    if content is not None:
        file.write_bytes(content)
    assert materialize(tiny_bert, f"text:{file}", store) == 2
    assert message in capsys.readouterr().err
    assert not store.exists()


ROW = "{0}\tword\tword\tNOUN\tNN\t_\t{1}\tdep\t_\t_\n"
CONLLU_FAULTS = {
    "wrong number of fields": "1\tword\tNOUN\n\n",
    "head out of range": ROW.format(1, 0) + ROW.format(2, 9) + "\n",
    "cycle": ROW.format(1, 2) + ROW.format(2, 1) + "\n",
}


@pytest.mark.parametrize("fault", CONLLU_FAULTS)
def test_a_bad_conllu_file_is_refused_with_file_and_line(fault, tiny_bert, tmp_path, store, capsys):
    file = tmp_path / "bad.conllu"
    file.write_text(ROW.format(1, 0) + "\n" + CONLLU_FAULTS[fault], encoding="utf-8")
    assert materialize(tiny_bert, f"conllu:{file}", store) == 2
    assert "bad.conllu:3" in capsys.readouterr().err or fault == "head out of range"
    assert not store.exists()


def test_stores_that_cannot_be_used_are_refused(tiny_bert, lines_file, tmp_path, capsys):
    a_file = tmp_path / "file"
    a_file.write_text("no store")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "ola-store.json").write_text('{"ola_store": 99}')
    for store, message in (
        (a_file, "is a file"),
        (a_file / "below", "cannot be written"),
        (foreign, "is no store"),
        (newer, "format 99, this release reads up to 1"),
        ("gs://bucket/store", "cannot be used: a store is a folder, or s3://bucket/prefix"),
        ("/proc/no-store", "cannot be written"),
    ):
        assert materialize(tiny_bert, f"text:{lines_file}", store) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    assert [path.name for path in newer.iterdir()] == ["ola-store.json"]


def test_unknown_names_are_refused(tiny_bert, lines_file, store, capsys):
    for arguments, message in (
        (["materialize", "--model", "no such model", "--corpus", "sample"], "unknown model 'no such model'"),
        (["materialize", "--model", tiny_bert, "--corpus", "brown"], "no corpus 'brown'"),
        (["show", "a/b/c"], "there is no store"),
        (["show", "a/b"], "there is no store"),
    ):
        assert run(*arguments, "--store", store) == 2
        assert message in capsys.readouterr().err
    materialize(tiny_bert, f"text:{lines_file}", store)
    for ref, message in (
        ("a/b", "is no ref"),
        ("a/b/c", "it has: tiny-bert/lines/all"),
        ("tiny-bert/lines/all@v2", "it has: v1"),
        ("../../etc@v1", "not allowed"),
    ):
        capsys.readouterr()
        assert run("verify", ref, "--store", store) == 2
        assert message in capsys.readouterr().err


def test_without_a_network_an_unknown_model_says_how_to_go_on(store, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    for model, message in (
        ("no-org/no-model", "--model path/to/model"),
        ("llama-3.2-3b", "HF_TOKEN"),
    ):
        command = [*OLA, "materialize", "--model", model, "--corpus", "sample", "--store", str(store)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not store.exists()


def test_wrong_usage_exits_with_2():
    for arguments in ([], ["materialise"], ["materialize", "--model", "x"], ["ls", "--no-such-option"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_a_tokenizer_larger_than_its_model_is_refused(build_model, lines_file, store, tmp_path, capsys):
    small = build_model(tmp_path / "small", "bert", vocab_size=100)
    assert materialize(small, f"text:{lines_file}", store) == 2
    assert "but the model has 100 embeddings" in capsys.readouterr().err
    assert not store.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["materialize", "--model", "~nosuchuser/x", "--corpus", "sample"],
        ["materialize", "--model", "[/b]", "--corpus", "sample"],
        ["materialize", "--model", "{model}", "--corpus", "text:~nosuchuser/x.txt"],
        ["materialize", "--model", "{model}", "--corpus", "text:[/b]x.txt"],
        ["materialize", "--model", "{model}", "--corpus", "text:{file}", "--maps", "9" * 5000],
        ["materialize", "--model", "{model}", "--corpus", "text:{file}", "--dry-run", "--tag", "v1"],
        ["plot", "tiny-bert/lines/all", "--sample", "1", "--maps", "0"],
        ["plot", "tiny-bert/lines/all", "--sample", "1", "--maps", "entropy"],
        ["plot", "tiny-bert/lines/all", "--sample", "1", "--output", "/no/such/folder/x.png"],
        ["verify", "tiny-bert/lines/all", "--recompute", "0"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_odd_words_on_the_command_line_give_one_message(arguments, tiny_bert, lines_file, store, capsys):
    words = [word.replace("{model}", str(tiny_bert)).replace("{file}", str(lines_file)) for word in arguments]
    assert run(*words, "--store", store) == 2
    assert capsys.readouterr().err.count("ola: ") == 1
    assert not store.exists()


def test_a_dry_run_refuses_what_the_real_run_refuses(build_model, lines_file, store, tmp_path, capsys):
    small = build_model(tmp_path / "small", "bert", vocab_size=100)
    assert materialize(small, f"text:{lines_file}", store, "--dry-run") == 2
    assert "but the model has 100 embeddings" in capsys.readouterr().err


def test_a_directory_named_like_a_registry_model_is_refused(build_model, lines_file, store, tmp_path, capsys):
    assert materialize(build_model(tmp_path / "minilm-l6", "bert"), f"text:{lines_file}", store) == 2
    assert "named like the registry's minilm-l6" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_config_with_fewer_layers_than_the_weights_is_refused(
    architecture, build_model, lines_file, store, tmp_path, capsys
):
    folder = build_model(tmp_path / "tiny", architecture)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert materialize(folder, f"text:{lines_file}", store, "--maps", 1) == 2
    assert "more layers than its config.json names" in capsys.readouterr().err


def test_control_characters_of_a_name_do_not_reach_the_terminal(tiny_bert, store, capsys):
    assert materialize(tiny_bert, "text:\x1b[31mred.txt", store) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_up_to_date_is_not_said_of_a_version_with_missing_objects(tiny_bert, lines_file, store, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store)
    (shard,) = store.glob("tiny-bert/lines/all/*/order_2/c/0/0")
    shard.unlink()
    capsys.readouterr()
    assert materialize(tiny_bert, f"text:{lines_file}", store) == 1
    printed = capsys.readouterr()
    assert str(shard) in printed.err
    assert "up to date" not in printed.out


def test_a_listing_names_what_is_damaged_and_lists_the_rest(tiny_bert, lines_file, store, capsys):
    materialize(tiny_bert, f"text:{lines_file}", store, "--tag", "kept")
    folder = store / "tiny-bert" / "lines" / "all"
    (folder / "_tags" / "stray.json").write_text("{}")
    (folder / "v7.json").write_text("no manifest")
    (folder / "v\u0663.json").write_text("no version")
    (store / "a copy").mkdir()
    (store / "a copy" / "lines").symlink_to(store / "tiny-bert" / "lines")
    capsys.readouterr()
    assert run("ls", "--json", "--store", store) == 1
    printed = capsys.readouterr()
    assert [entry["ref"] for entry in json.loads(printed.out)] == ["tiny-bert/lines/all@v1"]
    for damaged in ("stray.json", "v7.json", "a copy"):
        assert damaged in printed.err
    assert run("show", "tiny-bert/lines/all@v1", "--store", store) == 1
    assert "tiny-bert/lines/all@v1" in capsys.readouterr().out


def test_a_long_maximum_length_costs_nothing_where_texts_are_short(build_model, lines_file, store, tmp_path):
    folder = build_model(tmp_path / "long", "llama", max_position_embeddings=10**9, add_special_tokens=False)
    assert materialize(folder, f"text:{lines_file}", store, "--max-length", 10**9) == 0
    assert materialize(folder, f"text:{lines_file}", store) == 0
    long, default = (entry.bytes for entry in list_datasets(store))
    assert long == default


def test_texts_with_control_characters_are_drawn_as_valid_svg(tiny_bert, store, tmp_path):
    file = tmp_path / "odd.txt"
    file.write_text("vertical\x0btab and \x1b escape & <tag>\n", encoding="utf-8")
    materialize(tiny_bert, f"text:{file}", store)
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert run("plot", "tiny-bert/odd/all", "--sample", 0, "--output", picture, "--store", store) == 0
    ElementTree.parse(pictures[0])
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_a_key_that_stands_twice_is_refused(tiny_bert, store, tmp_path, capsys):
    file = tmp_path / "twice.jsonl"
    file.write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    assert materialize(tiny_bert, f"jsonl:{file}", store) == 2
    assert "twice.jsonl:2: not a JSON object (key 'text' stands twice)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300])
def test_a_path_too_long_is_refused(name, tiny_bert, lines_file, tmp_path, capsys):
    assert materialize(tiny_bert, f"text:{lines_file}", tmp_path / name) == 2
    assert run("ls", "--store", tmp_path / name) == 2
    assert len(capsys.readouterr().err) < 1200


def test_a_reader_that_goes_away_is_no_error_of_the_store():
    process = subprocess.Popen([*OLA, "models", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1
