"""`ravnest generate`: text from the model of a run, without putting the model together on one PC."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from ravnest.cli.options import Debug
from ravnest.errors import LinkError

if TYPE_CHECKING:
    from ravnest.cli.target import CoordinatorTarget
    from ravnest.run.generate import Candidates, Predict

__all__ = ["generate"]

_PREDICTION_S = 150.0


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN|TICKET", help="Directory of a run, or a ticket of a running one.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; with --ids, token ids separated by commas.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most probable token; 1: as the model's probabilities say.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer of transformers, instead of the job's own.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Read and print token ids; needs no tokenizer.")] = False,
    job: Annotated[Path | None, typer.Option(help="The job file, if the run does not name it.")] = None,
    debug: Debug = False,
) -> None:
    """Continue a text with the model of a run, which no PC holds whole.

    A run that trains predicts with its stages, between two microbatches. Of a run that has ended, the newest checkpoint
    or the final model is read piece by piece.

    Example: `ravnest generate runs/mine --prompt "Once upon a time"`
    """
    from ravnest.run.generate import generate_tokens

    target = _running(run)
    coder = _coder(run, tokenizer, job) if not ids else _Numbers()
    start = list(coder.encode(prompt))
    stop = getattr(coder, "eos_token_id", None)
    shown = ""
    with _predictor(run, target, job) as predict:
        made: list[int] = []
        for token in generate_tokens(predict, start, tokens, temperature=temperature, seed=seed, stop=stop):
            made.append(token)
            text = coder.decode(start + made)
            if not shown:
                shown = text if not text.startswith(prompt) else prompt
                sys.stdout.write(shown)
            if text.startswith(shown) and not text.endswith("\ufffd"):  # else a character is not complete yet
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
    sys.stdout.write("\n")


class _Numbers:
    """Token ids, separated by commas."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"--prompt must be token ids separated by commas with --ids, got {text!r}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return ",".join(map(str, ids))


def _coder(run: str, folder: Path | None, job: Path | None) -> Any:
    """Return the tokenizer of the option or of the job."""
    if folder is not None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError("--tokenizer needs the package transformers") from error
        try:
            return AutoTokenizer.from_pretrained(folder)
        except OSError as error:
            raise ValueError(f"{folder} has no tokenizer: {error}") from error
    if (job is None and not Path(run).is_dir()) or (found := _job(run, job).tokenizer) is None:
        raise ValueError("no tokenizer is known: give --tokenizer, Job(tokenizer=...), or token ids with --ids")
    return found


def _job(run: str, job: Path | None) -> Any:
    from ravnest.run.checkpoint.export import job_of

    return job_of(Path(run), job, "generating needs the model and its tokenizer")


@contextlib.contextmanager
def _predictor(run: str, target: CoordinatorTarget | None, job: Path | None) -> Iterator[Predict]:
    """Yield the prediction by the running stages, else by the weights of the run's directory."""
    from ravnest.run.generate import CheckpointPredictor

    if target is not None:
        with asyncio.Runner() as runner:
            yield lambda tokens: runner.run(_ask(target, tokens))
        return
    with CheckpointPredictor(Path(run), _job(run, job)) as predict:
        Console(stderr=True).print(f"from {predict.source.description}, step {predict.source.step}", highlight=False)
        yield predict


def _running(run: str) -> CoordinatorTarget | None:
    """Return the coordinator of a running run; None for the directory of a run that has ended."""
    from ravnest.cli.target import find_target

    is_directory = Path(run).is_dir()
    try:
        return find_target(run)
    except ValueError:
        if not is_directory:
            raise
        return None


async def _ask(target: CoordinatorTarget, tokens: Sequence[int]) -> Candidates:
    from aiohttp import ClientTimeout

    options = {"headers": dict(target.headers), "timeout": ClientTimeout(total=_PREDICTION_S)}
    async with target.connect() as client:
        answer = await client.ask("POST", "/v1/predict", json={"tokens": list(tokens)}, **options)
    try:
        decoded = msgspec.json.decode(answer, type=_Answer)
    except ValueError as error:
        raise LinkError(f"could not decode the coordinator's prediction: {error}") from error
    return decoded.tokens, decoded.scores


class _Answer(msgspec.Struct):
    tokens: list[int]
    scores: list[float | None]
