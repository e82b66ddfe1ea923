"""`mrp trajectories`: the states that decoding visits, as training data for the head.

The backbone decodes the prompts by itself. Its text, and the denoising step at which each token was revealed, give
every state that each block went through; `spec` accepts a draft only if it leads to the next of these states.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset

from modeling_mrp import MRPForDiffusionLM

from ..commands.cli import command_parser
from ..data.rows import load_source, pack, prepare_dataset
from .acceptance import prompts_of
from .decoding import decode_prompts, end_of_text_ids

# the same text as by the backbone alone, in fewer forwards
LOSSLESS = {"mrp_mode": "spec", "mrp_draft": "self", "mrp_steps": 2, "do_sample": False}


def trajectories(
    model: MRPForDiffusionLM, prompts: Sequence[list[int]], *, max_new_tokens: int, batch_size: int = 64, **options
) -> Iterator[dict]:
    """Yield rows for `MRPTrainer` with the model's own answers, in the order of the prompts.

    Args:
        model: the model, in eval mode; only its backbone decides what is revealed.
        prompts: token ids of each prompt.
        max_new_tokens: limit per prompt.
        batch_size: prompts decoded together.
        **options: options of `generate`, such as the step rule; those not named are the checkpoint's own.

    Yields:
        A row with `input_ids`, `answer_mask`, `lengths` and `sample_ids` as in `mrp_trainer.data.rows`, and
        `reveal_steps` [S]: the denoising step, within its block, that revealed each token, -1 in the prompt. When a
        text ends within a block, the rest of that block is filled with the end-of-text token, with the step -1 where
        decoding left a mask.
    """
    size, options = model.config.block_size, LOSSLESS | options
    ends = end_of_text_ids(model, options)
    answers = decode_prompts(model, prompts, options, max_new_tokens, batch_size, checkpoint_defaults=True)
    for number, (prompt, decoded) in enumerate(zip(prompts, answers, strict=True)):
        answer = decoded.token_ids
        if answer[-1] in ends:
            answer = answer + [answer[-1]] * (-(len(prompt) + len(answer)) % size)
        steps = (decoded.reveal_steps + [-1] * size)[: len(answer)]
        yield {
            "input_ids": prompt + answer,
            "answer_mask": [0] * len(prompt) + [1] * len(answer),
            "lengths": [len(prompt) + len(answer)],
            "sample_ids": [number],
            "reveal_steps": [-1] * len(prompt) + steps,
        }


def packed(rows: Sequence[dict], sequence_length: int) -> list[dict]:
    """Join rows of `trajectories` into rows of up to `sequence_length` tokens; longer ones stay by themselves."""
    lengths = [min(row["lengths"][0], sequence_length) for row in rows]
    return [
        {column: [value for member in members for value in rows[member][column]] for column in rows[0]}
        for members in pack(lengths, sequence_length)
    ]


def with_room(
    prompts: Sequence[list[int]], max_new_tokens: int, block_size: int, sequence_length: int
) -> list[list[int]]:
    """Return the prompts whose longest answer, up to the end of its last block, fits into `sequence_length` tokens.

    Raises:
        ValueError: if no prompt does.
    """
    room = sequence_length // block_size * block_size - max_new_tokens
    kept = [prompt for prompt in prompts if len(prompt) <= room]
    if not kept:
        raise ValueError(
            f"none of {len(prompts)} prompts leaves room for {max_new_tokens} new tokens within {sequence_length}: "
            "raise --sequence-length or lower --max-new-tokens"
        )
    return kept


def main(argv: list[str]):
    """Decode the prompts of a data set and write rows that `mrp train --train_data OUT` takes."""
    parser = command_parser(
        "trajectories",
        "Decode the prompts of training data with the backbone and keep in which order it revealed what. A head\n"
        "trained on these rows sees the states that decoding visits instead of random ones.",
        "mrp trajectories sdar-1.7b --data chats.jsonl --out chats.parquet",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id: ours, SDAR or published SDAR-MRP")
    parser.add_argument("--data", required=True, help="as train_data of mrp train; prompts are what is not supervised")
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("--out", required=True, type=Path, help="parquet file to write")
    parser.add_argument("--samples", type=int, help="at most so many (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens of a packed row (default: 1024)")
    parser.add_argument("--options", default="{}", help='of generate, as JSON: {"remasking_strategy": "sequential"}')
    parser.add_argument("--revision", help="revision of MODEL on the Hub")
    parser.add_argument("--head", help="folder or Hub id of a trained head: speeds the decoding up")
    parser.add_argument("--device", help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's own")
    arguments = parser.parse_args(argv)
    for name in ("samples", "max_new_tokens", "batch_size", "sequence_length"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.out.suffix != ".parquet":
        raise ValueError(f"--out must end in .parquet, got {arguments.out}")

    from ..checkpoints.loading import load

    model, tokenizer = load(arguments)
    source = load_source(arguments.data, split=arguments.split)
    rows = prepare_dataset(source, tokenizer, sequence_length=2**31, packing=False)
    count = len(rows) if arguments.samples is None else arguments.samples
    wanted = prompts_of(rows, count, model.config.block_size)
    prompts = with_room(wanted, arguments.max_new_tokens, model.config.block_size, arguments.sequence_length)
    if len(prompts) < len(wanted):
        print(f"{len(wanted) - len(prompts)} of {len(wanted)} prompts leave no room for an answer: left out")
    options = json.loads(arguments.options)
    found = []
    for row in trajectories(
        model, prompts, max_new_tokens=arguments.max_new_tokens, batch_size=arguments.batch_size, **options
    ):
        found.append(row)
        if len(found) % arguments.batch_size == 0 or len(found) == len(prompts):
            print(f"\r{len(found)} of {len(prompts)} prompts", end="", flush=True)
    result = Dataset.from_list(packed(found, arguments.sequence_length))
    temporary = arguments.out.with_name(arguments.out.name + ".new")
    result.to_parquet(str(temporary))
    temporary.replace(arguments.out)
    print(f"\n{sum(map(sum, result['answer_mask']))} answer tokens in {len(result)} rows: {arguments.out}")
