"""The `ola` command: parses, calls the pipeline, prints. Exit codes: 0, 1 failed or damaged, 2 bad input, 130, 143."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.commands import exchange, materialize, registries, stored, upkeep
from pipeline.commands.terminal import complain
from pipeline.store.catalog import choose_store
from storage_schema.errors import OlaError
from storage_schema.recipe import COMPUTE_DTYPES, STORE_DTYPES, VARIANTS

# Quiet libraries: one set of progress bars, and warnings only where they are ours.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Terminated(BaseException):
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; wrong usage exits with 2."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except OlaError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Whoever read the output has gone (`ola ls | head`); at exit Python would complain of what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = error.filename or f"the store {choose_store(getattr(options, 'store', None))}"
        complain(f"{error.strerror or error}: {place}; mend it and run the same command again")
        return 1
    except MemoryError as error:
        complain(f"out of memory ({error}); what is finished stays: with more memory the same command goes on")
        return 1
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to go on")
        return 130
    except _Terminated:
        complain("terminated; run the same command again to go on")
        return 143
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(*_: object) -> NoReturn:
    raise _Terminated


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ola", description="A feature store for Order-Level Attention maps.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, *, store: bool
    ) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.set_defaults(run=run)
        if store:
            command.add_argument("--store", help="a folder or s3://bucket/prefix (default: OLA_STORE, else data/store)")
        return command

    command = add("materialize", materialize.materialize, "run a model over a corpus and store its maps", store=True)
    _add_materialize_options(command)
    command = add(
        "models", registries.list_models, "list the models that have a name here, or look into one", store=False
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help="load it and say how its attention is read")
    command.add_argument("--device", default="auto")
    command.add_argument("--json", action="store_true")
    command = add("corpora", registries.list_corpora, "list the corpora that have a name here", store=False)
    command.add_argument("--json", action="store_true")
    add("ls", stored.list_stored, "list what a store holds", store=True).add_argument("--json", action="store_true")
    command = add("show", stored.show, "show one version", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("--json", action="store_true", help="the whole manifest")
    command = add("verify", stored.verify, "check a version: digests, row sums, triangle, samples", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("--recompute", type=int, metavar="N", help="also run the LM on N samples again and compare")
    command.add_argument("--model", help="with --recompute: the model's directory, where it is a local one")
    command.add_argument("--device", default="auto")
    command = add("tag", stored.tag, "let a name stand for a version", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("name", metavar="NAME")
    command = add("diff", exchange.compare, "say what differs between two versions", store=True)
    command.add_argument("first", metavar="REF")
    command.add_argument("second", metavar="REF")
    command.add_argument("--other-store", help="where the second one is (default: the same store)")
    command.add_argument("--json", action="store_true")
    command = add("export", exchange.export, "write one version into a new folder, as a store of its own", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("folder", metavar="DIR", help="a folder that is not there yet")
    command = add("repair", upkeep.repair, "make damaged objects of a version again", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("--model", help="the model's directory, where it is a local one")
    command.add_argument("--corpus", help="the corpus, where it is a file: text:FILE, jsonl:FILE, conllu:FILE")
    command.add_argument("--device", default="auto")
    command = add("rm", upkeep.remove, "remove one version, its arrays and its tags", store=True)
    command.add_argument("ref", metavar="REF", help="with its version, as in DATASET@v3")
    command = add("gc", upkeep.collect, "say what nothing in a store refers to, or remove it", store=True)
    command.add_argument("--apply", action="store_true", help="remove it")
    command.add_argument("--unfinished", action="store_true", help="also unfinished work that no live process is on")
    command.add_argument("--json", action="store_true")
    command = add("plot", stored.plot, "draw the maps of one sample", store=True)
    command.add_argument("ref", metavar="REF")
    command.add_argument("--sample", type=int, required=True, metavar="I", help="its position in the dataset")
    command.add_argument("--maps", help="which of the stored maps (default: all)")
    command.add_argument("--output", type=Path, help="a .png or .svg file (default: <dataset>-I.png here)")
    return parser


def _add_materialize_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", required=True, help="a registry name (`ola models`), a hub id org/name[@commit], or a directory")
    add(
        "--corpus",
        required=True,
        help="a registry name (`ola corpora`), text:FILE, jsonl:FILE, conllu:FILE, hf:ORG/NAME",
    )
    add("--split", default="all", help="one split, or all (default)")
    add("--maps", default="1,2,3", help="orders and baselines, such as 1,2,rollout (default 1,2,3)")
    add(
        "--max-length", type=int, metavar="N", help="tokens, special ones included (default: 512, or the model's limit)"
    )
    add("--limit", type=int, metavar="N", help="only the first N samples")
    add("--text-unit", default="sentence", help="sentence (default), document, or words:N")
    add("--text-form", default="original", help="original (default), or words joined by single spaces")
    add("--variant", choices=VARIANTS, help="a control in place of the genuine weights")
    add("--seed", type=int, metavar="N", help="the variant's seed (default 0)")
    add("--dtype", default="float32", choices=COMPUTE_DTYPES, help="of the weights (default float32)")
    add("--store-dtype", default="float16", choices=STORE_DTYPES, help="of the stored maps (default float16)")
    add("--partition-samples", type=int, default=1024, metavar="N")
    add("--device", default="auto", help="a torch device (default: the first GPU, else the CPU)")
    add("--batch-tokens", type=int, metavar="N", help="padded tokens in a batch")
    add("--tag", metavar="NAME", help="a name for the version")
    add("--trust-remote-code", action="store_true", help="let the model's repository run code of its own")
    add("--dry-run", action="store_true", help="only say what would be done")


if __name__ == "__main__":
    sys.exit(main())
