"""`mrp generate`: decode prompts with a checkpoint."""

import json

import yaml

from .cli import command_parser


def main(argv: list[str]):
    """Decode every prompt in one batch and print the new text, or one JSON object."""
    parser = command_parser(
        "generate",
        "Decode prompts in one batch. Any option of `generate` may follow as --name value, such as\n"
        "--mrp_mode spec, --mrp_steps 4, --remasking_strategy low_confidence_dynamic, --do_sample true.",
        'mrp generate sdar-1.7b-mrp --prompt "What is 7 times 8?" --mrp_mode spec --mrp_steps 4',
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id: ours, SDAR or published SDAR-MRP")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompt-file", help="one prompt per line, - for standard input")
    parser.add_argument("--head", help="folder or Hub id of a trained head to put on the backbone")
    parser.add_argument("--revision", help="revision of MODEL on the Hub")
    parser.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--seed", type=int, default=0, help="for --do_sample true (default: 0)")
    parser.add_argument("--device", help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's own")
    parser.add_argument("--stream", action="store_true", help="print blocks as they finish (one prompt)")
    parser.add_argument("--json", action="store_true", help="print texts, statistics and options as JSON")
    arguments, rest = parser.parse_known_args(argv)
    options = {"max_new_tokens": arguments.max_new_tokens} | generate_options(rest)
    from .prompts import read_prompts

    prompts = read_prompts(arguments)
    if arguments.stream and (len(prompts) != 1 or arguments.json):
        raise ValueError("--stream shows one prompt as text: give one --prompt and no --json")

    import torch

    from ..checkpoints.loading import load
    from ..evaluation.decoding import encode

    model, tokenizer = load(arguments)
    inputs = encode(tokenizer, prompts, raw=arguments.raw).to(model.device)
    torch.manual_seed(arguments.seed)
    streamer = _streamer(tokenizer) if arguments.stream else None
    output = model.generate(**inputs, **options, streamer=streamer, return_dict_in_generate=True)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    if arguments.json:
        print(json.dumps({"results": _results(prompts, texts, output), "options": options}))
    elif not arguments.stream:
        print("\n".join(texts))


def generate_options(rest: list[str]) -> dict:
    """{"mrp_steps": 4} of ["--mrp_steps", "4"]; values are read as YAML."""
    options = {}
    pairs = iter(rest)
    for name in pairs:
        if not name.startswith("--"):
            raise ValueError(f"unexpected argument {name!r}: options of generate are given as --name value")
        name, equals, value = name[2:].partition("=")
        value = value if equals else next(pairs, None)
        if value is None:
            raise ValueError(f"--{name} has no value: options of generate are given as --name value")
        options[name.replace("-", "_")] = yaml.safe_load(value)
    return options


def _streamer(tokenizer):
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _results(prompts, texts, output) -> list[dict]:
    """Per prompt: text, tokens per forward and the statistics of its row."""
    stats = {name: value.tolist() for name, value in vars(output.stats).items()}
    return [
        {
            "prompt": prompt,
            "text": text,
            "tokens_per_forward": output.tokens_per_forward[row].item(),
            **{name: values[row] for name, values in stats.items()},
        }
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
