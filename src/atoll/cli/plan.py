"""Say what a model would need on your GPUs and links, and how fast it would train; nothing is started.

examples:
  atoll plan --model llama3-8b --gpus 8 --gpu-memory 80GB --link 1Gbit --sites 4
  atoll plan --model llama3-70b --gpus 64 --link 10Gbit --sites 3 --batch 256
  atoll plan --model llama3-1b --every 100 --strategy diloco-int4 streaming
  atoll plan --model llama3-8b --sequence 131072 --batch 1
  atoll plan --model llama-350m --step-s 0.8 --link 50Mbit --rtt-ms 120
  atoll plan --model llama3-8b --format json | python -m json.tool

layouts of a site's GPUs are products of dp_replicate, dp_shard, cp, tp and pp with 1f1b, and ep; zero=1, zero=2 and
other schedules are not tried
formulas and their sources: docs/plan.md
"""

from __future__ import annotations

import argparse
import json
import re

from atoll.protocol.errors import ConfigError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]i?|)(b|bit|bit/s|bps)", re.IGNORECASE)
MOST = {"gpus": 1 << 12, "sites": 1 << 10, "batch": 1 << 20, "sequence": 1 << 24, "every": 1 << 30}

PEAK_TFLOPS = {"bf16": 989.0, "fp32": 67.0}
"""Of an H100, dense, by its data sheet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from atoll.node.plan.syncs import STRATEGIES
    from atoll.protocol.model_settings import MODELS

    parser.add_argument("--model", metavar="NAME", required=True, help=", ".join(MODELS))
    parser.add_argument("--gpus", metavar="N", type=int, default=8, help="of each site (default: 8)")
    parser.add_argument("--gpu-memory", metavar="SIZE", default="80GB", help="of each GPU (default: 80GB)")
    parser.add_argument("--link", metavar="RATE", default="1Gbit", help="of each site, each way (default: 1Gbit)")
    parser.add_argument("--rtt-ms", metavar="MS", type=float, default=30.0, help="between two sites (default: 30)")
    parser.add_argument("--sites", metavar="N", type=int, default=4, help="default: 4")
    parser.add_argument("--batch", metavar="N", type=int, help="sequences a step and site (default: 2 a GPU)")
    parser.add_argument(
        "--sequence",
        metavar="N",
        type=int,
        help="tokens (default: 4096, or the model's longest; with a longer one a model that has it is planned)",
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--flops", metavar="TFLOPS", type=float, help="peak of a GPU (default: an H100's, 989 in bf16, 67 in fp32)"
    )
    parser.add_argument("--step-s", metavar="S", type=float, help="a step's seconds, where you have measured them")
    parser.add_argument("--every", metavar="H", type=int, help="steps between syncs (default: each strategy's own)")
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        nargs="+",
        default=[],
        help=f"of {', '.join(STRATEGIES)} (default: all); the node's needs are those of the first",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    from atoll.cli.plan_report import text
    from atoll.node.plan.plan import Question, plan
    from atoll.node.plan.syncs import Link

    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name} {value}: choose 1 to {most}")
    for name in ("flops", "step_s"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e12:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be more than 0")
    if not 0 <= args.rtt_ms < 1e6:
        raise ConfigError(f"--rtt-ms {args.rtt_ms:g}: must be at least 0")
    found = plan(
        Question(
            model=args.model,
            num_gpus=args.gpus,
            gpu_bytes=round(quantity("--gpu-memory", args.gpu_memory, is_bits=False)),
            link=Link(
                bits_per_s=quantity("--link", args.link, is_bits=True), rtt_s=args.rtt_ms / 1e3, num_sites=args.sites
            ),
            batch=args.batch,
            sequence=args.sequence,
            flops=(args.flops or PEAK_TFLOPS[args.precision]) * 1e12,
            step_s=args.step_s,
            precision=args.precision,
            every=args.every,
            strategies=tuple(dict.fromkeys(args.strategy)),
        )
    )
    print(json.dumps(found.document()) if args.format == "json" else text(found))
    return 0


def quantity(flag: str, said: str, *, is_bits: bool) -> float:
    """`80GB`, `24GiB`; `1Gbit`, `200Mbit/s`. Raises ConfigError."""
    if re.fullmatch(r"0[0.]*[a-z/ ]*", said.strip(), re.IGNORECASE):
        raise ConfigError(f"{flag} {said}: must be more than 0")
    match = QUANTITY.fullmatch(said.strip())
    example = "200Mbit or 1Gbit" if is_bits else "80GB or 24GiB"
    if match is None or (match[3].lower() != "b") != is_bits or match[2].lower() not in UNITS:
        raise ConfigError(f"{flag} {said}: say it like {example}")
    return float(match[1]) * UNITS[match[2].lower()]
